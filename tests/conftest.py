"""Settings that every test shares: one thread (two on two cores fight), properties from a fixed seed."""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch  # noqa: E402
from hypothesis import settings  # noqa: E402

torch.set_num_threads(1)
settings.register_profile("course", deadline=None, derandomize=True, max_examples=40)
settings.load_profile("course")
