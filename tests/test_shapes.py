"""The lab's images: the same everywhere, balanced, and refused where they would show nothing."""

import hashlib

import numpy as np
import pytest
import torch

from helpers.shapes import ANGLES, SCALES, SHAPES, TEXTURES, draw

MANY = draw(4000, seed=11)


def fingerprint(scenes):
    """Hash of the pixels as the 8-bit levels that they are, and of the labels."""
    levels = torch.round(scenes.images * 255).to(torch.uint8).numpy().tobytes()
    labels = torch.stack([scenes.shape, scenes.texture, scenes.background]).to(torch.int64).numpy().tobytes()
    return hashlib.sha256(levels + labels).hexdigest()[:16]


@pytest.mark.parametrize("n, seed, size, expected", [
    (200, 0, 32, "55704237deac821e"),
    (200, (3, 1), 32, "cc074eef1a3c0de6"),
    (20, 4, 64, "0910ed26bb942fa2"),
])
def test_a_seed_gives_the_same_images_on_every_machine(n, seed, size, expected):
    assert fingerprint(draw(n, seed, size)) == expected


def test_threads_do_not_change_the_images():
    before = torch.get_num_threads()
    try:
        prints = set()
        for threads in (1, 2):
            torch.set_num_threads(threads)
            prints.add(fingerprint(draw(300, 5)))
    finally:
        torch.set_num_threads(before)
    assert len(prints) == 1


def test_a_draw_is_the_same_twice_and_leaves_other_generators_alone():
    torch.manual_seed(0)
    np.random.seed(0)
    before = torch.get_rng_state(), np.random.get_state()[1].copy()
    assert torch.equal(draw(5, 3).images, draw(5, 3).images)
    assert torch.equal(torch.get_rng_state(), before[0])
    assert (np.random.get_state()[1] == before[1]).all()


def test_seeds_differ_tuples_and_their_order_too():
    seeds = [0, 1, (1, 0), (0, 1), (0, 0), (1, 0, 0), (2**40,)]
    assert len({fingerprint(draw(8, seed)) for seed in seeds}) == len(seeds)
    assert fingerprint(draw(8, 7)) == fingerprint(draw(8, (7,))) == fingerprint(draw(8, np.int64(7)))


def test_shapes_types_and_ranges():
    n = len(MANY)
    assert MANY.images.shape == (n, 3, 32, 32) and MANY.images.dtype == torch.float32
    assert 0 <= MANY.images.min() and MANY.images.max() <= 1
    for labels, names in ((MANY.shape, SHAPES), (MANY.texture, TEXTURES), (MANY.background, TEXTURES)):
        assert labels.shape == (n,) and labels.dtype == torch.int64
        assert labels.unique().tolist() == list(range(len(names)))
    assert MANY.position.shape == (n, 2) and MANY.position.abs().max() < 1
    assert MANY.scale.shape == (n,) and SCALES[0] <= MANY.scale.min() and MANY.scale.max() <= SCALES[1]
    assert MANY.angle.shape == (n,) and ANGLES[0] <= MANY.angle.min() and MANY.angle.max() <= ANGLES[1]
    for factor in (MANY.position, MANY.scale, MANY.angle):
        assert factor.dtype == torch.float32


def test_labels_are_balanced_and_tell_nothing_of_each_other():
    def chi_square(counts, expected):
        """Per degree of freedom: about 1 where counts differ by chance alone."""
        return (((counts - expected) ** 2) / expected).sum() / (counts.size - 1)

    shape, texture, background = (x.numpy() for x in (MANY.shape, MANY.texture, MANY.background))
    for labels, names in ((shape, SHAPES), (texture, TEXTURES), (background, TEXTURES)):
        counts = np.bincount(labels, minlength=len(names))
        assert chi_square(counts, len(labels) / len(names)) < 3
    for other in (texture, background):
        pairs = np.bincount(shape * len(TEXTURES) + other, minlength=len(SHAPES) * len(TEXTURES))
        assert chi_square(pairs, len(shape) / pairs.size) < 1.7
    assert (texture != background).all()


def test_every_image_has_one_brightness_and_one_contrast():
    means = MANY.images.mean((2, 3))  # (n, 3)
    off = (means - 0.5).abs()
    assert off.mean() < 0.01 and off.max() < 0.06  # clipping moves some a little
    contrast = (MANY.images - 0.5).square().mean((1, 2, 3)).sqrt()
    assert contrast.mean() > 0.17 and 0.1 < contrast.min() and contrast.max() < 0.202  # clipping takes away


def test_no_single_direction_of_the_pixels_dominates():
    pixels = MANY.images.flatten(1)
    pixels = pixels - pixels.mean(0)
    torch.manual_seed(0)
    first = torch.svd_lowrank(pixels, q=6, niter=4)[1][0]  # the largest singular value
    assert first**2 / pixels.square().sum() < 0.15


def linear_reading(features):
    """Share of shapes that a least-squares reading of features (n, p) gets right on the other half."""
    X = torch.cat([features.double(), torch.ones(len(features), 1)], 1)
    Y = torch.nn.functional.one_hot(MANY.shape, len(SHAPES)).double()
    half = len(X) // 2
    weights = torch.linalg.lstsq(X[:half], Y[:half]).solution
    return ((X[half:] @ weights).argmax(1) == MANY.shape[half:]).double().mean()


def test_colour_carries_no_shape_and_brightness_little():
    """Hue is free, so it stays at chance; figures are lighter than their ground, so area shows a little."""
    coarse = torch.nn.functional.avg_pool2d(MANY.images, 16)  # (n, 3, 2, 2)
    hue = coarse - coarse.mean(1, keepdim=True)
    chance = 1 / len(SHAPES)
    assert linear_reading(hue.flatten(1)) < 1.5 * chance
    assert linear_reading(coarse.flatten(1)) < 3 * chance


@pytest.mark.parametrize("index", [slice(3, 9), [0, 5, 2], torch.tensor([4, 4])])
def test_a_part_keeps_every_factor_with_its_image(index):
    part = MANY[index]
    for name, whole in vars(MANY).items():
        assert torch.equal(getattr(part, name), whole[index])
    assert len(part) == len(part.images)


def test_batches_are_the_images_in_order():
    part = MANY[:10]
    batches = part.batches(4)
    assert [len(batch) for batch in batches] == [4, 4, 2]
    assert torch.equal(torch.cat(batches), part.images)


def test_other_sizes():
    assert draw(2, size=64).images.shape == (2, 3, 64, 64)
    assert draw(1, size=16).images.shape == (1, 3, 16, 16)


@pytest.mark.parametrize("options, words", [
    (dict(n=0), "at least 1; got n=0"),
    (dict(n=-3), "got n=-3"),
    (dict(n=2.5), "whole number"),
    (dict(n=2, seed=-1), "seed"),
    (dict(n=2, seed=(1, -1)), "seed"),
    (dict(n=2, seed=(0.5,)), "seed"),
    (dict(n=2, size=8), "at least 16 pixels"),
])
def test_refusals(options, words):
    with pytest.raises(ValueError, match=words):
        draw(**options)
