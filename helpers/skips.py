"""What rides on a skip connection, and what happens without it (paper, section 6, figures 7, 8, E.1, E.2).

A residual block adds a branch f to what its skip carries: z + f(z). A ViT block does so twice (attention,
MLP), a ResNet unit once. `norm_ratios` compares ‖z‖ with ‖f(z)‖, `cut_skip` leaves z out of the sum.
"""

from __future__ import annotations

import types
import warnings
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from .naming import modules_of
from .record import layers, record
from .tokens import layout, peek, places

BRANCHES = ("attn", "mlp")


@dataclass(frozen=True)
class Ratios:
    """A number for every token of every image, block and branch; tables of it have shape (L, branches).

    A ViT has the branches "attn" and "mlp" and gives (L, 2); a ResNet's unit has one and gives (L,), its
    tokens being the positions of the feature map.
    """

    blocks: list[str]
    branches: tuple[str, ...]
    each: dict[str, Tensor]  # "block branch" -> (n, tokens), prefix tokens first
    prefix: int  # tokens without a place (CLS, registers); 0 for a ResNet
    has_cls: bool

    @property
    def cls(self) -> Tensor | None:
        """Mean over images at CLS: (L, 2); None for a model without CLS."""
        return self.table(Tensor.mean, "cls") if self.has_cls else None

    @property
    def cls_median(self) -> Tensor | None:
        return self.table(Tensor.nanmedian, "cls") if self.has_cls else None

    @property
    def patches(self) -> Tensor:
        """Mean over patches and images (the mean of ratios, not the ratio of means): (L, 2) or (L,)."""
        return self.table(Tensor.nanmean)

    @property
    def patches_median(self) -> Tensor:
        """Median over patches and images: what a few outlier tokens cannot move."""
        return self.table(Tensor.nanmedian)

    @property
    def tokens(self) -> Tensor:
        """Mean over images at each token: (L, 2, t), prefix tokens first (figures 7 and E.1). ViTs only."""
        return self.table(lambda values: values.mean(0), "all")

    def per_image(self, part: str = "patches") -> Tensor:
        """Mean over the tokens of each image, for resampling images: (L, 2, n) or (L, n)."""
        return self.table(lambda values: values.nanmean(1), part)

    def table(self, reduce: Callable[[Tensor], Tensor], part: str = "patches") -> Tensor:
        """`reduce` applied to the (n, tokens) of each block and branch; `part`: "cls", "patches" or "all"."""
        if part == "cls" and not self.has_cls:
            raise ValueError("this model has no CLS token")
        chosen = {"cls": slice(0, 1), "patches": slice(self.prefix, None), "all": slice(None)}[part]
        rows = [[reduce(self.each[f"{block} {branch}"][:, chosen].double()) for branch in self.branches]
                for block in self.blocks]
        return torch.stack([torch.stack(row) if len(row) > 1 else row[0] for row in rows])


def norm_ratios(model: nn.Module, batches, progress: bool = False) -> Ratios:
    """‖z‖ / ‖f(z)‖ of every token: what the skip carries against what the branch adds (paper, figure 7).

    z is the stream that enters the branch; f(z) is all that is added to it, norm and LayerScale included. In
    a ResNet z is what reaches the sum: the unit's input, or, where the shape changes, the projected input. A
    branch that adds exactly nothing gives inf, with a warning. Raises ValueError for models without such
    blocks.
    """
    images, batches = peek(batches)
    wanted, keep = ratio_taps(model, images)
    return ratios(model, images, record(model, batches, wanted, keep, progress))


def ratio_taps(model: nn.Module, images: Tensor):
    """What `norm_ratios` watches, for a pass that measures other things too: (layers, keep).

    `ratios` makes the table from what was kept, by layer, for images of the size of `images`.
    """
    wanted = dict.fromkeys(site for pair in _sites(model).values() for site in pair)
    return list(wanted), _norms(model, images)


def ratios(model: nn.Module, images: Tensor, norms: dict[str, Tensor]) -> Ratios:
    """The table of norm ratios from the norms (n, tokens) at each of the layers of `ratio_taps`."""
    sites = _sites(model)
    each = {name: norms[z] / norms[f] for name, (z, f) in sites.items()}
    if silent := [name for name, values in each.items() if values.isinf().any()]:
        warnings.warn(f"branches add exactly nothing to some tokens, their ratio is infinite: {silent}. "
                      "Untrained models often start so (a last norm or LayerScale of 0)", stacklevel=2)
    branches = BRANCHES if next(iter(sites)).endswith(BRANCHES) else ("unit",)
    return _ratios(model, images, branches, each)


def block_cosines(model: nn.Module, batches, progress: bool = False) -> Ratios:
    """Cosine between a block's input and its output, token by token (paper, figure E.2); one branch, "block".

    NaN for ResNet units that change the shape.
    """
    images, batches = peek(batches)
    blocks, where, entering = layers(model), layout(model, images), []

    def keep(value: Tensor) -> Tensor:  # called in turn with a block's input and its output
        vectors = places(value, model, where)[0].float()
        if not entering:
            entering.append(vectors.clone())  # a copy, should the block work in place
            return value.new_zeros(len(value), 0)
        before, after = entering.pop(), vectors
        if before.shape != after.shape:
            return after.new_full(after.shape[:2], torch.nan)
        return torch.cosine_similarity(before, after, dim=2)

    kept = record(model, batches, [site for b in blocks for site in (f"{b}:input", b)], keep, progress)
    return _ratios(model, images, ("block",), {f"{b} block": kept[b] for b in blocks})


def token_norms(model: nn.Module, batches, progress: bool = False) -> dict[str, Tensor]:
    """‖z‖ of every token after each block: name -> (n, t). Outliers stand out here (Darcet et al. 2024)."""
    images, batches = peek(batches)
    return record(model, batches, layers(model), _norms(model, images), progress)


def _norms(model: nn.Module, images: Tensor) -> Callable[[Tensor], Tensor]:
    """The function from a layer's output to the norm of the vector at each token or position, (B, t)."""
    where = layout(model, images)  # float32 below: squares of half floats overflow
    return lambda output: torch.linalg.vector_norm(places(output, model, where)[0].float(), dim=2)


def _ratios(model: nn.Module, images: Tensor, branches: tuple[str, ...], each: dict[str, Tensor]) -> Ratios:
    where = layout(model, images)
    prefix, has_cls = (where.prefix, where.has_cls) if where else (0, False)
    return Ratios([name.split(" ")[0] for name in each][:: len(branches)], branches, each, prefix, has_cls)


def _sites(model: nn.Module) -> dict[str, tuple[str, str]]:
    """"block branch" -> where to find z and f(z)."""
    modules, sites = modules_of(model), {}
    for name in layers(model):
        block = modules[name]
        if is_unit(block):
            projected = block.downsample is not None
            parts = ("drop_path", "se", "bn3", "bn2")  # the last of the branch is what is added
            last = next(part for part in parts if getattr(block, part, None) is not None)
            sites[f"{name} unit"] = (f"{name}.downsample" if projected else f"{name}:input", f"{name}.{last}")
        elif is_vit_block(block):
            second = "mlp" if is_post_norm(block) else "norm2"
            sites[f"{name} attn"] = (f"{name}:input", f"{name}.drop_path1")
            sites[f"{name} mlp"] = (f"{name}.{second}:input", f"{name}.drop_path2")
        else:
            raise ValueError(f"norm ratios cannot be measured on {name}, a {type(block).__name__}: needed "
                             "are ViT blocks with an attention and an MLP branch, or ResNet units")
    return sites


@contextmanager
def cut_skip(model: nn.Module, block: int | str, branch: str = "both"):
    """The model with the skip connection of one block gone: f(z) instead of z + f(z); put back afterwards.

    `block`: its index in forward order (as in `record.layers(model)`) or its name. `branch`: "attn", "mlp"
    or "both" for a ViT block; a ResNet unit has one skip, so "both" only. This is surgery on a trained
    model, which is not the paper's experiment: there the model is trained without the skip (`remove_skip`
    before training).
    """
    module = modules_of(model)[_block_name(model, block)]
    restore = remove_skip(module, branch)
    try:
        yield model
    finally:
        restore()


def remove_skip(block: nn.Module, branch: str = "both"):
    """Take the skip connection out of one block, in place; returns a function that puts it back.

    The sum is never formed, so what remains is f(z) exactly. Works for timm's ViT, BEiT, EVA and
    relative-position blocks, pre-norm or post-norm, and for timm's ResNet units. Raises ValueError for any
    other block.
    """
    if branch not in ("both", *BRANCHES):
        raise ValueError(f'branch must be "attn", "mlp" or "both", not {branch!r}')
    if is_unit(block):
        if branch != "both":
            raise ValueError(f'a {type(block).__name__} has one skip: branch must be "both", not {branch!r}')
        shortcut, block.downsample = block.downsample, _Nothing()
        return lambda: setattr(block, "downsample", shortcut)
    if not is_vit_block(block):
        raise ValueError(f"a {type(block).__name__} has no skip connection that can be cut here: needed is a "
                         "block of timm's ViT family (norm1, attn, drop_path1, norm2, mlp, drop_path2) or a "
                         "ResNet unit")
    cut, before = BRANCHES if branch == "both" else (branch,), block.__dict__.get("forward")

    def forward(self, x: Tensor, *args, **kwargs) -> Tensor:
        for name, function in _branches(self, args, kwargs):
            x = function(x) if name in cut else x + function(x)
        return x

    def restore():
        if before is None:
            del block.forward
        else:
            block.forward = before

    block.forward = types.MethodType(forward, block)  # bound: a deep copy of the model runs its own weights
    return restore


class _Nothing(nn.Module):
    """A shortcut that carries nothing: adding 0 is exact."""

    def forward(self, x: Tensor) -> Tensor:
        return x.new_zeros(())


def is_unit(block: nn.Module) -> bool:
    """A ResNet unit of timm's: some convolutions beside a shortcut, which is `downsample` or the identity."""
    return all(hasattr(block, name) for name in ("conv1", "conv2", "downsample"))


def is_vit_block(block: nn.Module) -> bool:
    """A block of timm's ViT family: x + drop_path1(attention), then x + drop_path2(MLP)."""
    parts = ("norm1", "attn", "drop_path1", "norm2", "mlp", "drop_path2")
    return all(hasattr(block, name) for name in parts) and not hasattr(block, "window_size")


def is_post_norm(block: nn.Module) -> bool:
    """Whether the norms come after attention and MLP, inside the branch (x + norm(f(x)))."""
    return "PostNorm" in type(block).__name__ or "ResPost" in type(block).__name__


def _branches(block: nn.Module, args, kwargs):
    """(name, function z -> f(z)) for the two branches, as timm's forward computes them."""
    def scaled(x, i):  # LayerScale: a module in ViTs, a bare parameter in BEiT and EVA
        gamma, layer_scale = getattr(block, f"gamma_{i}", None), getattr(block, f"ls{i}", nn.Identity())
        return getattr(block, f"drop_path{i}")(layer_scale(x if gamma is None else gamma * x))

    if is_post_norm(block):
        return (("attn", lambda x: block.drop_path1(block.norm1(block.attn(x, *args, **kwargs)))),
                ("mlp", lambda x: block.drop_path2(block.norm2(block.mlp(x)))))
    return (("attn", lambda x: scaled(block.attn(block.norm1(x), *args, **kwargs), 1)),
            ("mlp", lambda x: scaled(block.mlp(block.norm2(x)), 2)))


def _block_name(model: nn.Module, block: int | str) -> str:
    names = layers(model)
    if isinstance(block, str) and block in names:
        return block
    if isinstance(block, int) and -len(names) <= block < len(names):
        return names[block]
    raise ValueError(f"no block {block!r}: this model has {len(names)} of them, {names[0]} to {names[-1]}")
