"""What rides on a skip connection, and what happens without it (paper, section 5, figures 7, 8, E.1, E.2).

A residual block adds a branch f to what its skip carries: z + f(z).  A ViT block does so twice (attention, MLP), a
ResNet unit once.  `norm_ratios` compares ‖z‖ with ‖f(z)‖, `cut_skip` leaves z out of the sum.
"""

from __future__ import annotations

import types
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from .record import layers, modules_of

BRANCHES = ("attn", "mlp")


@contextmanager
def cut_skip(model: nn.Module, block: int | str, branch: str = "both"):
    """The model with the skip connection of one block gone: f(z) instead of z + f(z); put back afterwards.

    `block`: its index in forward order (as in `record.layers(model)`) or its name. `branch`: "attn", "mlp" or "both"
    for a ViT block; a ResNet unit has one skip, so "both" only. This is surgery on a trained model, which is not the
    paper's experiment: there the model is trained without the skip (`remove_skip` before training).
    """
    module = modules_of(model)[_block_name(model, block)]
    restore = remove_skip(module, branch)
    try:
        yield model
    finally:
        restore()


def remove_skip(block: nn.Module, branch: str = "both"):
    """Take the skip connection out of one block, in place; returns a function that puts it back.

    The sum is never formed, so what remains is f(z) exactly. Works for timm's ViT, BEiT, EVA and relative-position
    blocks, pre-norm or post-norm, and for timm's ResNet units. Raises ValueError for any other block.
    """
    if branch not in ("both", *BRANCHES):
        raise ValueError(f'branch must be "attn", "mlp" or "both", not {branch!r}')
    if is_unit(block):
        if branch != "both":
            raise ValueError(f'a {type(block).__name__} unit has a single skip, so branch must be "both", not {branch!r}')
        shortcut, block.downsample = block.downsample, _Nothing()
        return lambda: setattr(block, "downsample", shortcut)
    if not is_vit_block(block):
        raise ValueError(f"a {type(block).__name__} has no skip connection that can be cut here: needed is a block with "
                         "norm1, attn, drop_path1, norm2, mlp, drop_path2 (timm's ViT family) or a ResNet unit")
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

    block.forward = types.MethodType(forward, block)  # bound, so that a deep copy of the model runs its own weights
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
        gamma = getattr(block, f"gamma_{i}", None)
        return getattr(block, f"drop_path{i}")(getattr(block, f"ls{i}", nn.Identity())(x if gamma is None else gamma * x))

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
    raise ValueError(f"no block {block!r}: this model has {len(names)} residual blocks, {names[0]} to {names[-1]}")
