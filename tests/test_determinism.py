"""Which digits to trust: the same measurement with other batch sizes and another number of threads."""

from collections.abc import Callable

import pytest
import torch

from helpers import attention, cka, shapes, skips, zoo

IMAGES = shapes.draw(256, seed=77).images
MEASURES: dict[str, Callable] = {  # batches -> one tensor
    "attention distance (px)": lambda batches: attention.mean_distance(zoo.load("vit"), batches),
    "norm ratio": lambda batches: skips.norm_ratios(zoo.load("vit"), batches).patches,
}
TOLERANCE = {"attention distance (px)": 1e-4, "norm ratio": 1e-3, "CKA": 1e-5}  # as the page on reproducibility says


def similarity(threads: int) -> torch.Tensor:
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        return cka.compare(zoo.load("vit"), zoo.load("resnet"), IMAGES[:128].split(64)).values
    finally:
        torch.set_num_threads(before)


def difference(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a - b).abs().max())


@pytest.mark.parametrize("measure", MEASURES)
@pytest.mark.parametrize("size", [32, 128])
def test_batch_size_does_not_show(measure, size):
    whole = MEASURES[measure](IMAGES.split(256))
    assert difference(whole, MEASURES[measure](IMAGES.split(size))) < TOLERANCE[measure]


def test_threads_do_not_show():
    assert difference(similarity(1), similarity(2)) < TOLERANCE["CKA"]
