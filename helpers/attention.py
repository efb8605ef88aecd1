"""How far attention looks (paper, section 5, figures 3 to 5, C.5, C.6).

The mean attention distance of a head: the distance in pixels from a query patch to a key patch, weighted by
the attention between them, averaged over queries and images. CLS, distillation and register tokens have no
place in the image and are left out, of queries and of keys.

Symbols: n images, L blocks, h heads, t tokens (prefix tokens first), gh x gw the grid of patches, p = gh·gw.
"""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from .cka import Comparison, MinibatchCKA, gram
from .naming import modules_of, unwrap
from .record import layers, record, stream
from .tokens import Layout, layout, peek


@contextmanager
def softmax_visible(model: nn.Module):
    """Fused attention never forms its weights: switch it off, and back on afterwards."""
    fused = [module for module in model.modules() if getattr(module, "fused_attn", False) is True]
    for module in fused:
        module.fused_attn = False
    try:
        yield model
    finally:
        for module in fused:
            module.fused_attn = True


def attention_maps(model: nn.Module, batches, blocks=None, progress: bool = False) -> Tensor:
    """Attention weights after the softmax: (L, n, h, t, t), [..., q, k] from query q to key k, all tokens.

    `blocks`: indices, default all. For a few images: memory grows with L·n·h·t².
    """
    _, batches = peek(batches)
    names = _softmax_layers(model, blocks)
    with softmax_visible(model):
        kept = record(model, batches, names, keep=lambda weights: weights, progress=progress)
    return torch.stack([kept[name] for name in names])


def patch_distances(grid: int | tuple[int, int], patch_size: float | tuple[float, float]) -> Tensor:
    """Distance in pixels between the centres of any two patches: (p, p), row-major, 0 on the diagonal."""
    (gh, gw), (ph, pw) = _pair(grid, "grid"), _pair(patch_size, "patch_size")
    rows, columns = torch.meshgrid(torch.arange(gh) * ph, torch.arange(gw) * pw, indexing="ij")
    places = torch.stack([rows.flatten(), columns.flatten()], 1).double()  # (p, 2)
    return torch.linalg.vector_norm(places[:, None] - places[None], dim=2)


def uniform_distance(grid: int | tuple[int, int], patch_size: float | tuple[float, float]) -> float:
    """The mean distance of a head that attends to all patches alike, itself included: pixels."""
    return patch_distances(grid, patch_size).mean().item()


def query_distances(maps: Tensor, distances: Tensor, prefix: int = 1, renormalise: bool = True) -> Tensor:
    """Attention-weighted distance of each query patch: maps (…, t, t), distances (p, p) -> (…, p) in pixels.

    Keys without a place are left out. With `renormalise` the rest of each row is scaled to sum to 1 again,
    else the attention that went to CLS counts as distance 0. A row with nothing left on patches has no
    distance: NaN.
    """
    if maps.shape[-1] != prefix + len(distances):
        raise ValueError(f"maps have {maps.shape[-1]} tokens, {prefix} without a place and {len(distances)} "
                         f"patches make {prefix + len(distances)}; does the grid fit the image size?")
    weights = maps[..., prefix:, prefix:].float()  # (…, p, p)
    spread = (weights * distances.to(weights)).sum(-1)
    if not renormalise:
        return spread
    mass = weights.sum(-1)
    return torch.where(mass > 0, spread / mass, torch.nan)


def mean_distance(model: nn.Module, batches, blocks=None, renormalise: bool = True, per_image: bool = False,
                  progress: bool = False) -> Tensor:
    """Mean attention distance of every head in pixels: (L, h), or (L, h, n) with `per_image`, float64.

    Averaged over query patches and images (paper, section 5: 5,000 images; the published code removes CLS
    without renormalising). Raises ValueError for models without global attention between patches.
    """
    images, batches = peek(batches)
    names, keep = distance_taps(model, images, blocks, renormalise)
    with softmax_visible(model):
        kept = record(model, batches, names, keep, progress)
    values = torch.stack([kept[name].double().T for name in names])  # (L, h, n)
    return values if per_image else values.nanmean(-1)


def distance_taps(model: nn.Module, images: Tensor, blocks=None, renormalise: bool = True):
    """What `mean_distance` watches, for a pass that measures other things too: (layers, keep).

    `keep` turns the weights (B, h, t, t) that a layer passes on, while `softmax_visible`, into each head's
    mean distance (B, h), for images of the size of `images`.
    """
    names, where = _softmax_layers(model, blocks), layout(model, images)
    distances = patch_distances(where.grid, where.patch)

    def keep(weights: Tensor) -> Tensor:
        _check_weights(weights, where)
        return query_distances(weights, distances, where.prefix, renormalise).nanmean(-1)

    return names, keep


@dataclass(repr=False)
class HeadSubsets(Comparison):
    """CKA of S subsets of heads (rows, the most local first) with another network's layers (columns)."""

    distance: Tensor  # (S,) mean attention distance of the subset, pixels
    heads: list[tuple[int, ...]]  # which heads each subset holds


def head_subsets_cka(model: nn.Module, other: nn.Module, batches, block: int = 0, other_layers=None,
                     size: int = 0, unbiased: bool = True, progress: bool = False) -> HeadSubsets:
    """CKA between subsets of a ViT block's heads and early layers of another network (paper, figure 5).

    Heads are sorted by mean attention distance; a subset is `size` neighbours in that order (default a
    quarter of the heads, at least one). Its representation is the heads' outputs at the patch tokens before
    the output projection, concatenated: with a linear kernel its Gram matrix is the sum of the heads' own,
    so h Gram matrices serve all subsets. `other_layers`: default the first five blocks.
    """
    images, batches = peek(batches)
    batches = list(batches)  # gone through three times, in one order
    where, (softmax,) = layout(model, images), _softmax_layers(model, [block])
    distance = mean_distance(model, batches, [block])[0]  # (h,)
    heads, order = len(distance), distance.argsort().tolist()
    size = size or max(1, heads // 4)
    if not 1 <= size <= heads:
        raise ValueError(f"a subset of {size} heads was asked for, but block {block} has {heads}")
    subsets = [tuple(order[i : i + size]) for i in range(heads - size + 1)]
    columns = list(other_layers or layers(other)[:5])

    def head_grams(joined: Tensor) -> Tensor:  # (B, t, h·d) -> (h, B, B)
        parts = joined[:, where.prefix :].unflatten(2, (heads, -1)).unbind(2)
        return torch.stack([gram(part) for part in parts])

    outputs = softmax.replace("attn_drop", "proj") + ":input"
    total = MinibatchCKA(unbiased)
    for ours, theirs in zip(stream(model, batches, [outputs], head_grams, progress),
                            stream(other, batches, columns, gram), strict=True):
        total.update([ours[outputs][list(subset)].sum(0).cpu() for subset in subsets],
                     [theirs[name].cpu() for name in columns])
    means = torch.stack([distance[list(subset)].mean() for subset in subsets])
    rows = [f"heads {', '.join(map(str, subset))}" for subset in subsets]
    return HeadSubsets(total.matrix(), rows, columns, sum(total.images), total, means, subsets)


def _softmax_layers(model: nn.Module, blocks=None) -> list[str]:
    """Names of the modules that see each block's attention weights; ValueError where there are none."""
    model = unwrap(model)
    modules, kind = modules_of(model), type(model).__name__
    depth = len(getattr(model, "blocks", ()))
    has_patches = getattr(getattr(model, "patch_embed", None), "grid_size", None) is not None
    attentions = [f"blocks.{i}.attn" for i in range(depth)]
    names = [f"{name}.attn_drop" for name in attentions]
    differential = any(hasattr(modules.get(name), "lambda_init") for name in attentions)
    if not (has_patches and names and all(name in modules for name in names)) or differential:
        raise ValueError(
            f"attention distance cannot be measured on a {kind}: it needs a ViT in which every patch attends "
            "to every other (blocks.i.attn, its weights passing through attn_drop). Windows (Swin), "
            "convolutions (ResNet, ConvNeXt, EfficientNet), token-mixing MLPs (Mixer) and attention that "
            "mixes or subtracts maps have no such weights; CKA, receptive fields and probes work on them")
    chosen = range(depth) if blocks is None else [blocks] if isinstance(blocks, int) else list(blocks)
    if bad := [i for i in chosen if not -depth <= i < depth] or (["none"] if not chosen else []):
        raise ValueError(f"blocks {bad} were asked for; this model has {depth}, numbered 0 to {depth - 1}")
    return [names[i] for i in chosen]


def _check_weights(weights: Tensor, where: Layout) -> None:
    """Attention between all tokens, every row a distribution: otherwise what was caught is something else."""
    t = where.tokens
    if weights.ndim != 4 or weights.shape[-2:] != (t, t):
        raise ValueError(f"attention weights of shape {tuple(weights.shape)} were seen where (n, heads, {t}, "
                         f"{t}) was needed: {where.prefix} prefix tokens and a grid of {where.grid}. "
                         "Windowed or pooled attention, or images of different sizes?")
    if not torch.allclose(weights.float().sum(-1), torch.ones((), device=weights.device), atol=1e-2):
        raise ValueError("rows of the attention weights do not sum to 1: this model mixes or subtracts "
                         "attention maps, so a mean distance would mean nothing")


def _pair(value, name: str) -> tuple:
    pair = tuple(value) if isinstance(value, (tuple, list, torch.Size)) else (value, value)
    if len(pair) != 2 or not all(x > 0 for x in pair):
        raise ValueError(f"{name} must be one or two positive numbers (height, width), not {value!r}")
    return pair
