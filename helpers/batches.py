"""Batches of images as users give them: found in whatever they are, and checked before a model sees them."""

from __future__ import annotations

import warnings
from collections.abc import Iterable

from torch import Tensor, nn

IMAGE_KEYS = ("image", "images", "pixel_values")
LARGEST_SENSIBLE_PIXEL = 32.0  # images in [0, 1], standardised or not, stay far below; 0-255 does not


def loop(batches, progress: bool = False) -> Iterable:
    """Something to iterate over: a single tensor or dict is one batch; with a progress bar if wanted."""
    batches = [batches] if isinstance(batches, (Tensor, dict)) else batches
    if not hasattr(batches, "__iter__") and not hasattr(batches, "__getitem__"):
        raise ValueError(f"batches must be something to loop over, not {type(batches).__name__}")
    if progress:
        from tqdm.auto import tqdm
        return tqdm(batches, unit="batch")
    return batches


def images_of(batch) -> Tensor:
    """The images of a batch: a tensor, the first item of a tuple or list, or a dict's "image"."""
    if isinstance(batch, dict):
        keys = [key for key in IMAGE_KEYS if key in batch]
        if not keys:
            raise ValueError(f"a batch has the keys {list(batch)}; images must be under one of {IMAGE_KEYS}")
        batch = batch[keys[0]]
    elif isinstance(batch, (tuple, list)) and batch:
        batch = batch[0]
    if not isinstance(batch, Tensor):
        raise ValueError("a batch must be a tensor of images, or a tuple that starts with one, "
                         f"not {type(batch).__name__}")
    return batch


def check_images(images: Tensor) -> Tensor:
    """The images themselves, or a ValueError that says what is wrong with them; a warning for 0-255."""
    if images.ndim != 4 or images.shape[0] == 0:
        raise ValueError(f"images must be (n, channels, height, width) with n ≥ 1, not {tuple(images.shape)}"
                         + "; add the batch axis with images[None]" * (images.ndim == 3)
                         + "; was (images, labels) given for a list of batches?" * (images.ndim == 1))
    if not images.is_floating_point():
        raise ValueError(f"images are {images.dtype}, not floating point in [0, 1]: use images.float() / 255")
    low, high = map(float, images.aminmax())
    if not (abs(low) < float("inf") and abs(high) < float("inf")):  # false for NaN too
        bad = int((~images.isfinite()).flatten(1).any(1).sum())
        raise ValueError(f"{bad} of {len(images)} images hold NaN or infinite pixels")
    if max(-low, high) > LARGEST_SENSIBLE_PIXEL:
        warnings.warn(f"pixels run from {low:g} to {high:g}: models expect [0, 1], standardised or not. "
                      "Were the images left at 0-255?", stacklevel=2)
    return images


def expected_size(model: nn.Module) -> tuple:
    """(channels, height, width) that a model asks for, or those words where it does not say."""
    channels = next((m.in_channels for m in model.modules() if isinstance(m, nn.Conv2d)), "channels")
    config = getattr(model, "pretrained_cfg", None) or {}
    size = getattr(getattr(model, "patch_embed", None), "img_size", None)
    size = size or config.get("input_size", (0, "height", "width"))[1:]
    return (channels, *size)
