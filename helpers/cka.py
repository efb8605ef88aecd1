"""Centred kernel alignment (CKA): how alike two layers, or all layers of two networks, see the same images.

Kornblith et al. 2019; over minibatches, Nguyen, Raghu and Kornblith 2021. Lx and Ly layers, n images, B
batches. A layer becomes its (n, n) Gram matrix inside the hook, and all pairs of layers are then one matrix
product.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from helpers import grams
from helpers.batches import check_images, images_of, loop
from helpers.grams import SMALLEST, centre, deconfound, gram, hsic, pairs, raw_gram
from helpers.naming import unwrap
from helpers.record import checked, in_order, layers, observe

__all__ = ["Comparison", "MinibatchCKA", "cka", "compare", "deconfound", "gram", "hsic", "measure"]


def cka(X, Y, unbiased: bool = True, kernel: str = "linear", bandwidth: float = 0.5) -> Tensor:
    """Similarity of two sets of features (n, …) of the same n images: (); NaN if one is constant.

    HSIC(K, L) / √(HSIC(K, K) HSIC(L, L)), Raghu et al. 2021, section 3. Slightly negative values of the
    unbiased estimator mean "nothing in common", and are kept.
    """
    K, L = gram(X, kernel, bandwidth), gram(Y, kernel, bandwidth)
    if K.shape != L.shape:
        raise ValueError(f"X has {len(K)} images and Y has {len(L)}: both must be of the same images")
    one_batch = MinibatchCKA(unbiased)
    one_batch.update(K[None], L[None])
    value = one_batch.matrix()[0, 0]
    if value.isnan():
        warnings.warn("CKA is NaN: the features of X or of Y do not differ between images", stacklevel=2)
    return value


@dataclass
class MinibatchCKA:
    """CKA of all pairs of layers, batch after batch: HSIC is averaged over batches, the ratio comes last.

    A batch counts in proportion to its images: HSIC₁ is right on average for any batch size, and its variance
    falls about as 1/n. (The biased HSIC depends on the batch size, so keep that fixed.) Each batch's HSIC is
    kept, so that batches can be resampled for an interval.
    """

    unbiased: bool = True
    images: list[int] = field(default_factory=list)  # in each batch
    xy: list[Tensor] = field(default_factory=list)  # B of (Lx, Ly): HSIC of each x layer with each y layer
    xx: list[Tensor] = field(default_factory=list)  # B of (Lx,): HSIC of each layer with itself
    yy: list[Tensor] = field(default_factory=list)  # B of (Ly,)

    def update(self, grams_x, grams_y=None) -> None:
        """Add a batch of Gram matrices (Lx, n, n) and (Ly, n, n), or lists; without y, x with itself."""
        X = _stack(grams_x)
        Y = X if grams_y is None else _stack(grams_y)
        shape = (len(X), len(Y))
        if X.shape[1:] != Y.shape[1:] or (self.xy and self.xy[0].shape != shape):
            raise ValueError(f"Gram matrices {tuple(X.shape)} and {tuple(Y.shape)} do not belong together"
                             + (f"; earlier batches had {tuple(self.xy[0].shape)} layers" if self.xy else ""))
        n = X.shape[-1]
        size = pairs(n, self.unbiased)
        X = centre(X, self.unbiased).flatten(1)  # (Lx, n * n)
        Y = X if grams_y is None else centre(Y, self.unbiased).flatten(1).to(X.device)
        self.images.append(n)
        self.xy.append((X @ Y.T / size).cpu())
        self.xx.append((X.square().sum(1) / size).cpu())
        self.yy.append((Y.square().sum(1) / size).cpu())

    def matrix(self, counts=None) -> Tensor:
        """CKA (Lx, Ly) float64; NaN in the row or column of a constant layer.

        `counts` (…, B), how often each batch is taken, gives (…, Lx, Ly).
        """
        if not self.images:
            raise ValueError("no batch has been added, so there is nothing to compare")
        weights = torch.tensor(self.images, dtype=torch.float64)
        weights = weights if counts is None else weights * counts
        xy, xx, yy = (torch.tensordot(weights, torch.stack(h), 1) for h in (self.xy, self.xx, self.yy))
        return xy / (xx.sqrt()[..., :, None] * yy.sqrt()[..., None, :])  # 0 / 0 = NaN for a constant layer

    def merge(self, other: MinibatchCKA) -> None:
        """Take in the batches of another accumulator: another process, another part of the images."""
        if self.unbiased != other.unbiased:
            raise ValueError("a biased and an unbiased accumulator cannot be merged")
        if self.xy and other.xy and self.xy[0].shape != other.xy[0].shape:
            raise ValueError(f"cannot merge {tuple(self.xy[0].shape)} with {tuple(other.xy[0].shape)} layers")
        for name in ("images", "xy", "xx", "yy"):
            setattr(self, name, getattr(self, name) + getattr(other, name))

    def all_reduce(self, group=None) -> None:
        """Share the batches of all processes of a torch.distributed group, so that each process holds them
        all.
        """
        parts = [None] * torch.distributed.get_world_size(group)
        torch.distributed.all_gather_object(parts, (self.images, self.xy, self.xx, self.yy), group)
        self.images, self.xy, self.xx, self.yy = (sum(lists, []) for lists in zip(*parts, strict=True))


@dataclass(repr=False)
class Comparison:
    """CKA of the layers of two models, as `compare` measured it."""

    values: Tensor  # (Lx, Ly) float64
    rows: list[str]  # Lx layers of model_x
    columns: list[str]  # Ly layers of model_y
    n_images: int
    batches: MinibatchCKA  # HSIC of each batch

    def bootstrap(self, f: Callable[[Tensor], Tensor | float], n: int = 1000, seed: int = 0) -> Tensor:
        """f of the CKA matrix (Lx, Ly) when batches are drawn with replacement: n values.

        Two comparisons on the same batches with the same seed draw the same batches, so their difference is
        paired. Few batches give too narrow an interval: 10 or more are wanted, and fewer than 2 are refused.
        """
        B = len(self.batches.images)
        if B < 2:
            raise ValueError(f"an interval needs at least 2 batches, better 10, not {B}: use smaller batches")
        draws = torch.randint(B, (n, B), generator=torch.Generator().manual_seed(seed))
        counts = torch.nn.functional.one_hot(draws, B).sum(1)  # (n, B)
        matrices = (matrix for part in counts.split(100) for matrix in self.batches.matrix(part))
        return torch.stack([torch.as_tensor(f(matrix)) for matrix in matrices])

    def interval(self, f: Callable[[Tensor], Tensor | float], level: float = 0.95, n: int = 1000,
                 seed: int = 0) -> tuple[float, float]:
        """Percentile bootstrap interval of a number f of the CKA matrix."""
        ends = torch.tensor([(1 - level) / 2, (1 + level) / 2], dtype=torch.float64)
        low, high = self.bootstrap(f, n, seed).double().quantile(ends)
        return float(low), float(high)

    def __repr__(self) -> str:
        width = max(map(len, self.rows))
        lines = [f"{name:<{width}} " + " ".join(f"{value:5.2f}" for value in row)
                 for name, row in zip(self.rows, self.values.tolist(), strict=True)]
        return "\n".join([f"CKA over {self.n_images} images; columns: {', '.join(self.columns)}", *lines])


def measure(f: Callable[..., Tensor | float], *comparisons: Comparison, level: float = 0.95, n: int = 1000,
            seed: int = 0) -> tuple[float, tuple[float, float]]:
    """A number f(matrix, …) of one CKA matrix (Lx, Ly) or several, with its interval: (value, (low, high)).

    Percentile bootstrap over batches. The comparisons must be of the same batches, which are resampled
    together: a difference between two networks is then free of what the images add to both.
    """
    sizes = {len(c.batches.images) for c in comparisons}
    if len(sizes) != 1:
        raise ValueError("measure needs one comparison, or several on the same batches; "
                         f"got comparisons of {sorted(sizes)} batches")
    drawn = zip(*(c.bootstrap(lambda matrix: matrix, n, seed) for c in comparisons), strict=True)
    sample = torch.tensor([float(f(*matrices)) for matrices in drawn], dtype=torch.float64)
    low, high = sample.quantile(torch.tensor([(1 - level) / 2, (1 + level) / 2], dtype=torch.float64))
    return float(f(*(c.values for c in comparisons))), (float(low), float(high))


def compare(model_x: nn.Module, model_y: nn.Module, batches, layers_x: Iterable[str] | None = None,
            layers_y: Iterable[str] | None = None, unbiased: bool = True, progress: bool = False,
            transforms: tuple = (None, None), kernel: str = "linear", deconfound: bool = False,
            permute_y: int | None = None, fast: bool = False) -> Comparison:
    """CKA of every layer of one model with every layer of another, in one pass over the batches.

    `layers_x`, `layers_y`: names, by default every block in forward order (or x's, for a model with itself).
    `transforms`: what turns the batches' images into each model's input. `deconfound` takes the similarity of
    the pixels out first (`grams.deconfound`). `permute_y`: a seed to shuffle the images of model_y within
    each batch, a baseline of no similarity. `fast`: the networks run in bfloat16 where the processor has it
    (`record.run`), in about half the time and with values off by up to about 0.01, most for few images and
    layers that hardly differ between them; `make bench` measures it, by network. Both models see the same
    batch at the same time, so a shuffled loader is safe; a model compared with itself runs once. Batches too
    small for the estimator are left out with a warning, and so are named layers that are constant over the
    images (NaN in their row or column).
    """
    layers_x, layers_y = (None if names is None else checked(names) for names in (layers_x, layers_y))
    transforms = transforms or (None, None)
    alone = unwrap(model_x) is unwrap(model_y) and transforms[0] is transforms[1]
    generator = torch.Generator().manual_seed(permute_y or 0)
    total, left_out, rows, columns = MinibatchCKA(unbiased), [], [], []
    for batch in loop(batches, progress):
        images = images_of(batch)
        if 0 < len(images) < SMALLEST[unbiased]:
            left_out.append(len(images))
            continue
        input_x, input_y = _inputs(images, transforms)
        if layers_x is None:
            layers_x = layers(model_x, images=input_x)
        if layers_y is None:
            layers_y = layers_x if alone else layers(model_y, images=input_y)
        if alone:
            names = list(dict.fromkeys([*layers_x, *layers_y]))
            kept = _grams(model_x, input_x, names, kernel, fast)
            grams_x, grams_y = in_order(kept, layers_x), in_order(kept, layers_y)
        else:
            grams_x = _grams(model_x, input_x, layers_x, kernel, fast)
            grams_y = _grams(model_y, input_y, layers_y, kernel, fast)
        rows, columns = list(grams_x), list(grams_y)
        X, Y = torch.stack(list(grams_x.values())).cpu(), torch.stack(list(grams_y.values())).cpu()
        if deconfound:
            pixels = gram(images).cpu()
            X, Y = grams.deconfound(X, pixels, unbiased), grams.deconfound(Y, pixels, unbiased)
        if permute_y is not None:
            order = torch.randperm(len(images), generator=generator)
            Y = Y[:, order][:, :, order]
        total.update(X, Y)
    if not total.images:
        sizes = left_out or "none, the loader is empty or a generator already used up"
        raise ValueError(f"no batch had the {SMALLEST[unbiased]} images that HSIC needs; sizes: {sizes}")
    notes = {f"batches of {left_out} images were left out: HSIC needs {SMALLEST[unbiased]} in each": left_out}
    for names, own in ((rows, total.xx), (columns, total.yy)):
        own = dict(zip(names, torch.stack(own).sum(0).tolist(), strict=True))
        constant, broken = [k for k, v in own.items() if v == 0], [k for k, v in own.items() if v != v]
        notes[f"layers {constant} do not differ between images; their CKA is NaN"] = constant
        notes[f"layers {broken} hold NaN or infinite activations; their CKA is NaN"] = broken
    for note in (note for note, names in notes.items() if names):
        warnings.warn(note, stacklevel=2)
    return Comparison(total.matrix(), rows, columns, sum(total.images), total)


def _inputs(images: Tensor, transforms: tuple) -> tuple[Tensor, Tensor]:
    first, second = transforms
    input_x = check_images(first(images) if first else images)
    return input_x, input_x if second is first else check_images(second(images) if second else images)


def _grams(model: nn.Module, images: Tensor, names: list[str], kernel: str, fast: bool) -> dict[str, Tensor]:
    return observe(model, images, names, lambda out: raw_gram(per_image(out, len(images)), kernel), fast)


def per_image(output: Tensor, n: int) -> Tensor:
    """An output with the images as its first axis: windows (n * windows, …) and sequence-first (t, n, …)
    included.
    """
    if output.ndim > 0 and len(output) == n:
        return output
    if output.ndim > 0 and len(output) % n == 0 and len(output):
        return output.reshape(n, -1)  # the windows of an image lie together
    if output.ndim > 1 and output.shape[1] == n:
        return output.transpose(0, 1)
    raise ValueError(f"no axis of it belongs to the {n} images")


def _stack(grams) -> Tensor:
    grams = grams if isinstance(grams, Tensor) else torch.stack([torch.as_tensor(K) for K in grams])
    if grams.ndim != 3 or grams.shape[1] != grams.shape[2] or len(grams) == 0:
        raise ValueError(f"Gram matrices must be (layers, n, n), not {tuple(grams.shape)}")
    return grams
