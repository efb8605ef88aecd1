"""What a layer knows: linear probes in closed form (paper, sections 7, 8, appendix A; figures 11, 13, D.4).

A probe is a ridge regression on targets of -1 and 1, one column a class: nothing to tune but the penalty, no
random start, and the same answer everywhere. Features are standardised with the training images' mean and
deviation, and the bias carries no penalty.

Symbols: n images, d features, c classes, L layers, gh x gw the grid of a layer's tokens or positions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.functional import adaptive_avg_pool2d, one_hot

from .record import layers as block_names
from .record import record
from .tokens import layout, peek, places


@dataclass(frozen=True)
class Probe:
    """A fitted probe: `probe(X)` gives scores (n, c), or (…, n, c) from a stack of features (…, n, d)."""

    mean: Tensor  # (…, 1, d) of the training features
    deviation: Tensor  # (…, 1, d)
    weight: Tensor  # (…, d, c)
    bias: Tensor  # (c,)
    classes: int | None  # None: a regression

    def __call__(self, X: Tensor) -> Tensor:
        return (X.double() - self.mean) / self.deviation @ self.weight + self.bias

    def predict(self, X: Tensor) -> Tensor:
        """The class with the highest score, (…, n); for a regression the scores themselves."""
        return self(X) if self.classes is None else self(X).argmax(-1)


def ridge(X: Tensor, y: Tensor, classes: int | None, l2: float = 10.0) -> Probe:
    """The minimiser of ‖X̂ W + b - T‖² + l2 ‖W‖² in float64, X̂ the standardised features.

    X: (n, d), or (…, n, d) for one probe each. y: labels (n,) from 0 to classes - 1, so T is -1 or 1; or,
    with `classes` None, values (n,) or (n, c) to regress on. Of the n x n and the d x d system the smaller
    is solved.
    """
    X, T = X.double(), _targets(y, classes).to(X.device)
    n, d = X.shape[-2:]
    if n != len(T):
        raise ValueError(f"{n} images have features but {len(T)} have labels")
    if not l2 > 0:
        raise ValueError(f"the penalty l2 must be above 0, not {l2}: the answer need not be unique at 0")
    if not X.isfinite().all():
        raise ValueError("features hold NaN or infinite values; a probe cannot be fitted to them")
    mean, deviation = X.mean(-2, keepdim=True), X.std(-2, correction=0, keepdim=True)
    deviation[deviation <= 1e-9 * mean.abs()] = torch.inf  # a constant feature counts as 0 everywhere
    X, bias = (X - mean) / deviation, T.mean(0)  # X has mean 0, so the free bias is the targets' mean
    eye = torch.eye(min(n, d), dtype=X.dtype, device=X.device) * l2
    if d <= n:
        weight = torch.linalg.solve(X.mT @ X + eye, X.mT @ (T - bias))
    else:
        weight = X.mT @ torch.linalg.solve(X @ X.mT + eye, T - bias)
    return Probe(mean, deviation, weight, bias, classes)


def correct(probe: Probe, X: Tensor, y: Tensor) -> Tensor:
    """Which images are classified rightly: (…, n) bool, for resampling images."""
    if probe.classes is None:
        raise ValueError("this probe is a regression; r2 says how good it is")
    return probe.predict(X) == y.to(X.device)


def accuracy(probe: Probe, X: Tensor, y: Tensor) -> Tensor:
    """Share of images classified rightly: (…)."""
    return correct(probe, X, y).double().mean(-1)


def r2(probe: Probe, X: Tensor, y: Tensor) -> Tensor:
    """Share of the variance of y (n,) or (n, c) that a regression explains, averaged over columns: (…)."""
    y = _targets(y, None).to(X.device)
    left = (probe(X) - y).square().sum(-2)  # (…, c)
    return (1 - left / (y - y.mean(0)).square().sum(0)).mean(-1)


def few_shot(labels: Tensor, shots: int, seed: int = 0) -> Tensor:
    """Indices of `shots` images of every class, drawn by `seed`: (classes · shots,) int64, sorted by
    class."""
    generator = torch.Generator().manual_seed(seed)
    chosen = []
    for label in labels.unique().tolist():
        members = (labels == label).nonzero().flatten()
        if len(members) < shots:
            raise ValueError(f"class {label} has {len(members)} images, {shots} were asked for")
        chosen.append(members[torch.randperm(len(members), generator=generator)[:shots]])
    return torch.cat(chosen)


def features(model: nn.Module, batches, layers: Sequence[str] | None = None, pool: str | int = "mean",
             grid: tuple[int, int] | None = None, progress: bool = False) -> dict[str, Tensor]:
    """Features of several layers, pooled as they are computed, in one pass: name -> (n, d) float32.

    pool: "cls"; "mean" over patch tokens or positions, without CLS; an index, one token (row by row, without
    CLS); or "tokens", all of them, (n, gh, gw, d), averaged down to `grid` if given. layers: default every
    block.
    """
    images, batches = peek(batches)
    where = layout(model, images)
    if pool == "cls" and not (where and where.has_cls):
        raise ValueError(f'{type(model).__name__} has no CLS token here; use pool="mean"')
    if pool not in ("cls", "mean", "tokens") and not isinstance(pool, int):
        raise ValueError(f'pool must be "cls", "mean", "tokens" or the index of a token, not {pool!r}')

    def keep(output: Tensor) -> Tensor:
        values, prefix, own = places(output, model, where)
        if pool == "cls":
            return values[:, 0].float()
        values = values[:, prefix:].float()  # (B, gh·gw, d)
        if pool != "tokens":
            return values.mean(1) if pool == "mean" else values[:, pool]
        maps = values.mT.unflatten(2, own)  # (B, d, gh, gw)
        return (adaptive_avg_pool2d(maps, grid) if grid else maps).permute(0, 2, 3, 1)

    return record(model, batches, list(layers or block_names(model)), keep, progress)


def layer_accuracy(model: nn.Module, train, train_labels: Tensor, test, test_labels: Tensor, layers=None,
                   pool: str | int = "cls", classes: int | None = None, l2: float = 10.0,
                   per_image: bool = False, progress: bool = False) -> Tensor:
    """Test accuracy of a probe on every layer: (L,), or which images were right, (L, n) bool.

    train, test: batches of images, each gone through once; labels (n,). For several labels or penalties, or
    few-shot probes, take `features` once and `ridge` many times. layers: default every block.
    """
    names = list(layers or block_names(model))
    seen = features(model, train, names, pool, progress=progress)
    unseen = features(model, test, names, pool, progress=progress)
    classes = classes or _count(train_labels)
    right = [correct(ridge(seen[name], train_labels, classes, l2), unseen[name], test_labels)
             for name in names]
    return torch.stack(right) if per_image else torch.stack(right).double().mean(1)


def token_accuracy(model: nn.Module, train, train_labels: Tensor, test, test_labels: Tensor, layer: str,
                   classes: int | None = None, l2: float = 10.0, grid: tuple[int, int] | None = None,
                   per_image: bool = False, progress: bool = False) -> Tensor:
    """Test accuracy of a probe of its own on each token of a layer: (gh, gw), or (gh, gw, n) bool (figure
    D.4).

    CLS is left out. grid: average the layer's positions down to this grid first, as the paper does for the
    early stages of a ResNet.
    """
    seen = features(model, train, [layer], "tokens", grid, progress)[layer]  # (n, gh, gw, d)
    unseen = features(model, test, [layer], "tokens", grid, progress)[layer]
    classes = classes or _count(train_labels)
    pairs = zip(seen.flatten(1, 2).unbind(1), unseen.flatten(1, 2).unbind(1), strict=True)
    right = [correct(ridge(X, train_labels, classes, l2), Z, test_labels) for X, Z in pairs]
    right = torch.stack(right).unflatten(0, seen.shape[1:3])  # one probe at a time saves memory
    return right if per_image else right.double().mean(-1)


def _targets(y: Tensor, classes: int | None) -> Tensor:
    """(n,) labels to (n, classes) of -1 and 1, or (n,) and (n, c) values to (n, c): float64."""
    y = torch.as_tensor(y)
    if classes is None:
        return y.double() if y.ndim == 2 else y.double()[:, None]
    if y.is_floating_point() or y.ndim != 1 or y.min() < 0 or y.max() >= classes:
        raise ValueError(f"labels must be whole numbers (n,) from 0 to {classes - 1}, not {y.dtype} "
                         f"{tuple(y.shape)}; to regress on values pass classes=None")
    return 2.0 * one_hot(y, classes).double() - 1


def _count(labels: Tensor) -> int:
    return int(labels.max()) + 1
