"""Does a token still know its place? (paper, section 7, figures 9, 10, D.1 to D.3)

CKA between one token of a layer and every raw patch of the image: if the token still carries what was at its
place, the map peaks at its own patch. The grid of patches is the grid of the layer: in a ResNet the "tokens"
are the positions of its feature map, and the image is cut into as many patches as it has positions.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from .batches import check_images, images_of, loop
from .cka import Comparison, MinibatchCKA, deconfound, gram
from .grams import SMALLEST
from .record import observe
from .tokens import layout, places


@dataclass(repr=False)
class Localisation(Comparison):
    """CKA of tokens (rows) with raw patches (columns); `interval` and `bootstrap` resample the batches."""

    grid: tuple[int, int]

    @property
    def maps(self) -> Tensor:
        """(tokens, gh, gw)"""
        return self.values.unflatten(1, self.grid)


def token_patch_cka(model: nn.Module, batches, layer: str, tokens=None, **options) -> Tensor:
    """CKA of tokens of a layer with every raw patch: (tokens, gh, gw) float64. See `localise` for options."""
    return localise(model, batches, layer, tokens, **options).maps


def localise(model: nn.Module, batches, layer: str, tokens=None, unbiased: bool = True,
             deconfounded: bool = False, progress: bool = False) -> Localisation:
    """CKA of tokens of a layer with every raw patch, with all that an interval over batches needs.

    tokens: a list of indices without CLS, row by row, or of (row, column) pairs; None for all. deconfounded:
    what the similarity of whole images explains is taken out of tokens and patches first. Batches of fewer
    than 4 images (2 for the biased estimator) are left out.
    Raises ValueError for a layer without places in the image, or a grid that does not divide it.
    """
    total, grid = MinibatchCKA(unbiased), None
    for batch in loop(batches, progress):
        images = check_images(images_of(batch))
        if len(images) < SMALLEST[unbiased]:
            continue
        grid, grams = token_grams(model, images, layer, tokens)
        pair = [grams.cpu(), patch_grams(images, grid).cpu()]
        if deconfounded:
            pixels = gram(images).cpu()
            pair = [deconfound(K, pixels, unbiased) for K in pair]
        total.update(*pair)
    return _localisation(total, tokens, grid)


def sharpness(maps: Tensor, tokens=None, relative: bool = False) -> Tensor:
    """How far a token's own patch stands out: its CKA minus the mean of all other patches', (tokens,).

    maps: (tokens, gh, gw), tokens as given to `token_patch_cka`. `relative` divides by the standard deviation
    over the other patches, for comparing networks whose CKA is of a different size.
    """
    flat, own = _own(maps, tokens)
    others = flat.scatter(1, own, torch.nan)  # (tokens, gh·gw)
    gap = flat.gather(1, own).squeeze(1) - others.nanmean(1)
    if not relative:
        return gap
    rest = (others - others.nanmean(1, keepdim=True)).square().nanmean(1).sqrt()
    return gap / rest


def own_rank(maps: Tensor, tokens=None) -> Tensor:
    """The rank of a token's own patch among all patches, 1 the most similar: (tokens,) int64."""
    flat, own = _own(maps, tokens)
    return 1 + (flat > flat.gather(1, own)).sum(1)


def token_indices(tokens, grid: tuple[int, int]) -> list[int]:
    """Row-major indices of tokens given as a list of indices or (row, column) pairs, or None for all."""
    gh, gw = grid
    if tokens is None:
        return list(range(gh * gw))
    indices = []
    for token in [tokens] if isinstance(tokens, int) else _plain(tokens):
        row, column = divmod(token, gw) if isinstance(token, int) else map(int, token)
        if not (0 <= row < gh and 0 <= column < gw):
            raise ValueError(f"token {token!r} does not lie in the layer's grid of {gh} x {gw}: give indices "
                             f"from 0 to {gh * gw - 1}, CLS not counted, or (row, column) pairs")
        indices.append(row * gw + column)
    return indices


def token_grams(model: nn.Module, images: Tensor, layer: str, tokens=None) -> tuple[tuple[int, int], Tensor]:
    """The grid of a layer, and the Gram matrices of its tokens: (gh, gw), (tokens, B, B)."""
    return observe(model, images, [layer], token_tap(model, images, tokens))[layer]


def token_tap(model: nn.Module, images: Tensor, tokens=None):
    """What `token_grams` keeps of a layer, for a pass that measures other things too.

    `tokens` may be a function of the layer's grid.
    """
    where = layout(model, images)

    def keep(output: Tensor):
        values, prefix, grid = places(output, model, where)
        chosen = token_indices(tokens(grid) if callable(tokens) else tokens, grid)
        return grid, torch.stack([gram(values[:, prefix + i]) for i in chosen])

    return keep


def patch_grams(images: Tensor, grid: tuple[int, int]) -> Tensor:
    """Gram matrices of the raw patches: images (B, 3, H, W) -> (gh·gw, B, B), row by row."""
    (height, width), (gh, gw) = images.shape[-2:], grid
    if height % gh or width % gw:
        raise ValueError(f"images of {height} x {width} pixels cannot be cut into {gh} x {gw} equal patches; "
                         "resize them to a multiple of it")
    patches = images.unflatten(3, (gw, -1)).unflatten(2, (gh, -1))  # (B, 3, gh, ph, gw, pw)
    patches = patches.permute(2, 4, 0, 1, 3, 5).flatten(0, 1)  # (gh·gw, B, 3, ph, pw)
    return torch.stack([gram(patch) for patch in patches])


def _localisation(total: MinibatchCKA, tokens, grid) -> Localisation:
    if not total.images:
        raise ValueError(f"no batch had the {SMALLEST[total.unbiased]} images that CKA needs")
    names = [f"({i // grid[1]}, {i % grid[1]})" for i in range(grid[0] * grid[1])]
    rows = [names[i] for i in token_indices(tokens, grid)]
    return Localisation(total.matrix(), rows, names, sum(total.images), total, grid)


def _own(maps: Tensor, tokens) -> tuple[Tensor, Tensor]:
    """Maps as (tokens, gh·gw), and the index of each token's own patch, (tokens, 1)."""
    own = token_indices(tokens, tuple(maps.shape[1:]))
    if len(own) != len(maps):
        raise ValueError(f"{len(maps)} maps were given with {len(own)} tokens: one map a token is needed")
    return maps.flatten(1).double(), torch.tensor(own, device=maps.device)[:, None]


def _plain(tokens) -> list:
    return tokens.tolist() if hasattr(tokens, "tolist") else list(tokens)
