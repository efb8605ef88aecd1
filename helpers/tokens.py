"""Where in the image a layer's tokens or positions lie, for ViTs, Mixers and feature maps alike.

Prefix tokens (CLS, distillation, registers: 0 to 5 of them) come first and have no place; then the patches,
row by row. The grid comes from the model and the image size, never from a square root: images need not be
square.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import chain

from torch import Tensor, nn

from .batches import images_of
from .naming import unwrap


@dataclass(frozen=True)
class Layout:
    """A transformer's tokens: `prefix` without a place, then `grid` (rows, columns) of patches of `patch`
    pixels."""

    prefix: int
    has_cls: bool  # whether token 0 is CLS
    grid: tuple[int, int]
    patch: tuple[float, float]  # height, width

    @property
    def tokens(self) -> int:
        return self.prefix + self.grid[0] * self.grid[1]


def layout(model: nn.Module, images: Tensor) -> Layout | None:
    """The token layout of a ViT or Mixer for images (n, 3, H, W); None for a model without a fixed token
    grid."""
    model = unwrap(model)
    embed = getattr(model, "patch_embed", None) or getattr(model, "stem", None)
    if getattr(embed, "grid_size", None) is None or not hasattr(model, "blocks"):
        return None
    size = images.shape[-2:]
    if hasattr(embed, "dynamic_feat_size"):
        grid, patch = embed.dynamic_feat_size(size), embed.feat_ratio(as_scalar=False)
    else:
        grid, patch = embed.grid_size, [s / g for s, g in zip(size, embed.grid_size, strict=True)]
    has_cls = getattr(model, "cls_token", None) is not None
    return Layout(getattr(model, "num_prefix_tokens", int(has_cls)), has_cls, tuple(grid), tuple(patch))


def places(output: Tensor, model: nn.Module, where: Layout | None) -> tuple[Tensor, int, tuple[int, int]]:
    """A layer's output as (B, prefix + gh·gw, channels), with its prefix and its grid (gh, gw).

    Takes tokens (B, t, channels) of a model with layout `where`, and feature maps (B, channels, gh, gw), or
    (B, gh, gw, channels) where timm says so (Swin). Raises ValueError for anything without a place in the
    image, and for a map whose axes look to be in the other order: timm speaks of a model's last output only.
    """
    if output.ndim == 4:
        channels_last = str(getattr(unwrap(model), "output_fmt", "NCHW")).endswith("NHWC")
        _, one, two, three = output.shape
        if one != three and two == (three if channels_last else one):
            said = "(n, rows, columns, C)" if channels_last else "(n, C, rows, columns)"
            raise ValueError(f"a layer of shape {tuple(output.shape)} does not look like the {said} that its "
                             "model declares: which axes are places cannot be told")
        output = output if channels_last else output.permute(0, 2, 3, 1)  # (B, gh, gw, channels)
        return output.flatten(1, 2), 0, tuple(output.shape[1:3])
    if output.ndim == 3 and where is not None:
        for prefix in {where.prefix: None, 0: None}:  # some layers hold the patches only
            if output.shape[1] == prefix + where.grid[0] * where.grid[1]:
                return output, prefix, where.grid
    needed = f"tokens (n, {where.tokens}, channels)" if where else "a feature map (n, C, rows, columns)"
    raise ValueError(f"a layer of shape {tuple(output.shape)} has no places in the image: needed is {needed}")


def peek(batches) -> tuple[Tensor, object]:
    """The first batch's images, and the batches whole again, those of a generator too."""
    if isinstance(batches, (Tensor, dict)):
        batches = [batches]
    iterator = iter(batches)
    first = next(iterator, None)
    if first is None:
        raise ValueError("there were no batches: an empty loader, or a generator that was already used up")
    return images_of(first), chain([first], iterator) if iterator is batches else batches
