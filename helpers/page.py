"""The report's page: one HTML file that needs no other, figures inside with alt texts, numbers in tables."""

from __future__ import annotations

import base64
import html
import io
from collections.abc import Iterable

import torch
from torch import Tensor

from . import plots
from .location import own_rank, sharpness
from .onepass import Results
from .receptive import radius
from .rules import Sample, ends
from .tables import table
from .verdict import Verdict, bootstrap

BANNER = "UNTRAINED: random weights, nothing was learned"
STYLE = """:root{color-scheme:light dark}
body{font:17px/1.55 system-ui,sans-serif;max-width:46rem;margin:auto;padding:1rem;overflow-wrap:anywhere}
body{color:#1a1a1a;background:#fff}
img{max-width:100%;height:auto}h2{margin-top:2.2em;border-top:1px solid #ddd;padding-top:.6em}
.wide{overflow-x:auto;overflow-wrap:normal}.wide:focus-visible{outline:2px solid #0b5cad}
table{border-collapse:collapse;font-size:.88em}th,td{padding:.2em .6em;text-align:right;
border-bottom:1px solid #ddd;vertical-align:top}th:first-child{text-align:left}
.banner{background:#8c1d18;color:#fff;padding:.6em 1em;font-weight:700}
.note{background:#f2f2f2;padding:.5em 1em}figure{margin:1em 0}
@media(prefers-color-scheme:dark){body{color:#e6e6e6;background:#181818}.note{background:#2b2b2b}
h2,th,td{border-color:#4a4a4a}.wide:focus-visible{outline-color:#8ab8ff}}"""


class Page:
    """Collects the parts of a page; with `untrained`, every figure carries the banner."""

    def __init__(self, title: str, untrained: bool):
        self.title, self.untrained, self.parts = title, untrained, []

    def heading(self, text: str) -> None:
        self.parts.append(f"<h2>{html.escape(text)}</h2>")

    def text(self, *sentences: str, kind: str = "") -> None:
        self.parts.append(f'<p{f" class={kind!r}" if kind else ""}>{html.escape(" ".join(sentences))}</p>')

    def table(self, header, rows) -> None:
        shown = table(header, rows)._repr_html_().replace("_", "_<wbr>")  # where a long name may break
        self.parts.append(f'<div class="wide" tabindex="0" role="region" aria-label="Table: '
                          f'{html.escape(", ".join(header))}">{shown}</div>')

    def verdict(self, found: Verdict) -> None:
        self.parts.append(found._repr_html_())

    def figure(self, figure, alt: str) -> None:
        if self.untrained:
            figure.supxlabel(BANNER, color="white", backgroundcolor="#8c1d18", fontsize=10, fontweight="bold")
            alt = f"{BANNER}. {alt}"
        file = io.BytesIO()
        figure.savefig(file, format="png", metadata={"Software": None})
        data = base64.b64encode(file.getvalue()).decode()
        self.parts.append(f'<figure><img alt="{html.escape(alt)}" '
                          f'src="data:image/png;base64,{data}"></figure>')

    def __str__(self) -> str:
        banner = f'<p class="banner" role="alert">{BANNER}</p>' if self.untrained else ""
        title = html.escape(self.title)
        return ('<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
                '<meta name="viewport" content="width=device-width,initial-scale=1">'
                f"<title>{title}</title><style>{STYLE}</style></head><body><main><h1>{title}</h1>{banner}\n"
                + "\n".join(self.parts) + "\n</main></body></html>\n")


def write(title: str, facts: dict, trained: Results, untrained: Results, findings: Iterable, pair: tuple,
          random: bool) -> tuple[str, dict]:
    """The page and the numbers on it, for JSON. `findings`: (slug, claim, Verdict or reason)."""
    page, numbers = Page(title, random), {}
    vit, cnn = pair
    page.text(f"{facts['images']} Batches of {facts['batch']}. Intervals hold 95 % of the values that come "
              "out when images (or batches of them) are drawn again with replacement; they say how much the "
              "numbers depend on these images, not what other networks of the kind would show.")
    for note in facts["notes"]:
        page.text(note, kind="note")
    page.table(["network", "timm's name", "weights", "parameters", "input (px)", "kind"], facts["rows"])
    page.heading("The course's findings on these networks")
    page.text("Each claim of the paper (Raghu et al. 2021) has a rule that was fixed beforehand. The "
              "control is the "
              "same architecture with random weights: what it shows as well was not learned."
              + (" Here both sides are untrained, so no claim can be supported." if random else ""))
    for _, claim, found in findings:
        if isinstance(found, Verdict):
            page.verdict(found)
        else:
            page.text(f"Not applied: “{claim}” Reason: {found}", kind="note")
    _within(page, numbers, trained, untrained)
    _across(page, numbers, trained, untrained)
    _attention(page, numbers, trained)
    _fields(page, numbers, trained, untrained)
    _norms(page, numbers, trained)
    _location(page, numbers, trained, untrained)
    return str(page), numbers


def _shown(value, interval) -> str:
    low, high = map(float, interval)
    if value != value:
        return "no response to these images"
    return f"{float(value):.2f}" + (f" ({low:.2f} to "
                                    f"{high:.2f})" if low <= high else " (too few images to tell)")


def _left_out(page: Page, results: Results, name: str) -> list[str]:
    """The networks that admit a measure; for the others the page says why not."""
    for label, network in results.networks.items():
        if name in network.reasons:
            page.text(f"Left out for {label}: {network.reasons[name]}", kind="note")
    return [label for label in results.networks if results.admits(label, name)]


def _within(page: Page, numbers: dict, trained: Results, untrained: Results) -> None:
    page.heading("CKA within each network")
    page.text("CKA says how alike two layers see the same images: 1 alike, 0 nothing in common (the unbiased "
              "estimate may fall a little below 0). A bright square far from the diagonal: first and last "
              f"layers agree. {trained.n_images} images.")
    maps = {}
    for label in trained.networks:
        maps[label] = trained.compare(label, label)
        maps[f"{label}, control"] = untrained.compare(label, label)
    page.figure(plots.cka_maps(maps), "CKA of every layer with every other. " + " ".join(
        f"{label}: {ends(m.values):.2f} between first and last third of the "
        f"layers." for label, m in maps.items()))
    freed = {name: results.compare(label, label, "freed") for label in trained.networks for name, results in
             ((label, trained), (f"{label}, control", untrained))}
    rows = []
    for name in maps:
        plain, without = ((m, m.interval(ends)) for m in (maps[name], freed[name]))
        rows.append([name, *(_shown(ends(m.values), interval) for m, interval in (plain, without))])
        numbers.setdefault("within", {})[name] = {
            "layers": maps[name].rows, "cka": maps[name].values.tolist(),
            "without_pixels": freed[name].values.tolist(), "ends": float(ends(maps[name].values)),
            "ends_interval": list(plain[1]), "images": trained.n_images}
    page.text("Mean CKA between the first and the last third of the layers, as it is and with the "
              "similarity of the "
              "pixels regressed out; control: random weights.")
    page.table(["network", "CKA of the ends", "pixels regressed out"], rows)


def _across(page: Page, numbers: dict, trained: Results, untrained: Results) -> None:
    labels = list(trained.networks)
    for i, x in enumerate(labels):
        for y in labels[i + 1 :]:
            page.heading(f"CKA across: {x} and {y}, and the closest depth")
            m, control = trained.compare(x, y), untrained.compare(x, y)
            page.text(f"Each row a layer of {x}, each column one of {y}; below, for each layer of {x}, the "
                      f"layer of "
                      f"{y} that is most like it. {trained.n_images} images.")
            page.figure(plots.cka_heatmap(m, row_label=x, column_label=y), f"CKA of {x} with {y}, between "
                        f"{m.values.min():.2f} and {m.values.max():.2f}.")
            best = m.values.nan_to_num(-1).argmax(1).tolist()
            page.figure(plots.closest_depth({"measured": m, "control": control}, row_label=x, column_label=y),
                        f"Closest layer of {y}: from {m.columns[best[0]]} for the first layer of {x} to "
                        f"{m.columns[best[-1]]} for its last.")
            drawn = m.bootstrap(lambda matrix: matrix, 300).nan_to_num()  # (300, Lx, Ly)
            low, high = drawn.quantile(torch.tensor([0.025, 0.975], dtype=torch.float64), 0)
            rows = [[name, m.columns[j], _shown(m.values[k, j], (low[k, j], high[k, j]))]
                    for k, (name, j) in enumerate(zip(m.rows, best, strict=True))]
            page.table([f"layer of {x}", f"closest of {y}", "CKA"], rows)
            numbers.setdefault("across", []).append({
                "rows_of": x, "columns_of": y, "rows": m.rows, "columns": m.columns, "cka": m.values.tolist(),
                "low": low.tolist(), "high": high.tolist(), "closest": [m.columns[j] for j in best],
                "images": trained.n_images})


def _interval(values: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Mean over images (n, …) and the ends of its interval, each (…)."""
    def mean(index):
        return values[torch.as_tensor(index)].mean(0).numpy()

    low, high = bootstrap(mean, len(values), repeats=500)
    return values.mean(0), torch.as_tensor(low), torch.as_tensor(high)


def _attention(page: Page, numbers: dict, trained: Results) -> None:
    page.heading("Attention distance")
    page.text("How far, in pixels of the network's input, a head looks from a patch to the patches it "
              "attends to. "
              f"Low: local. {trained.n_images} images.")
    for label in _left_out(page, trained, "distance"):
        values = trained.each(label, "distance")  # (n, L, h)
        heads, even = values.mean(0), trained.networks[label].uniform
        mean, low, high = _interval(values.mean(2))
        page.figure(plots.attention_distances(heads, even, title=label),
                    f"{label}: heads of the first block from {heads[0].min():.0f} to {heads[0].max():.0f} "
                    f"px, of the "
                    f"last from {heads[-1].min():.0f} to {heads[-1].max():.0f}; even attention would give "
                    f"{even:.0f}.")
        page.table([f"block of {label}", "most local head (px)", "mean (px)", "most global head (px)"],
                   [[i, f"{h.min():.1f}", _shown(mean[i], (low[i], high[i])), f"{h.max():.1f}"]
                    for i, h in enumerate(heads)])
        numbers.setdefault("attention_distance", {})[label] = {
            "heads": heads.tolist(), "mean": mean.tolist(), "low": low.tolist(), "high": high.tolist(),
            "even": even, "images": len(values)}


def _fields(page: Page, numbers: dict, trained: Results, untrained: Results) -> None:
    page.heading("Receptive-field radius")
    page.text("Which pixels can move a unit in the middle of the image, after each block: the radius of the "
              "disc that holds half of the gradient, as a share of the image's width.")
    curves = {}
    for label in _left_out(page, trained, "fields"):
        now = Sample(trained)
        def radii(index, label=label):
            return Sample(trained, torch.as_tensor(index)).radii(label).numpy()

        low, high = bootstrap(radii, len(trained.fields[label]), repeats=200)
        curves[label] = (now.radii(label), low, high)
        before = Sample(untrained).radii(label) if label in untrained.fields else None
        network = trained.networks[label]
        names = [network.layers[i] for i in network.blocks] or network.layers
        page.table([f"block of {label}", f"radius, {len(trained.fields[label])} images", "control"],
                   [[name, _shown(r, (a, b)), f"{before[i]:.2f}" if before is not None else "none"]
                    for i, (name, r, a, b) in enumerate(zip(names, *curves[label], strict=True))])
        numbers.setdefault("receptive_field", {})[label] = {
            "blocks": names, "radius": curves[label][0].tolist(), "low": low.tolist(), "high": high.tolist(),
            "control": before.tolist() if before is not None else None, "images": len(trained.fields[label])}
    if curves:
        even = float(radius(torch.ones(64, 64))) / 64
        page.figure(plots.radius_against_depth(curves, most=even, ylabel="radius (share of the width)"),
                    "Radius against depth. " + " ".join(f"{label}: from {r[0]:.2f} to {r[-1]:.2f} of the "
                                                        f"width."
                                                        for label, (r, _, _) in curves.items()))


def _norms(page: Page, numbers: dict, trained: Results) -> None:
    page.heading("Norm ratios of the skip connections")
    page.text("How large what a skip connection carries is, beside what its branch adds (‖z‖ / ‖f(z)‖); "
              f"geometric mean over {trained.n_images} images and their patches. Large: the block changes "
              "little.")
    for label in _left_out(page, trained, "norms"):
        groups = {"patches": trained.each(label, "patches")}  # (n, L, branches)
        if trained.networks[label].has_cls:
            groups = {"CLS": trained.each(label, "cls"), **groups}
        branches = ("attention", "MLP") if groups["patches"].shape[2] == 2 else ("unit",)
        found = {name: [2**end for end in _interval(values)] for name, values in groups.items()}
        middle = {name: each[0] for name, each in found.items()}
        figure = plots.norm_ratio_curves(middle.get("CLS"), middle["patches"], branches, title=label)
        page.figure(figure, f"{label}: " + "; ".join(
            f"{name} from {values[0].mean():.1f} in the first block to {values[-1].mean():.1f} in the last"
            for name, values in middle.items()) + ".")
        columns = [(name, k) for name in found for k in range(len(branches))]
        page.table([f"block of {label}", *(f"{name}, {branches[k]}" for name, k in columns)],
                   [[i, *(_shown(found[name][0][i, k], (found[name][1][i, k], found[name][2][i, k]))
                          for name, k in columns)] for i in range(len(middle["patches"]))])
        numbers.setdefault("norm_ratios", {})[label] = {
            name: {"branches": list(branches), "ratio": each[0].tolist(), "low": each[1].tolist(),
                   "high": each[2].tolist(), "images": trained.n_images} for name, each in found.items()}


def _location(page: Page, numbers: dict, trained: Results, untrained: Results) -> None:
    page.heading("Localisation")
    page.text("Does a token of the last block still know its place? CKA of a token with every raw patch of "
              "the image, the similarity of whole images regressed out. The mark is the token's own place; "
              "sharpness is the CKA with that patch minus the mean of the others. Share kept: sharpness over "
              f"that of copies of the patches. {trained.n_images} images.")
    rows = []
    for label in _left_out(page, trained, "tokens"):
        found, tokens = trained.localisation(label), trained.tokens(label)[0]
        few = [0, len(tokens) // 3, len(tokens) // 2, len(tokens) - 2]
        page.figure(plots.localisation(found.maps[few], [tokens[i] for i in few], columns=2, title=label,
                                       scale=(0.0, max(0.05, float(found.maps.nan_to_num().max())))),
                    f"{label}: CKA of four tokens with all patches, at most {found.maps.max():.2f}.")
        first = (own_rank(found.maps, tokens) == 1).double().mean()
        def mean(matrix, found=found, tokens=tokens):
            return sharpness(matrix.unflatten(1, found.grid), tokens).mean()

        value, interval, kept = mean(found.values), found.interval(mean, n=300), Sample(trained).kept(label)
        control = Sample(untrained).sharpness(label) if untrained.admits(label, "tokens") else torch.nan
        rows.append([label, _shown(value, interval), f"{kept:.0%}", f"{first:.0%}", f"{control:.2f}"])
        numbers.setdefault("localisation", {})[label] = {
            "tokens": tokens, "grid": list(found.grid), "maps": found.maps.tolist(),
            "sharpness": float(value), "interval": list(interval), "share_kept": float(kept),
            "own_patch_first": float(first), "images": trained.n_images}
    if rows:
        page.table(["network", "sharpness", "share kept", "own patch first", "sharpness, control"], rows)
