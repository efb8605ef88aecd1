"""Networks of real size on real photographs, where they are at hand: what is known of them must come out.

The folder (environment variable COURSE_REAL, or `shared/real` beside the repository) holds a DINOv2 ViT-S/14, a
ResNet-50 and photographs.
"""

import os
from pathlib import Path

import numpy as np
import pytest
import timm
import torch

from helpers.cka import compare

REAL = Path(os.environ.get("COURSE_REAL", Path(__file__).parents[2] / "shared" / "real"))
N_IMAGES, BATCH = 32, 16

pytestmark = pytest.mark.skipif(
    not (REAL / "resnet50.safetensors").is_file(),
    reason="no folder of real networks and photographs; set COURSE_REAL to one to run these",
)


def load(name, file, **options):
    from safetensors.torch import load_file

    model = timm.create_model(name, num_classes=0, **options)
    model.load_state_dict({key: value.float() for key, value in load_file(REAL / file).items()})
    return model


@pytest.fixture(scope="module")
def resnet():
    return load("resnet50", "resnet50.safetensors")


@pytest.fixture(scope="module")
def vit():
    return load("vit_small_patch14_dinov2", "vit_small_patch14_dinov2.safetensors", img_size=518, dynamic_img_size=True)


@pytest.fixture(scope="module")
def batches():
    from PIL import Image

    files = sorted(path for path in (REAL / "images").iterdir())[:: 256 // N_IMAGES][:N_IMAGES]
    photos = [np.asarray(Image.open(path).convert("RGB").resize((224, 224))) for path in files]
    return (torch.tensor(np.stack(photos)).permute(0, 3, 1, 2) / 255).split(BATCH)  # (n, h, w, 3) to (n, 3, h, w)


def standardised(images):
    mean, std = (torch.tensor(v)[:, None, None] for v in ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)))
    return (images - mean) / std


@pytest.fixture(scope="module")
def maps(vit, resnet, batches):
    """ViT with itself, ResNet with itself, ViT with ResNet: (12, 12), (16, 16), (12, 16)."""
    prepare = (standardised, standardised)
    return (
        compare(vit, vit, batches, transforms=prepare).values,
        compare(resnet, resnet, batches).values,
        compare(vit, resnet, batches, transforms=(standardised, None)).values,
    )


def test_the_resnet_has_blocks_at_its_stages(maps):
    stage = torch.tensor([0] * 3 + [1] * 4 + [2] * 6 + [3] * 3)
    values, same = maps[1], stage[:, None] == stage
    off_diagonal = ~torch.eye(16, dtype=torch.bool)
    assert float(values[same & off_diagonal].mean()) > float(values[~same].mean()) + 0.2


def test_the_vit_is_smooth_and_falls_with_distance_in_depth(maps):
    values = maps[0]
    by_distance = torch.stack([values.diagonal(k).mean() for k in range(12)])
    assert bool((by_distance.diff() < 0.05).all())  # few images, so the far corner is noisy
    assert float(by_distance[1]) > 0.85
    assert float(by_distance[11]) < 0.4
    steps = values.diff(dim=0).abs().amax()
    assert float(steps) < 0.5  # nowhere a cliff between neighbours


def test_maps_are_finite_symmetric_and_one_on_the_diagonal(maps):
    for values in maps[:2]:
        assert torch.allclose(values, values.T, atol=1e-6)
        assert torch.allclose(values.diagonal(), torch.ones(len(values), dtype=values.dtype))
    assert maps[2].shape == (12, 16) and bool(maps[2].isfinite().all()) and float(maps[2].max()) < 1


def test_float32_agrees_with_float64_on_trained_networks(vit, resnet, batches):
    few = [batches[0][:5]]
    exact = [few[0].double()]
    single = compare(vit, resnet, few, transforms=(standardised, None)).values
    double = compare(vit.double(), resnet.double(), exact, transforms=(standardised, None)).values
    vit.float(), resnet.float()
    assert float((single - double).abs().max()) < 1e-3
