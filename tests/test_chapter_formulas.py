"""What chapters 1 and 2 compute from scratch, taken from their own cells, against the helpers.

The cells tagged "formula" of a chapter are run here on other sizes and other networks than the chapter uses,
so that text, code and helpers cannot drift apart.
"""

import itertools
from pathlib import Path

import nbformat
import pytest
import timm
import torch
from torch import nn

from helpers import receptive, zoo
from helpers.cka import MinibatchCKA, cka, gram, hsic
from helpers.record import record

NOTEBOOKS = Path(__file__).resolve().parents[1] / "notebooks"


def formulas(name: str) -> dict:
    """The names that the tagged cells of a chapter define."""
    cells = nbformat.read(NOTEBOOKS / f"{name}.ipynb", as_version=4).cells
    names = {"torch": torch, "permutations": itertools.permutations, "Conv2d": nn.Conv2d,
             "MaxPool2d": nn.MaxPool2d}
    for cell in cells:
        if "formula" in cell.metadata.get("tags", []):
            exec(compile(cell.source, f"{name}, cell {cell.id}", "exec"), names)
    return names


ways, two = formulas("01_two_ways"), formulas("02_cka")


def features(n, p, seed=0, mean=0.0):
    """Two correlated sets of features (n, p) and (n, 2 p + 1) float64, with a common part."""
    rng = torch.Generator().manual_seed(seed)
    X = torch.randn(n, p, generator=rng, dtype=torch.float64)
    Y = X @ torch.randn(p, 2 * p + 1, generator=rng, dtype=torch.float64)
    return X + mean, Y + torch.randn(n, 2 * p + 1, generator=rng, dtype=torch.float64) - mean


sizes = pytest.mark.parametrize("n, p, mean", [(4, 3, 0), (5, 1, 0), (7, 20, 3), (33, 8, -5), (64, 200, 1)])


@sizes
def test_hsic_and_cka_of_chapter_2_are_the_helpers(n, p, mean):
    X, Y = features(n, p, mean=mean)
    K, L = X @ X.T, Y @ Y.T  # not centred: both estimators must not mind
    for name, unbiased in (("hsic_biased", False), ("hsic_unbiased", True)):
        torch.testing.assert_close(two[name](K, L), hsic(gram(X), gram(Y), unbiased))
        torch.testing.assert_close(two["cka_from"](K, L, two[name]), cka(X, Y, unbiased))


def test_centring_takes_off_the_mean():
    X, _ = features(9, 4, mean=2)
    torch.testing.assert_close(two["centring"](9) @ X, X - X.mean(0))


@pytest.mark.parametrize("n", [4, 5, 8])
def test_counting_over_four_different_images_is_the_unbiased_hsic(n):
    X, Y = features(n, 3, seed=n, mean=1)
    K, L = X @ X.T, Y @ Y.T
    torch.testing.assert_close(two["hsic_by_counting"](K, L), hsic(K, L))
    assert abs(two["hsic_by_counting"](K, L) - hsic(K, L, unbiased=False)) > 1e-3


@pytest.mark.parametrize("unbiased, name", [(True, "hsic_unbiased"), (False, "hsic_biased")])
def test_minibatches_average_first_and_divide_last(unbiased, name):
    X, Y = features(40, 6)
    grams = [(gram(x), gram(y)) for x, y in zip(X.split(8), Y.split(8), strict=True)]
    total = MinibatchCKA(unbiased)
    for K, L in grams:
        total.update(K[None], L[None])
    torch.testing.assert_close(two["minibatch_cka"](grams, two[name]), total.matrix()[0, 0])
    mean_of_ratios = sum(two["cka_from"](K, L, two[name]) for K, L in grams) / len(grams)
    assert abs(mean_of_ratios - total.matrix()[0, 0]) > 1e-3


@pytest.mark.parametrize("n, p, q", [(64, 10, 10), (64, 500, 500), (50, 20, 2000), (200, 3000, 60)])
def test_the_plain_cka_of_noise_is_what_the_chapter_derives(n, p, q):
    rng = torch.Generator().manual_seed(p)
    noise = [(torch.randn(n, p, generator=rng), torch.randn(n, q, generator=rng)) for _ in range(20)]
    plain, unbiased = (torch.stack([cka(x, y, u) for x, y in noise]).mean() for u in (False, True))
    assert abs(plain - two["cka_of_noise"](n, p, q)) < 0.02
    assert abs(unbiased) < 0.02


@pytest.mark.parametrize("height, width, patch", [(32, 32, 4), (12, 20, 4), (9, 6, 3)])
def test_patches_of_chapter_1_are_those_of_a_strided_convolution(height, width, patch):
    x = torch.rand(2, 3, height, width, generator=torch.Generator().manual_seed(0))
    embed = nn.Conv2d(3, 7, patch, patch)
    with torch.no_grad():
        tokens = ways["patchify"](x, patch) @ embed.weight.flatten(1).T + embed.bias  # (2, t, 7)
        torch.testing.assert_close(tokens, embed(x).flatten(2).mT, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("options", [{}, {"heads": 8}, {"pool": "avg"}])
def test_attention_of_chapter_1_is_the_networks(options):
    model = zoo.build("vit", **options)
    x = torch.rand(2, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    kept = record(model, x, ["blocks.3:input", "blocks.3.attn"], keep=lambda out: out)
    with torch.no_grad():
        branch, A = ways["attention"](kept["blocks.3:input"], model.blocks[3])
    torch.testing.assert_close(branch, kept["blocks.3.attn"], rtol=1e-4, atol=1e-5)
    assert A.shape == (2, options.get("heads", 4), branch.shape[1], branch.shape[1])
    torch.testing.assert_close(A.sum(-1), torch.ones(A.shape[:3]))


def test_receptive_side_of_chapter_1_is_what_gradients_reach():
    # the trained one: timm starts every branch of a ResNet at zero, and then nothing beyond the stem is seen
    model, x = zoo.load("resnet"), torch.rand(4, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    sides = ways["receptive_side"](model)
    for layer, place in {"conv1": 16, "layer1.1": 16, "layer2.0": 8, "layer2.2": 8}.items():
        seen = receptive.field(model, x, layer, at=(place, place), draws=16) > 0
        assert seen.any(0).sum() == seen.any(1).sum() == sides[layer], layer


def test_receptive_side_of_a_resnet50_is_the_known_one():
    """Araujo et al. 2019 give 483 for strides in the first convolution of a unit; in the second it is 427."""
    with torch.device("meta"):
        sides = ways["receptive_side"](timm.create_model("resnet50"))
    assert (sides["conv1"], sides["maxpool"], sides["layer1.0"], sides["layer4.2"]) == (7, 11, 19, 427)
