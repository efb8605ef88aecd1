"""Token against patch: CKA against a slow float64 reference, and tokens whose place is known."""

import numpy as np
import pytest
import timm
import torch
from timm.models.mlp_mixer import MlpMixer
from torch import nn

from helpers import location, zoo
from helpers.record import record


def slow_hsic1(K, L):
    """HSIC₁ in Song's three terms, float64."""
    n = len(K)
    K, L = K - np.diag(np.diag(K)), L - np.diag(np.diag(L))
    one = np.ones(n)
    return (np.trace(K @ L) + one @ K @ one * (one @ L @ one) / ((n - 1) * (n - 2))
            - 2 / (n - 2) * one @ K @ L @ one) / (n * (n - 3))


def slow_cka(X, Y):
    X, Y = (np.asarray(Z, dtype=np.float64).reshape(len(Z), -1) for Z in (X, Y))
    X, Y = X - X.mean(0), Y - Y.mean(0)
    K, L = X @ X.T, Y @ Y.T
    return slow_hsic1(K, L) / np.sqrt(slow_hsic1(K, K) * slow_hsic1(L, L))


class Places(nn.Module):
    """A feature map that holds each patch's own pixels, or those of its neighbour to the right."""

    def __init__(self, patch, shift=0):
        super().__init__()
        self.cut = nn.PixelUnshuffle(patch)
        self.shift = shift
        self.out = nn.Identity()

    def forward(self, x):
        return self.out(self.cut(x).roll(-self.shift, 3))


def test_a_token_that_copies_its_patch_is_found_there():
    images = torch.rand(32, 3, 32, 32)
    maps = location.token_patch_cka(Places(8), images, "out")
    assert maps.shape == (16, 4, 4)
    own = maps.flatten(1).diagonal()
    torch.testing.assert_close(own, torch.ones(16).double(), rtol=1e-6, atol=1e-6)
    assert location.sharpness(maps).min() > 0.8 and (location.own_rank(maps) == 1).all()
    shifted = location.token_patch_cka(Places(8, shift=1), images, "out", [(1, 1), (2, 2)])
    assert shifted[0, 1, 2] == pytest.approx(1, abs=1e-6) and shifted[1, 2, 3] == pytest.approx(1, abs=1e-6)
    assert location.own_rank(shifted, [(1, 1), (2, 2)]).min() > 1


@pytest.mark.parametrize(("model", "layer", "grid", "prefix"), [
    (zoo.build("vit"), "blocks.1", (8, 8), 1),
    (zoo.build("vit", pool="avg"), "blocks.1", (8, 8), 0),
    (zoo.build("resnet"), "layer4.2", (4, 4), 0),
    (timm.create_model("vit_tiny_patch16_224", img_size=(32, 48), patch_size=8, depth=1, embed_dim=24, num_heads=2,
                       reg_tokens=3), "blocks.0", (4, 6), 4),
    (MlpMixer(img_size=32, patch_size=8, num_blocks=1, embed_dim=16), "blocks.0", (4, 4), 0),
], ids=["CLS", "GAP", "ResNet", "registers, not square", "Mixer"])
def test_maps_match_the_slow_reference(model, layer, grid, prefix):
    size = (32, 48) if grid == (4, 6) else (32, 32)
    images = torch.rand(12, 3, *size)
    tokens = [0, (1, 2), grid[0] * grid[1] - 1]
    ours = location.token_patch_cka(model, images, layer, tokens)
    assert ours.shape == (3, *grid)
    values = record(model, images, [layer], keep=lambda x: x)[layer]
    values = values[:, prefix:] if values.ndim == 3 else values.flatten(2).transpose(1, 2)
    ph, pw = size[0] // grid[0], size[1] // grid[1]
    for row, token in enumerate([0, grid[1] + 2, grid[0] * grid[1] - 1]):
        for r, c in [(0, 0), (1, 2), (grid[0] - 1, grid[1] - 1), (grid[0] - 1, 0)]:
            patch = images[:, :, r * ph : (r + 1) * ph, c * pw : (c + 1) * pw]
            assert ours[row, r, c].item() == pytest.approx(slow_cka(values[:, token], patch), abs=1e-4)


def test_batches_average_hsic_and_give_intervals():
    model, images = zoo.build("vit"), torch.rand(40, 3, 32, 32)
    found = location.localise(model, images.split(8), "blocks.0", [9])
    assert found.n_images == 40 and found.rows == ["(1, 1)"] and len(found.columns) == 64
    low, high = found.interval(lambda values: values[0, 9], n=200)
    assert low <= found.values[0, 9] <= high
    with_rest = location.token_patch_cka(model, [*images.split(8), images[:3]], "blocks.0", [9])
    torch.testing.assert_close(with_rest, found.maps)  # 3 images are too few, and are left out


def test_deconfounding_takes_the_whole_image_out():
    """All patches share one number an image: similarity everywhere, until what images share is taken out."""
    shared = 3 * torch.randn(64, 1, 1, 1)
    images = torch.rand(64, 3, 16, 16) + shared
    plain = location.token_patch_cka(Places(4), images, "out", [5])[0]
    clean = location.token_patch_cka(Places(4), images, "out", [5], deconfounded=True)[0]
    assert plain.min() > 0.9
    assert clean[1, 1] == pytest.approx(1, abs=1e-6)
    assert clean.flatten().sort().values[-2] < 0.5


def test_sharpness_and_rank_by_hand():
    maps = torch.tensor([[[0.9, 0.1], [0.2, 0.3]], [[0.5, 0.4], [0.6, 0.1]]])
    torch.testing.assert_close(location.sharpness(maps, [0, 1]), torch.tensor([0.7, 0.0]).double(), atol=1e-6, rtol=0)
    assert location.own_rank(maps, [0, 1]).tolist() == [1, 3]
    relative = location.sharpness(maps, [(0, 0), (0, 1)], relative=True)
    assert relative[0].item() == pytest.approx(0.7 / np.std([0.1, 0.2, 0.3]), rel=1e-4)


@pytest.mark.parametrize(("call", "match"), [
    (lambda m, x: location.token_patch_cka(m, x, "blocks.0", [64]), "8 x 8"),
    (lambda m, x: location.token_patch_cka(m, x, "blocks.0", [(0, 8)]), "8 x 8"),
    (lambda m, x: location.token_patch_cka(m, x, "head"), "places"),
    (lambda m, x: location.token_patch_cka(m, x, "blocks.99"), "no layer"),
    (lambda m, x: location.token_patch_cka(m, x[:3], "blocks.0"), "no batch"),
    (lambda m, x: location.patch_grams(x, (5, 5)), "equal patches"),
    (lambda m, x: location.sharpness(torch.rand(2, 4, 4), [1]), "one map a token"),
])
def test_bad_input(call, match):
    with pytest.raises(ValueError, match=match):
        call(zoo.build("vit"), torch.rand(8, 3, 32, 32))
