"""The course's findings as rules that can be applied to any two networks.

Each finding becomes a few margins, numbers that are all positive when the paper is right. Most are contrasts,
and their excess over the untrained selves of the same networks, because an architecture alone already passes
some of them. A finding holds when the 95 % interval of every margin lies above zero. Depths are shares of the
network's blocks, so that a rule fits any number of them. Chapters 3 to 9 say why the claims are tested so.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from .location import sharpness
from .onepass import Results
from .receptive import radius
from .verdict import Verdict, bootstrap, decide, every, verdict


@dataclass(frozen=True)
class Rule:
    """One finding: what is claimed, how it is decided, and the margins (k,) of resampled results."""

    finding: str
    claim: str
    rule: str
    paper: str
    unit: str  # of the smallest margin, and shown
    units: str  # what is resampled: "batches", "images" or "field images"
    needs: tuple[str, ...]  # measures that every network in it must admit
    pair: bool  # needs a transformer and a convolutional network, else a transformer alone
    margins: Callable[[Sample, Sample, str, str | None], Tensor]  # of trained, untrained, transformer, other


@dataclass(frozen=True)
class Sample:
    """Results with their batches or images drawn anew: index (n,) of what to take; None for all."""

    results: Results
    index: object = None

    def cka(self, x: str, y: str) -> Tensor:
        """CKA of the blocks of two networks, the similarity of the pixels regressed out: (Lx, Ly)."""
        return self._all_layers[self.results.rows(x, True)][:, self.results.rows(y, True)]

    @cached_property
    def _all_layers(self) -> Tensor:
        total = self.results.sums("freed")
        return total.matrix(None if self.index is None else _counts(self.index, len(total.images)))

    def mean(self, label: str, name: str) -> Tensor:
        values = self.results.each(label, name)
        return (values if self.index is None else values[self.index]).mean(0)

    def radii(self, label: str) -> Tensor:
        """Radius that holds half of each block's field: (L,), as a share of the image's width."""
        maps = self.results.fields[label]
        maps = (maps if self.index is None else maps[self.index]).mean(0)  # (L, rows, columns)
        return radius(maps, centre="mass") / maps.shape[-1]

    def sharpness(self, label: str, of: str = "tokens") -> Tensor:
        """How far the own patch stands out of the others, mean over tokens (or copies of patches): ()."""
        total, (tokens, grid) = self.results.sums(of, label), self.results.tokens(label)
        counts = None if self.index is None else _counts(self.index, len(total.images))
        return sharpness(total.matrix(counts).unflatten(1, grid), tokens).mean()

    def kept(self, label: str) -> Tensor:
        """Share of its place that a token keeps: its sharpness over that of copies of its own patch, ()."""
        return self.sharpness(label) / self.sharpness(label, "copies")


def apply(rule: Rule, trained: Results, untrained: Results, vit: str | None,
          cnn: str | None) -> Verdict | str:
    """The verdict of one rule, or the reason why it cannot be applied."""
    if vit is None or (rule.pair and cnn is None):
        return ("it compares a transformer with a convolutional network" if rule.pair else
                "it is about transformers with attention between all patches")
    labels = [vit, cnn] if rule.pair else [vit]
    for label in labels:
        for name in rule.needs:
            if name == "cls" and not trained.networks[label].has_cls:
                return f"{label} has no CLS token"
            if not trained.admits(label, "norms" if name == "cls" else name):
                return f"{label}: {trained.networks[label].reasons['norms' if name == 'cls' else name]}"

    def margins(index=None) -> Tensor:
        return rule.margins(Sample(trained, index), Sample(untrained, index), vit, cnn)

    n = len(trained.fields[vit]) if rule.units == "field images" else (
        trained.n_images if rule.units == "images" else len(trained.parts))
    try:
        values = margins()
        low, high = bootstrap(lambda index: margins(torch.as_tensor(index)), n,
                              repeats=300 if rule.units == "field images" else 600)
        low, high = (torch.as_tensor(end) for end in (low, high))
        if not torch.cat([values, low, high]).isfinite().all():
            return (f"the numbers cannot be had from these {n} {rule.units}: a layer does not differ "
                    "between them, or none of its units responds; more images are needed")
        weakest = int(values.argmin())
        interval = min(low[weakest], values[weakest]), max(high[weakest], values[weakest])
        holds = every(*(decide(ends, above=0) for ends in zip(low.tolist(), high.tolist(), strict=True)))
        return verdict(rule.finding, rule.claim, float(values[weakest]), [float(end) for end in interval],
                       holds, rule.paper, trained.n_images if rule.units == "batches" else n, labels,
                       save=False, rule=rule.rule, unit=rule.unit, resampled=rule.units,
                       margins=values.tolist(), margins_low=low.tolist(), margins_high=high.tolist())
    except ValueError as error:
        return str(error)


def _counts(index, n: int) -> Tensor:
    return torch.bincount(index, minlength=n)


def _share(matrix: Tensor, low: float, high: float) -> slice:
    """Blocks between two shares of the depth, at least one."""
    start = min(round(len(matrix) * low), len(matrix) - 1)
    return slice(start, max(start + 1, round(len(matrix) * high)))


def ends(matrix: Tensor) -> Tensor:
    """Mean CKA between the first and the last third of the blocks: (L, L) to (), chapter 3."""
    third = max(1, len(matrix) // 3)
    return matrix[:third, -third:].mean()


def stage_contrast(matrix: Tensor, sizes: list[int]) -> Tensor:
    """How much more alike two blocks of one stage are than two of different stages as far apart: ()."""
    sizes = torch.tensor(sizes)
    stage, at = torch.arange(len(sizes)).repeat_interleave(sizes), torch.arange(int(sizes.sum()))
    same, apart = stage[:, None] == stage, (at[:, None] - at).abs()
    gaps = []
    for distance in range(1, len(at)):
        inside, across = same & (apart == distance), ~same & (apart == distance)
        if inside.any() and across.any():
            gaps.append(matrix[inside].mean() - matrix[across].mean())
    if not gaps:
        raise ValueError("the convolutional network has no stages of several blocks, by the names of its "
                         "layers")
    return torch.stack(gaps).mean()


def stage_sizes(names: list[str]) -> list[int]:
    """Blocks in each stage, by name: layer1.0, layer1.1, layer2.0 gives 2, 1."""
    stages = [name.rpartition(".")[0] for name in names]
    return [stages.count(stage) for stage in dict.fromkeys(stages)]


def over_untrained(contrasts: Callable[[Sample, str, str | None], Tensor]):
    """Margins of contrasts (k,): themselves, and what they are above those of the untrained, (2k,)."""
    def margins(now: Sample, before: Sample, vit: str, cnn: str | None) -> Tensor:
        own = contrasts(now, vit, cnn)
        return torch.cat([own, own - contrasts(before, vit, cnn)])
    return margins


def _uniform(sample: Sample, vit: str, cnn: str) -> Tensor:
    return (ends(sample.cka(vit, vit)) - ends(sample.cka(cnn, cnn)))[None]


def _stages(now: Sample, before: Sample, vit: str, cnn: str) -> Tensor:
    network = now.results.networks[cnn]
    sizes = stage_sizes([network.layers[i] for i in network.blocks])
    depth = len(now.results.networks[vit].blocks)
    cuts = [round(depth * sum(sizes[:i]) / sum(sizes)) for i in range(len(sizes) + 1)]
    cut_vit = [b - a for a, b in zip(cuts, cuts[1:], strict=False) if b > a]
    m = now.cka(cnn, cnn)
    gap = stage_contrast(m, sizes) - stage_contrast(now.cka(vit, vit), cut_vit)
    return torch.stack([gap, ends(before.cka(cnn, cnn)) - ends(m)])


def _cross(sample: Sample, vit: str, cnn: str) -> Tensor:
    m = sample.cka(vit, cnn)
    half = m.shape[1] // 2
    lower, upper = m[:, :half].mean(1), m[:, half:].mean(1)  # (Lx,)
    early, middle = _share(m, 0, 1 / 4), _share(m, 1 / 4, 7 / 12)
    peak, top = m.amax(1), round(len(m) * 2 / 3)
    return torch.stack([(lower - upper)[early].mean(), (upper - lower)[middle].mean(),
                        peak[:top].mean() - peak[top:].mean()])


def _distance(sample: Sample, vit: str, cnn: str | None) -> Tensor:
    heads = sample.mean(vit, "distance") / sample.results.networks[vit].uniform  # (L, h), 1: even attention
    low, high = heads[_share(heads, 0, 1 / 6)], heads[_share(heads, 5 / 6, 1)]
    return torch.stack([(low.amax(1) - low.amin(1)).mean() - (high.amax(1) - high.amin(1)).mean(),
                        high.amin() - low.amin()])


def _reach(sample: Sample, vit: str, cnn: str) -> Tensor:
    x, y = sample.radii(vit), sample.radii(cnn)
    thirds = (0, 1 / 3), (1 / 3, 2 / 3)
    # a block none of whose drawn units responded to the images drawn has no field: NaN
    return torch.stack([x[_share(x, *third)].nanmean() - y[_share(y, *third)].nanmean() for third in thirds])


def _transition(sample: Sample, vit: str, cnn: str | None) -> Tensor:
    gap = sample.mean(vit, "cls") - sample.mean(vit, "patches")  # (L, branches)
    half = len(gap) // 2
    return torch.cat([gap[:half].mean(0), -gap[half:].mean(0)])


def _location(now: Sample, before: Sample, vit: str, cnn: str) -> Tensor:
    left = [now.sharpness(label) / before.sharpness(label) for label in (vit, cnn)]
    return torch.stack([now.kept(vit) - now.kept(cnn), left[0] - left[1]])


MARGIN = "Each must be above 0, and above what the untrained networks show; the smallest margin is shown."
RULES = (
    Rule(
        "uniform-vit",
        "The transformer's first and last layers are more alike than the convolutional network's.",
        "CKA between first and last third of the blocks, pixels regressed out, transformer minus "
        f"convolutional network. {MARGIN}",
        "ViT maps are uniform, ResNet maps are not (Figure 1).",
        "CKA", "batches", (), True, over_untrained(_uniform)),
    Rule(
        "grid-resnet",
        "The convolutional network falls into stages where the transformer does not; its ends are unlike.",
        "Pixels regressed out: CKA within a stage minus CKA across stages at the same distance, "
        "convolutional network minus transformer cut at the same depths, is above 0; and training lowers the "
        "CKA of the convolutional network's ends. The smaller of the two is shown.",
        "ResNets split into stages (Figure 1).",
        "CKA", "batches", (), True, _stages),
    Rule(
        "cross-model",
        "The transformer's lowest quarter resembles the lower half of the convolutional network, the next "
        "third its upper half, and the top third nothing as much.",
        f"Three contrasts of the map between the two, pixels regressed out. {MARGIN}",
        "The lower half of a ResNet is like the lowest quarter of a ViT, the rest like the next third, the "
        "top third like nothing (Figure 2).",
        "CKA", "batches", (), True, over_untrained(_cross)),
    Rule(
        "attention-distance",
        "Early blocks hold local and global heads side by side, late blocks only global ones.",
        "Mean attention distance as a share of even attention's, first against last sixth of the blocks: the "
        f"range of a block's heads shrinks, and the most local head grows. {MARGIN}",
        "Lowest layers attend locally and globally, highest only globally (Figure 3).",
        "of even attention's distance", "images", ("distance",), False, over_untrained(_distance)),
    Rule(
        "receptive-field",
        "At equal depth the transformer sees farther than the convolutional network.",
        "Radius that holds half of the receptive field, as a share of the image's width, in the first and in "
        f"the middle third of the blocks, transformer minus convolutional network. {MARGIN}",
        "Lower ViT layers have larger receptive fields than ResNet's (Figure 6).",
        "of the width", "field images", ("fields",), True, over_untrained(_reach)),
    Rule(
        "norm-ratio-transition",
        "What the skip connection carries counts more for CLS in the first half of the blocks, and more for "
        "patches in the second.",
        "Logarithm (to base 2) of the norm ratio, CLS minus patches in the first half of the blocks, patches "
        f"minus CLS in the second, attention and MLP each. {MARGIN}",
        "CLS has a high ratio in the first half, spatial tokens in the second (Figure 7).",
        "octaves", "images", ("norms", "cls"), False, over_untrained(_transition)),
    Rule(
        "localization",
        "A token of the transformer's last block keeps more of its place than a position of the "
        "convolutional network's.",
        "Pixels regressed out: the share of its place that a token keeps is larger for the transformer, and "
        "so is the share that training left of the untrained network's. The smaller difference is shown.",
        "ViT tokens are most similar to their own patch, ResNet's are less distinct (Figure 9).",
        "as a share", "batches", ("tokens",), True, _location),
)
