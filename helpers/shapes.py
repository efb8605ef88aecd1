"""The lab's images: one shape in one texture on a background of another, drawn from a seed.

Every factor that made an image is returned with it, so a chapter can ask of any layer
what it knows: the *shape* needs information from all over the object (global), the
*background texture* can be read off a few pixels anywhere (local).

Only +, -, *, /, comparisons and a square root touch the pixels after the random draws,
in one thread of numpy, and the result is rounded to 8-bit levels: a seed gives the same
images on every machine.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

SHAPES: tuple[str, ...] = (
    "disk", "ring", "square", "triangle", "cross", "star", "crescent", "bar", "ell", "bowtie",
)
TEXTURES: tuple[str, ...] = (
    "horizontal", "vertical", "rising", "falling", "checks", "dots", "blocks", "speckle",
)

SCALES = (0.50, 0.75)  # radius of the shape's circle over half the image's side
ANGLES = (-30.0, 30.0)  # degrees
PERIODS = (3.0, 5.0)  # pixels, at 32 px a side
CONTRAST = 1.0  # distance in RGB between figure and background, before standardising
LIGHTER = 2.5  # how far that contrast leans towards white, beside a free direction of length 1
RIPPLE = (0.15, 0.32)  # amplitude of a texture, in the same unit

_CHUNK = 128


@dataclass(frozen=True)
class Scenes:
    """`n` images and what made them. Indexing with a slice or an index array gives fewer."""

    images: torch.Tensor  # (n, 3, size, size) float32 in [0, 1]
    shape: torch.Tensor  # (n,) int64, index into SHAPES
    texture: torch.Tensor  # (n,) int64, index into TEXTURES: the figure's
    background: torch.Tensor  # (n,) int64, index into TEXTURES: the background's, never the figure's
    position: torch.Tensor  # (n, 2) float32: x to the right, y down; -1 and 1 are the image's edges
    scale: torch.Tensor  # (n,) float32: radius of the shape's circle over half the image's side
    angle: torch.Tensor  # (n,) float32, degrees, counter-clockwise as seen

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index) -> Scenes:
        return Scenes(**{name: value[index] for name, value in vars(self).items()})

    def batches(self, size: int = 128):
        """The images in order, `size` at a time: what every measure takes as `batches`."""
        return [self.images[i : i + size] for i in range(0, len(self), size)]


def draw(n: int, seed: int | tuple[int, ...] = 0, size: int = 32) -> Scenes:
    """Draw `n` scenes of `size` x `size` pixels.

    `seed` is an integer or a tuple of them (a run's seed and a step, say). Labels are
    balanced on average, every figure differs in texture from its background, every
    channel of every image has mean 0.5, and all images have the same contrast.
    Raises ValueError for n < 1, a negative seed or fewer than 16 pixels.
    """
    if int(n) != n or n < 1:
        raise ValueError(f"draw needs a whole number of images, at least 1; got n={n!r}")
    if size < 16:
        raise ValueError(f"draw needs at least 16 pixels a side to show a shape; got size={size}")
    seeds = seed if isinstance(seed, (tuple, list)) and seed else [seed]
    if not all(isinstance(s, (int, np.integer)) and s >= 0 for s in seeds):
        raise ValueError(f"a seed is a whole number, 0 or more (or a tuple of them); got {seed!r}")
    first, *rest = (int(s) for s in seeds)  # spawn keys, since [7] and [7, 0] are the same entropy
    rng = np.random.Generator(np.random.PCG64(np.random.SeedSequence(first, spawn_key=tuple(rest))))

    n = int(n)
    shape = rng.integers(len(SHAPES), size=n)
    texture = rng.integers(len(TEXTURES), size=n)
    # one of the other seven textures, all equally likely
    background = (texture + rng.integers(1, len(TEXTURES), size=n)) % len(TEXTURES)
    scale = rng.uniform(*SCALES, size=n)
    angle = rng.uniform(*ANGLES, size=n)
    position = rng.uniform(-1, 1, size=(n, 2)) * (1 - 0.9 * scale)[:, None]

    # Colours are free, so that they carry no label. The figure leans towards the lighter side, which
    # lets a small ViT find it; leaning all the way, one pixel component would dominate (see the tests).
    split = CONTRAST * _unit(_directions(rng, n) + LIGHTER / np.sqrt(3))  # figure minus background
    ripple = rng.uniform(*RIPPLE, size=(2, n, 1)) * _directions(rng, 2 * n).reshape(2, n, 3)

    waves = [_waves(rng, kinds, size) for kinds in (texture, background)]
    images = np.empty((n, 3, size, size), np.float32)
    for start in range(0, n, _CHUNK):  # a few images at a time stay in the processor's cache
        rows = slice(start, start + _CHUNK)
        mask = _masks(shape[rows], position[rows], scale[rows], angle[rows], size)[:, None]
        paint = mask * _colour(split[rows])
        paint += (mask * waves[0][rows, None]) * _colour(ripple[0, rows])
        paint += ((1 - mask) * waves[1][rows, None]) * _colour(ripple[1, rows])
        images[rows] = _standardise(paint)
    return Scenes(
        images=torch.from_numpy(images),
        shape=torch.from_numpy(shape.astype(np.int64)),
        texture=torch.from_numpy(texture.astype(np.int64)),
        background=torch.from_numpy(background.astype(np.int64)),
        position=torch.from_numpy(position.astype(np.float32)),
        scale=torch.from_numpy(scale.astype(np.float32)),
        angle=torch.from_numpy(angle.astype(np.float32)),
    )


def _directions(rng, n):
    """n unit vectors (n, 3), uniform on the sphere."""
    return _unit(rng.standard_normal((n, 3)))


def _unit(v):
    return v / np.sqrt((v * v).sum(1, keepdims=True))


def _colour(rgb):
    """(n, 3) as a factor for images: (n, 3, 1, 1) float32."""
    return rgb.astype(np.float32)[:, :, None, None]


def _masks(shape, position, scale, angle, size):
    """Where the figure is: (n, size, size) float32, 1 inside, 0 outside, one pixel of soft edge."""
    y, x = np.meshgrid(*2 * [(np.arange(size, dtype=np.float32) + 0.5) * (2 / size) - 1], indexing="ij")
    u, v = _to_object_frame(x, y, position, scale, angle)
    mask = np.empty(u.shape, np.float32)
    for k, name in enumerate(SHAPES):
        rows = np.flatnonzero(shape == k)
        pixels = scale[rows, None, None].astype(np.float32) * (size / 2)  # one unit of the frame
        mask[rows] = np.clip(0.5 - _DISTANCES[name](u[rows], v[rows]) * pixels, 0, 1)
    return mask


def _to_object_frame(x, y, position, scale, angle):
    """Pixel coordinates (size, size) as each object sees them: two arrays (n, size, size)."""
    radians = angle * (np.pi / 180)
    cos, sin = (f(radians) / scale for f in (np.cos, np.sin))
    cos, sin = (a.astype(np.float32)[:, None, None] for a in (cos, sin))
    dx = x - position[:, 0].astype(np.float32)[:, None, None]
    dy = y - position[:, 1].astype(np.float32)[:, None, None]
    return cos * dx - sin * dy, sin * dx + cos * dy


def _standardise(images):
    """Mean 0.5 in every channel and one contrast for all, clipped to [0, 1], in 8-bit levels."""
    images = images - images.mean(axis=(2, 3), keepdims=True)
    images *= 0.2 / np.sqrt(np.square(images).mean(axis=(1, 2, 3), keepdims=True) + 1e-12)
    return np.rint(np.clip(images + 0.5, 0, 1) * 255).astype(np.float32) / np.float32(255)


# Signed distances to each outline, negative inside; the shape fits the unit circle, v points down.

def _length(u, v):
    return np.sqrt(u * u + v * v)


def _box(u, v, half_width, half_height):
    return np.maximum(np.abs(u) - half_width, np.abs(v) - half_height)


def _polygon(u, v, corners):
    """Exact distance to a closed polygon, corners (k, 2), by the even-odd rule."""
    nearest = np.full(u.shape, np.float32(1e9))
    inside = np.zeros(u.shape, bool)
    for (ax, ay), (bx, by) in zip(corners, np.roll(corners, -1, 0), strict=True):
        ax, ay, ex, ey = (np.float32(c) for c in (ax, ay, bx - ax, by - ay))
        du, dv = u - ax, v - ay
        along = np.clip((du * ex + dv * ey) / (ex * ex + ey * ey), 0, 1)
        nearest = np.minimum(nearest, np.square(du - along * ex) + np.square(dv - along * ey))
        crosses = (dv < 0) != (v - ay - ey < 0)
        inside ^= crosses & ((du * ey - dv * ex) * np.sign(ey) < 0)
    return np.where(inside, -1, 1).astype(np.float32) * np.sqrt(nearest)


def _spokes(k, inner=None):
    """Corners (k, 2) of a regular polygon, or (2k, 2) of a star, the first pointing up."""
    turns = np.arange(k if inner is None else 2 * k) * (2 * np.pi / (k if inner is None else 2 * k))
    radii = 1.0 if inner is None else np.where(np.arange(2 * k) % 2, inner, 1.0)
    return np.stack([radii * np.sin(turns), -radii * np.cos(turns)], 1)


_ELL = np.array([[-0.7, -0.95], [-0.1, -0.95], [-0.1, 0.35], [0.75, 0.35], [0.75, 0.95], [-0.7, 0.95]])
_BOWTIE = np.array([[-0.9, -0.75], [0.0, -0.12], [0.9, -0.75], [0.9, 0.75], [0.0, 0.12], [-0.9, 0.75]])

_DISTANCES = {
    "disk": lambda u, v: _length(u, v) - np.float32(0.85),
    "ring": lambda u, v: np.abs(_length(u, v) - np.float32(0.72)) - np.float32(0.25),
    "square": lambda u, v: _box(u, v, 0.75, 0.75),
    "triangle": lambda u, v: _polygon(u, v - np.float32(0.2), _spokes(3) * 1.15),
    "cross": lambda u, v: np.minimum(_box(u, v, 0.95, 0.27), _box(u, v, 0.27, 0.95)),
    "star": lambda u, v: _polygon(u, v, _spokes(5, inner=0.42) * 1.1),
    "crescent": lambda u, v: np.maximum(
        _length(u, v) - np.float32(0.95), np.float32(0.75) - _length(u - np.float32(0.5), v)
    ),
    "bar": lambda u, v: _box(u, v, 0.98, 0.3),
    "ell": lambda u, v: _polygon(u, v, _ELL),
    "bowtie": lambda u, v: _polygon(u, v, _BOWTIE),
}


def _waves(rng, kinds, size):
    """One texture an image, mean about 0 and amplitude 1: (n, size, size) float32."""
    n = len(kinds)
    period = rng.uniform(*PERIODS, size=n) * (size / 32)
    phase = rng.uniform(0, 1, size=(2, n))
    x = np.arange(size)[None, :] / period[:, None]  # (n, size), in periods
    coins = 2 * rng.integers(0, 2, size=(n, size, size), dtype=np.int8) - 1
    waves = np.empty((n, size, size), np.float32)
    for k, name in enumerate(TEXTURES):
        rows = np.flatnonzero(kinds == k)
        if name == "speckle":  # a coin for every pixel
            waves[rows] = coins[rows]
            continue
        across = (x[rows] + phase[0, rows, None]).astype(np.float32)[:, None, :]
        down = (x[rows] + phase[1, rows, None]).astype(np.float32)[:, :, None]
        if name == "blocks":  # a coin for every cell of one period
            waves[rows] = coins[rows[:, None, None], down.astype(np.int64), across.astype(np.int64)]
            continue
        waves[rows] = _PATTERNS[name](across, down)
    return waves


def _stripe(t):
    """A smooth wave of period 1 and amplitude 1, made of parabolas (no sine: exact everywhere)."""
    t = t - np.floor(t) - np.float32(0.5)  # in [-1/2, 1/2)
    return np.float32(16) * t * (np.abs(t) - np.float32(0.5))


_DIAGONAL = np.float32(0.70710678)
_PATTERNS = {
    "horizontal": lambda a, d: _stripe(d) + 0 * a,
    "vertical": lambda a, d: _stripe(a) + 0 * d,
    "rising": lambda a, d: _stripe((a + d) * _DIAGONAL),
    "falling": lambda a, d: _stripe((a - d) * _DIAGONAL),
    "checks": lambda a, d: np.float32(1.3) * _stripe(a * _DIAGONAL) * _stripe(d * _DIAGONAL),
    "dots": lambda a, d: (
        np.float32(2) * np.clip(_stripe(a) + _stripe(d) - np.float32(0.4), 0, 1) - np.float32(0.6)
    ),
}
