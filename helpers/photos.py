"""Real photographs: a folder of them, or the few that scikit-image and scikit-learn ship.

Photographs stay on the disk and are decoded a batch at a time, so memory does not grow with their
number. Nothing is written, and what cannot be used is named with the reason.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import torch
from PIL import Image, ImageOps, UnidentifiedImageError

SMALLEST = 8  # pixels a side; fewer show nothing
SHIPPED = {  # package -> (folder inside it, photographs)
    "skimage": ("data", (
        "astronaut.png", "brick.png", "camera.png", "chelsea.png", "coffee.png", "coins.png", "grass.png",
        "gravel.png", "hubble_deep_field.jpg", "moon.png", "motorcycle_left.png", "retina.jpg", "rocket.jpg",
    )),
    "sklearn": ("datasets/images", ("china.jpg", "flower.jpg")),
}


@dataclass(frozen=True)
class Photos:
    """`n` photographs, square, decoded when they are asked for. A slice gives fewer."""

    files: tuple[Path, ...]
    names: tuple[str, ...]  # one a photograph: the file's path inside its folder
    size: int  # pixels a side
    crops: tuple[tuple[float, float, float, bool], ...] | None = None
    # of each, where it is drawn: side over the shorter side, left and top as shares of what is free, mirrored

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: slice) -> Photos:
        if not isinstance(index, slice):
            raise ValueError(f"photographs are taken by a slice, photos[:8] say; got {index!r}")
        return Photos(self.files[index], self.names[index], self.size, self.crops and self.crops[index])

    @property
    def images(self) -> torch.Tensor:
        """All of them at once: (n, 3, size, size) float32 in [0, 1], 0.6 MB each at 224 pixels."""
        return torch.stack([self._load(k) for k in range(len(self))])

    def batches(self, size: int = 32) -> Batches:
        """Batches of `size` images, read from the disk at each pass: what every measure takes."""
        if size < 1:
            raise ValueError(f"a batch holds at least 1 image; got size={size}")
        return Batches(self, size)

    def _load(self, k: int) -> torch.Tensor:
        try:
            image, _ = _decode(self.files[k], self.size if self.crops is None else None)
        except _Unusable as error:
            raise ValueError(f"{self.names[k]} could be read before and cannot be now: {error}") from error
        image = _crop(image, self.size, self.crops[k] if self.crops else (1.0, 0.5, 0.5, False))
        pixels = torch.from_numpy(np.array(image))  # (size, size, 3) uint8
        return pixels.permute(2, 0, 1).float() / 255  # (3, size, size)


@dataclass(frozen=True)
class Batches:
    """Looks like a list of batches to a loop, and holds one at a time. The last may be smaller."""

    photos: Photos
    size: int

    def __len__(self) -> int:
        return -(-len(self.photos) // self.size)

    def __iter__(self) -> Iterator[torch.Tensor]:
        for start in range(0, len(self.photos), self.size):
            yield self.photos[start : start + self.size].images


def load_photos(
    folder: str | Path | None = None, n: int | None = None, size: int = 224, seed: int = 0
) -> Photos:
    """`n` photographs of a folder and those below it, or crops of the shipped ones when there is no folder.

    They come in an order that `seed` draws, so fewer are the first of more. From a folder (`n=None`: all):
    the shorter side is scaled to `size` pixels and the centre kept; transparency becomes white, 16 bits
    become 8, an animation gives its first picture. Each is decoded once to make sure that it can be;
    what cannot be used is left out with a warning that says why, and so is a shortfall. Without a folder
    (`n=None`: 64): squares of 40 to 100 % of the shorter side, half of them mirrored, with a warning that
    the photographs behind them are few. Raises ValueError when there is nothing to give.
    """
    if n is not None and (int(n) != n or n < 1):
        raise ValueError(f"load_photos needs a whole number of photographs, at least 1; got n={n!r}")
    if size < SMALLEST:
        raise ValueError(f"load_photos needs at least {SMALLEST} pixels a side; got size={size}")
    if seed < 0:
        raise ValueError(f"a seed is a whole number, 0 or more; got {seed}")
    if folder is None:
        return _shipped(64 if n is None else int(n), size, seed)
    return _folder(folder, n, size, seed)


def _folder(folder, n, size, seed):
    folder = Path(folder).expanduser()
    if not folder.is_dir():
        what = "is a file, not a folder" if folder.exists() else "does not exist"
        raise ValueError(f"the photo folder {folder} {what}")
    files = sorted(path for path in folder.rglob("*") if path.is_file() and not path.name.startswith("."))
    good, odd, wanted = [], [], n or len(files)
    for k in np.random.default_rng(seed).permutation(len(files)):
        name = files[k].relative_to(folder).as_posix()
        try:
            _, note = _decode(files[k], size)
            good.append((files[k], name))
        except _Unusable as error:
            note = f"left out: {error}"
        if note:
            odd.append(f"{name} ({note})")
        if len(good) == wanted:
            break
    if not good:
        seen = f"of its {len(files)} files none is: {_listed(odd)}" if files else "it is empty"
        raise ValueError(f"the folder {folder} holds no usable photograph; {seen}")
    if odd:
        warnings.warn(f"photographs of {folder}: {_listed(odd)}", stacklevel=3)
    if n is not None and len(good) < n:
        warnings.warn(f"{n} photographs were asked for and {folder} holds {len(good)} usable ones: "
                      f"going on with {len(good)}", stacklevel=3)
    paths, names = zip(*good, strict=True)
    return Photos(paths, names, size)


def _shipped(n, size, seed):
    files = _shipped_files()
    if not files:
        raise ValueError("no folder was given, and neither scikit-image nor scikit-learn, which ship a few "
                         "photographs, is installed: give a folder, or pip install scikit-image scikit-learn")
    warnings.warn(f"{n} crops of only {len(files)} photographs: enough to try things on, too few to conclude "
                  "from; give a folder of your own for more", stacklevel=3)
    rng = np.random.default_rng(seed)
    rounds = [rng.permutation(len(files)) for _ in range(-(-n // len(files)))]  # each photograph once a round
    source = np.concatenate(rounds)[:n]
    # a generator of its own for each crop, so that fewer are the first of more
    draws = [np.random.default_rng([seed, i]).uniform((0.4, 0, 0, 0), 1).tolist() for i in range(n)]
    return Photos(
        tuple(files[k] for k in source),
        tuple(f"{files[k].stem}-{i}" for i, k in enumerate(source)),
        size,
        tuple((side, left, top, coin < 0.5) for side, left, top, coin in draws),
    )


def _shipped_files():
    """The photographs of the installed packages; found without importing them, which takes seconds."""
    folders = {}
    for package, (inside, names) in SHIPPED.items():
        spec = find_spec(package)
        if spec is not None and spec.submodule_search_locations:
            folders[Path(spec.submodule_search_locations[0]) / inside] = names
    return [folder / name for folder, names in folders.items() for name in names if (folder / name).is_file()]


def _listed(notes, most=8):
    rest = len(notes) - most
    return "; ".join(notes[:most]) + (f"; and {rest} more" if rest > 0 else "")


class _Unusable(Exception):
    """Why a file cannot serve as a photograph."""


def _decode(path: Path, size: int | None = None) -> tuple[Image.Image, str]:
    """(the RGB image, what had to be done to it): decoded whole, or at no less than `size` where JPEG can."""
    try:
        with warnings.catch_warnings(), Image.open(path) as image:
            warnings.simplefilter("error", Image.DecompressionBombWarning)
            if min(image.size) < SMALLEST:
                raise _Unusable(f"{image.width} x {image.height} pixels, too small to show anything")
            note = "animated, its first picture is used" if getattr(image, "n_frames", 1) > 1 else ""
            if size is not None:
                image.draft("RGB", (size, size))
            image = ImageOps.exif_transpose(image)  # as the camera was held; decodes
            return _to_rgb(image), note
    except UnidentifiedImageError:
        raise _Unusable("not an image") from None
    except (Image.DecompressionBombError, Image.DecompressionBombWarning):
        raise _Unusable("too many pixels to decode safely") from None
    except (OSError, SyntaxError, ValueError, EOFError) as error:  # what Pillow raises for broken files
        raise _Unusable(f"broken or unreadable ({error})") from None


def _to_rgb(image: Image.Image) -> Image.Image:
    """8-bit RGB. A plain conversion would clip 16 bits to white and uncover what transparency hides."""
    if image.mode.startswith("I") or image.mode == "F":
        grey = np.asarray(image, dtype=np.float64)
        top = grey.max(initial=0)
        if not np.isfinite(grey).all() or grey.min(initial=0) < 0 or top > 65535:
            raise _Unusable("its numbers are not those of an 8- or 16-bit image")
        full = 1 if image.mode == "F" and top <= 1 else 255 if image.mode == "F" and top <= 255 else 65535
        return Image.fromarray(np.rint(grey * (255 / full)).astype(np.uint8)).convert("RGB")
    if image.mode in ("RGBA", "LA", "PA", "La", "RGBa") or "transparency" in image.info:
        image = image.convert("RGBA")
        return Image.alpha_composite(Image.new("RGBA", image.size, "white"), image).convert("RGB")
    return image.convert("RGB")


def _crop(image: Image.Image, size: int, crop) -> Image.Image:
    """The square that `crop` describes, scaled to `size` pixels."""
    share, left, top, mirrored = crop
    side = share * min(image.size)
    x, y = left * (image.width - side), top * (image.height - side)
    image = image.resize((size, size), Image.Resampling.BICUBIC, box=(x, y, x + side, y + side))
    return ImageOps.mirror(image) if mirrored else image
