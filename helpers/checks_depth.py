"""Checkers of the exercises on tokens and maps of layers: n images, t patches, Lx and Ly layers."""

from __future__ import annotations

import numpy as np

from .checking import Check, normal

# Patches back to images


def _unpatchify(patches, grid, P, place=lambda i, grid: divmod(i, grid[1])):
    n, t, size = patches.shape
    images = np.zeros((n, size // P**2, grid[0] * P, grid[1] * P))
    for image, tokens in zip(images, patches, strict=True):
        for i, token in enumerate(tokens):
            row, column = (P * k for k in place(i, grid))
            image[:, row : row + P, column : column + P] = token.reshape(-1, P, P)
    return images


def _turned(patches, P):
    """Patches whose rows and columns are exchanged."""
    n, t, size = patches.shape
    return patches.reshape(n, t, -1, P, P).swapaxes(3, 4).reshape(n, t, size)


def _channels_last(patches, P):
    """Patches read as if a pixel's channels stood next to each other."""
    n, t, size = patches.shape
    return np.moveaxis(patches.reshape(n, t, P, P, -1), 4, 2).reshape(n, t, size)


def _patches(rng):
    def patches(n, grid, P, c):
        return normal(rng, n, grid[0] * grid[1], c * P * P), grid, P

    yield "2 images of 3 x 3 patches, 3 channels", patches(2, (3, 3), 4, 3)
    yield "a grid that is not square", patches(3, (2, int(rng.integers(4, 7))), 2, 3)
    yield "one channel", patches(2, (4, 3), 3, 1)
    yield "patches of one pixel", patches(2, (3, 5), 1, 2)
    yield "one image of one patch", patches(1, (1, 1), 4, 3)


unpatchify = Check(
    "unpatchify(patches, grid, P)",
    _unpatchify,
    _patches,
    {
        "the pixels are not in place: axes must be exchanged before the last reshape": (
            lambda patches, grid, P: patches.reshape(len(patches), -1, grid[0] * P, grid[1] * P)
        ),
        "rows and columns are exchanged within each patch": lambda patches, grid, P: (
            _unpatchify(_turned(patches, P), grid, P)
        ),
        "the patches were laid column by column; the tokens run row by row": lambda patches, grid, P: (
            _unpatchify(patches, grid, P, lambda i, grid: divmod(i, grid[0])[::-1])
        ),
        "the whole image is turned: its rows and columns are exchanged": lambda patches, grid, P: (
            _unpatchify(patches, grid, P).swapaxes(2, 3)
        ),
        "the channels of a pixel do not stand next to each other: within a token they come first": (
            lambda patches, grid, P: _unpatchify(_channels_last(patches, P), grid, P)
        ),
        "channels come last; images have the shape (n, c, H, W)": lambda patches, grid, P: (
            np.moveaxis(_unpatchify(patches, grid, P), 1, 3)
        ),
        "only the first image is returned": lambda patches, grid, P: _unpatchify(patches, grid, P)[0],
    },
)


# The closest layer


def _closest_depth(matrix):
    return np.array([max(range(len(row)), key=row.__getitem__) / (len(row) - 1) for row in matrix])


def _matrices(rng):
    def matrix(rows, columns, low=0.0):
        return np.float32(rng.uniform(low, 1, (rows, columns))).astype(float)

    yield "12 layers and 16", (matrix(12, 16),)
    yield "more rows than columns", (matrix(int(rng.integers(9, 14)), 5),)
    yield "as many rows as columns", (matrix(6, 6),)
    yield "some similarities below 0", (matrix(5, 8, -2.0),)
    yield "best layers at both ends", (np.array([[0.25, 0.5, 0.75], [0.5, 0.375, 0.25]]),)


closest_depth = Check(
    "closest_depth(matrix)",
    _closest_depth,
    _matrices,
    {
        "these are numbers of layers, not fractions of the depth": lambda m: m.argmax(1),
        "the last layer must have depth 1: layers are counted from 0": lambda m: m.argmax(1) / m.shape[1],
        "the first layer must have depth 0: layers are counted from 0": lambda m: (
            (m.argmax(1) + 1) / m.shape[1]
        ),
        "you divided by the depth of the other network": (
            lambda m: m.argmax(1) / (len(m) - 1),
            lambda m: m.argmax(1) / len(m),
        ),
        "a number for each column; for each row the closest column was asked for": (
            lambda m: m.argmax(0) / (len(m) - 1),
            lambda m: m.argmax(0) / len(m),
            lambda m: m.argmax(0) / (m.shape[1] - 1),
            lambda m: m.argmax(0),
        ),
        "this is the least similar layer": lambda m: m.argmin(1) / (m.shape[1] - 1),
        "this is how similar the closest layer is; where it lies was asked for": lambda m: m.max(1),
        "the sign of a similarity was dropped: below 0 is not close": lambda m: (
            np.abs(m).argmax(1) / (m.shape[1] - 1)
        ),
        "this is a mean depth, weighted by similarity; the single closest layer was asked for": lambda m: (
            (m * np.arange(m.shape[1])).sum(1) / m.sum(1) / (m.shape[1] - 1)
        ),
        "depth was turned around: 0 is the first layer": lambda m: 1 - m.argmax(1) / (m.shape[1] - 1),
        "this is the closest pair of the whole map: one number for each row is needed": lambda m: (
            m.argmax() / (m.size - 1)
        ),
    },
)
