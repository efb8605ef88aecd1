"""Effective receptive fields: which pixels can move a unit, and by how much (paper, figures 6, C.1 to C.4;
Luo 2016).

The field of a layer is |∂a / ∂x|: a an activation at one place of the feature map, x the pixels, averaged
over channels, colours and images. After a block's sum that is the paper's figure 6; of a branch alone
("blocks.3.attn", "layer2.0.bn3"), its figure C.4.

Choices the paper leaves open are arguments: the order of absolute value and channel average, the colours,
the place. Abs first needs a backward pass for each channel, and four times as many on an even grid. Where
that is too many, each image draws its own few of them, all different: the average stays unbiased, and many
images make up for few draws.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from .batches import check_images, images_of, loop
from .naming import modules_of
from .record import device_of, evaluating, observe, watch
from .tokens import Layout, layout, peek, places

ORDERS = ("abs-then-mean", "mean-then-abs")
COLOURS = {  # (B, 3, H, W) gradients -> (B, H, W)
    "mean": lambda gradient: gradient.abs().mean(1),
    "norm": lambda gradient: torch.linalg.vector_norm(gradient, dim=1),
    "grey": lambda gradient: gradient.sum(1).abs(),  # all colours moved together
}


def field(model: nn.Module, batches, layer: str, at: str | tuple[int, int] = "centre", **options) -> Tensor:
    """The effective receptive field of one layer: (H, W) float64. The options are those of `fields`."""
    return fields(model, batches, [layer], at, **options)[layer]


def fields(model: nn.Module, batches, layers: Sequence[str], at: str | tuple[int, int] = "centre",
           order: str = "abs-then-mean", rgb: str = "mean", draws: int | None = 256, seed: int = 0,
           per_image: bool = False, progress: bool = False) -> dict[str, Tensor]:
    """Effective receptive fields of several layers, one forward pass a batch: name -> (H, W), or (n, H, W).

    at: "centre" (on an even grid, which has none, the average over the four places around it), a (row,
    column) of the layer's own grid, or "cls". order: absolute value before ("abs-then-mean") or after
    averaging over channels, which lets channels cancel. rgb: "mean" of the three absolute values, their
    "norm", or "grey", all three moved together. draws: backward passes a layer in "abs-then-mean", so how
    many of its activations (places times channels) each image draws, by `seed`; exact where there are no
    more than that, or with None. Raises ValueError for a layer without a spatial grid or a place outside it.
    """
    if order not in ORDERS or rgb not in COLOURS:
        raise ValueError(f"order must be one of {ORDERS} and rgb of {tuple(COLOURS)}, not {order!r}, {rgb!r}")
    if draws is not None and draws < 1:
        raise ValueError(f"draws must be at least 1, or None for all activations; got {draws}")
    first, batches = peek(batches)
    where, parts = layout(model, first), {layer: [] for layer in layers}
    generator = torch.Generator().manual_seed(seed)

    def keep(output: Tensor) -> Tensor:
        return _units(output, model, where, at)

    observe(model, check_images(first)[:1], layers, keep)  # bad images, layers and places are told here
    floats = next((p.dtype for p in model.parameters() if p.is_floating_point()), first.dtype)
    for batch in loop(batches, progress):
        pixels = check_images(images_of(batch)).detach().to(device_of(model), floats).clone().requires_grad_()
        with torch.enable_grad(), evaluating(model):
            with watch(model, layers, keep, grad=True) as units:
                model(pixels)
            for layer in layers:
                targets = _targets(units[layer], order, draws, generator)
                parts[layer].append(_mean_gradient(targets, pixels, COLOURS[rgb]).double().cpu())
        if order == "mean-then-abs":
            _warn_if_cancelled(units, model)
    found = {layer: torch.cat(values) for layer, values in parts.items()}
    return found if per_image else {layer: value.mean(0) for layer, value in found.items()}


def radius(field: Tensor, mass: float = 0.5, centre: str | tuple[float, float] = "image") -> Tensor:
    """The radius in pixels of the disc that holds `mass` of a field: (H, W) -> (), or (…, H, W) -> (…).

    centre: the middle of the "image" (where a "centre" field belongs), the field's own centre of "mass" (for
    strided convolutions, whose units sit up to half a cell off the grid's middle), or (y, x) in pixels. NaN
    for an all-zero field. The smallest distance of a pixel at which the mass is reached, so 0 when the
    middle pixel holds it.
    """
    if not 0 < mass <= 1:
        raise ValueError(f"mass must lie between 0 and 1, not {mass!r}")
    if field.ndim < 2 or not (field >= 0).all():
        raise ValueError(f"a field is (H, W) and nowhere negative; got shape {tuple(field.shape)}")
    field = field.double()
    total = field.sum((-2, -1))  # (…)
    ys, xs = (torch.arange(size, dtype=torch.float64, device=field.device) for size in field.shape[-2:])
    if centre == "image":
        y, x = (total.new_full(total.shape, (size - 1) / 2) for size in field.shape[-2:])
    elif centre == "mass":
        y, x = (field.sum(-1) * ys).sum(-1) / total, (field.sum(-2) * xs).sum(-1) / total
    else:
        y, x = (total.new_full(total.shape, place) for place in centre)
    distances = torch.hypot(ys[:, None] - y[..., None, None], xs - x[..., None, None])  # (…, H, W)
    distances, order = distances.flatten(-2).sort(-1)
    held = field.flatten(-2).gather(-1, order).cumsum(-1)
    reached = held >= mass * total[..., None] * (1 - 1e-12)  # sums may end a rounding short
    found = distances.gather(-1, reached.int().argmax(-1, keepdim=True))[..., 0]
    return found.where(total > 0, torch.nan)


def _units(output: Tensor, model: nn.Module, where: Layout | None, at) -> Tensor:
    """The activations at the asked place(s) of a layer's output: (B, places, channels), copied."""
    tokens, prefix, grid = places(output, model, where)
    if at == "cls":
        if not (where and where.has_cls and prefix):
            raise ValueError('at="cls" was asked for, but the layer has no CLS token')
        return tokens[:, [0]]
    if at == "centre":
        rows, columns = (sorted({(size - 1) // 2, size // 2}) for size in grid)
    elif isinstance(at, (tuple, list)) and len(at) == 2 and 0 <= at[0] < grid[0] and 0 <= at[1] < grid[1]:
        rows, columns = [at[0]], [at[1]]
    else:
        raise ValueError(f'at must be "centre", "cls" or a (row, column) within {grid}, not {at!r}')
    index = [prefix + row * grid[1] + column for row in rows for column in columns]
    return tokens[:, index]  # indexing with a list copies, so a later in-place layer cannot change it


def _targets(units: Tensor, order: str, draws: int | None, generator: torch.Generator) -> list[Tensor]:
    """What to take gradients of, one backward pass each: (B,) tensors, an activation for each image."""
    if order == "mean-then-abs":
        return list(units.mean(2).unbind(1))  # (B, P, C) -> P of (B,)
    flat = units.flatten(1)  # (B, P·C)
    if draws is None or draws >= flat.shape[1]:
        return list(flat.unbind(1))
    drawn = torch.rand(flat.shape, generator=generator).argsort(1)[:, :draws]  # (B, draws)
    return list(flat.gather(1, drawn.to(flat.device)).unbind(1))


def _mean_gradient(targets: list[Tensor], pixels: Tensor, colours) -> Tensor:
    """The mean over targets of |∂target / ∂pixels|: (B, H, W)."""
    total = 0.0
    for target in targets:
        # images do not mix in eval mode, so the gradient of their sum holds each image's own
        gradient, = torch.autograd.grad(target.sum(), pixels, retain_graph=True, materialize_grads=True)
        total = total + colours(gradient)
    return total / len(targets)


def _warn_if_cancelled(units: dict[str, Tensor], model: nn.Module) -> None:
    """The channel mean of a LayerNorm's output is a constant: its gradient is rounding noise."""
    modules = modules_of(model)
    if normed := [name for name in units if isinstance(modules.get(name), nn.LayerNorm)]:
        warnings.warn("the mean over channels of a LayerNorm's output hardly depends on the image: the "
                      f"fields of {normed} are mostly rounding noise; take blocks or order 'abs-then-mean'",
                      stacklevel=3)
