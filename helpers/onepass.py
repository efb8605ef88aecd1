"""Everything that one forward pass can give, for several networks on the same batch of images.

`Network` is a model with what it needs to be fed and watched; `measure` runs one batch through several of
them and returns a few small tensors (never a Gram matrix), so that memory hardly grows with the images and a
batch can be kept on the disk or sent to another process. `Results` puts the batches together. What a network
does not admit is found out beforehand, on the first image, and remembered with its reason.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from .attention import distance_taps, softmax_visible, uniform_distance
from .cka import Comparison, MinibatchCKA, per_image
from .grams import deconfound, gram, raw_gram
from .location import Localisation, patch_grams, token_indices, token_tap
from .naming import blocks, modules_of
from .receptive import fields
from .record import device_of, evaluating, in_order, layers, run, watch
from .skips import Ratios, ratio_taps, ratios
from .tokens import layout

TOKENS_A_SIDE = 5  # whose localisation is measured: 25 tokens at even steps
FIELD_CELLS = 64  # a field is kept on at most so many cells a side


@dataclass
class Network:
    """A model and how to run it: what makes its input of images in [0, 1], and which layers are compared."""

    label: str
    model: nn.Module
    prepare: Callable[[Tensor], Tensor]  # resized and normalised
    resize: Callable[[Tensor], Tensor]  # resized only: what the network's patches show
    every: str = "block"
    layers: list[str] = field(default_factory=list)  # found on the first images
    blocks: list[int] = field(default_factory=list)  # which of `layers` are whole blocks
    kind: str = "other"  # "transformer" (tokens and attention) or "convolutional"
    uniform: float | None = None  # pixels; attention distance of a head that attends evenly
    has_cls: bool = False
    reasons: dict[str, str] = field(default_factory=dict)  # measure -> why this network does not admit it

    def look_at(self, images: Tensor) -> None:
        """Find its layers, its kind and what it admits, on one image of (n, 3, H, W)."""
        inputs = self.prepare(images[:1])
        self.layers = layers(self.model, self.every, inputs)
        whole = set(blocks(modules_of(self.model)))
        self.blocks = [i for i, name in enumerate(self.layers) if name in whole]
        where, kinds = layout(self.model, inputs), {type(m).__name__ for m in self.model.modules()}
        attends = any("Attention" in kind or "Attn" in kind for kind in kinds)
        self.kind = "transformer" if where and attends else "other" if where or attends else "convolutional"
        self.uniform = uniform_distance(where.grid, where.patch) if where else None
        self.has_cls = bool(where and where.has_cls)
        for name in ("distance", "norms", "tokens", "fields"):
            try:
                if name == "fields":
                    field_maps(self, images[:1], draws=1, seed=0)
                    continue
                kept = _pass(self, inputs, (name,))
                if name == "tokens":
                    grid, _ = next(iter(kept[name].values()))
                    if min(grid) < 2:
                        raise ValueError(f"its last block has only {grid[0]} x {grid[1]} places")
                    patch_grams(self.resize(images[:1]), grid)
            except ValueError as error:
                self.reasons[name] = str(error).removeprefix("keep failed on ")

    @property
    def taps(self) -> tuple[str, ...]:
        return ("grams", *(name for name in ("distance", "norms", "tokens") if name not in self.reasons))


def measure(networks: Sequence[Network], images: Tensor) -> dict:
    """One batch (n, 3, H, W) in [0, 1] through every network: CKA's sums, and numbers a head, block or image.

    Keys: "images"; "plain" and "freed" (HSIC of all layers of all networks with each other, as they are and
    with the similarity of the pixels regressed out); for each label "distance" (n, L, h), "cls" and "patches"
    (n, L, branches: log2 of the norm ratio, of patches the mean), "tokens" (HSIC of tokens with patches) and
    "copies" (of the patches at the tokens' places with patches), with their "grid".
    """
    own, stacks = {}, []
    pixels = gram(images).cpu()
    for network in networks:
        inputs = network.prepare(images)
        kept = _pass(network, inputs, network.taps)
        stacks += [K.cpu() for K in kept["grams"].values()]
        own[network.label] = _of_network(network, images, inputs, kept, pixels)
    grams_ = torch.stack(stacks)  # (all layers, n, n)
    return {"images": len(images), "plain": _hsic(grams_), "freed": _hsic(deconfound(grams_, pixels)), **own}


def _pass(network: Network, inputs: Tensor, wanted: Sequence[str]) -> dict[str, dict[str, Tensor]]:
    """What each tap kept, by layer, from one forward pass."""
    model, n = network.model, len(inputs)
    mps = device_of(model).type == "mps"  # it has no float64, which sums of products need
    home = (lambda value: value.cpu()) if mps else (lambda value: value)

    def tap(name: str):
        if name == "grams":
            return network.layers, lambda output: raw_gram(per_image(home(output), n))
        if name == "distance":
            names, keep = distance_taps(model, inputs)
            return names, lambda weights: keep(home(weights).cpu())
        if name == "norms":
            return ratio_taps(model, inputs)
        keep = token_tap(model, inputs, _spread)
        return [network.layers[network.blocks[-1] if network.blocks else -1]], lambda out: keep(home(out))

    taps = {name: tap(name) for name in wanted}
    with ExitStack() as stack:
        stack.enter_context(softmax_visible(model) if "distance" in wanted else nullcontext())
        stack.enter_context(evaluating(model))
        kept = {name: stack.enter_context(watch(model, names, keep)) for name, (names, keep) in taps.items()}
        run(model, inputs)
        return {name: in_order(kept[name], names) for name, (names, _) in taps.items()}


def _of_network(network: Network, images: Tensor, inputs: Tensor, kept: dict, pixels: Tensor) -> dict:
    found = {}
    if "distance" in kept:
        found["distance"] = torch.stack([v.double().cpu() for v in kept["distance"].values()], 1)  # (n, L, h)
    if "norms" in kept:
        table = ratios(network.model, inputs, {name: value.cpu() for name, value in kept["norms"].items()})
        found["patches"] = _each(table, lambda each: each.log2().nanmean(1), "patches")
        if table.has_cls:
            found["cls"] = _each(table, lambda each: each[:, 0].log2(), "cls")
    if "tokens" in kept:
        (grid, tokens), = kept["tokens"].values()
        patches = deconfound(patch_grams(network.resize(images).cpu(), grid), pixels)
        found["grid"] = tuple(grid)
        found["tokens"] = _hsic(deconfound(tokens.cpu(), pixels), patches)
        found["copies"] = _hsic(patches[token_indices(_spread(grid), grid)], patches)
    return found


def _each(table: Ratios, reduce, part: str) -> Tensor:
    """A number of each image: (n, L, branches)."""
    values = table.table(reduce, part)  # (L, branches, n) or (L, n)
    return values.movedim(-1, 0) if values.ndim == 3 else values.T[..., None]


def _hsic(grams_: Tensor, others: Tensor | None = None) -> dict[str, Tensor]:
    total = MinibatchCKA()
    total.update(grams_, others)
    return {"xy": total.xy[0], "xx": total.xx[0], "yy": total.yy[0]}


def _spread(grid: tuple[int, int]) -> list[tuple[int, int]]:
    """(row, column) of at most 5 x 5 tokens at even steps, corners included."""
    rows, columns = (torch.linspace(0, side - 1, min(side, TOKENS_A_SIDE)).round().int().tolist()
                     for side in grid)
    return [(row, column) for row in rows for column in columns]


def field_maps(network: Network, images: Tensor, draws: int, seed: int) -> Tensor:
    """Receptive fields of all blocks for each image: (n, L, rows, columns), one cell some pixels wide."""
    names = [network.layers[i] for i in network.blocks] or network.layers
    inputs = network.prepare(images)
    found = fields(network.model, [inputs], names, draws=draws, seed=seed, per_image=True)
    maps = torch.stack([found[name] for name in names], 1)  # (n, L, H, W)
    return nn.functional.avg_pool2d(maps, max(1, maps.shape[-1] // FIELD_CELLS))


@dataclass
class Results:
    """What a group of networks showed, all batches together."""

    networks: dict[str, Network]
    parts: list[dict]  # what `measure` returned, batch by batch
    fields: dict[str, Tensor] = field(default_factory=dict)  # label -> (n, L, rows, columns)

    @property
    def n_images(self) -> int:
        return sum(part["images"] for part in self.parts)

    def sums(self, kind: str, label: str | None = None) -> MinibatchCKA:
        """The accumulator of "plain" or "freed" CKA over all layers, or of "tokens" or "copies"."""
        parts = [part[label][kind] if label else part[kind] for part in self.parts]
        columns = ([part[name] for part in parts] for name in ("xy", "xx", "yy"))
        return MinibatchCKA(True, [part["images"] for part in self.parts], *columns)

    def rows(self, label: str, only_blocks: bool = False) -> list[int]:
        """Where a network's layers (or its blocks alone) stand among all layers."""
        start = 0
        for other, network in self.networks.items():
            if other == label:
                chosen = network.blocks if only_blocks and network.blocks else range(len(network.layers))
                return [start + i for i in chosen]
            start += len(network.layers)
        raise ValueError(f"no network is called {label!r}; there are {list(self.networks)}")

    def compare(self, x: str, y: str, kind: str = "plain") -> Comparison:
        """CKA of the layers of one network with those of another, as `cka.compare` gives it."""
        rows, columns, total = self.rows(x), self.rows(y), self.sums(kind)
        total = MinibatchCKA(True, total.images, [m[rows][:, columns] for m in total.xy],
                             [v[rows] for v in total.xx], [v[columns] for v in total.yy])
        names = self.networks[x].layers, self.networks[y].layers
        return Comparison(total.matrix(), *names, self.n_images, total)

    def each(self, label: str, name: str) -> Tensor:
        """"distance", "cls" or "patches" of every image: (n, …)."""
        return torch.cat([part[label][name] for part in self.parts])

    def localisation(self, label: str, of: str = "tokens") -> Localisation:
        """CKA of tokens of the last block, or of "copies" of their own patches, with every patch."""
        (tokens, grid), total = self.tokens(label), self.sums(of, label)
        names = [str((i // grid[1], i % grid[1])) for i in range(grid[0] * grid[1])]
        rows = [names[i] for i in token_indices(tokens, grid)]
        return Localisation(total.matrix(), rows, names, self.n_images, total, grid)

    def tokens(self, label: str) -> tuple[list[tuple[int, int]], tuple[int, int]]:
        """(row, column) of the tokens whose localisation was measured, and the grid they lie in."""
        grid = tuple(self.parts[0][label]["grid"])
        return _spread(grid), grid

    def admits(self, label: str, name: str) -> bool:
        return name not in self.networks[label].reasons
