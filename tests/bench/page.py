"""The page of the book and its figure, from results.json."""

from __future__ import annotations

from pathlib import Path
from statistics import median

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "book" / "benchmarks.md"
FIGURE = ROOT / "book" / "_static" / "benchmarks.svg"


def cost(run: dict) -> tuple[float, float, float] | None:
    """Processor seconds over those of the bare passes: median and range of the repetitions."""
    if "missing" in run:
        return None
    ratios = [own / bare for own, bare in zip(run["own"], run["bare"], strict=True)]
    return median(ratios), min(ratios), max(ratios)


def error(run: dict, reference: dict) -> float | None:
    """The largest difference from float64, over all entries; infinite if one is not a number."""
    if run.get("values") is None or run["estimator"] not in reference:
        return None
    pairs = zip(sum(run["values"], []), sum(reference[run["estimator"]], []), strict=True)
    differences = [abs(a - b) for a, b in pairs]
    return max(differences) if all(d == d for d in differences) else float("inf")


def table(header: list[str], rows: list[list]) -> str:
    lines = [header, ["---"] + ["---:"] * (len(header) - 1), *rows]
    return "\n".join("| " + " | ".join(map(str, line)) + " |" for line in lines) + "\n"


def number(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}" if value >= 0.01 else f"{value:.0e}"


def contenders(results: dict) -> list[list]:
    runs, true = results.get("cka", {}), results.get("reference", {}).get("all", {})
    base = runs.get("bare passes", {}).get("peak", 0)
    rows = []
    for name, run in runs.items():
        if not (ratio := cost(run)):
            rows.append([name, "", "", "", run["missing"]])
            continue
        own = name.startswith("helpers")
        alone = f"{run['inside'] / median(run['bare']):.3f}" if own else ""
        wrong = "" if "fine" in name else number(error(run, true))
        rows.append([name, f"{ratio[0]:.2f} ({ratio[1]:.2f} to {ratio[2]:.2f})", alone,
                     f"{max(run['peak'] - base, 0):.2f}", wrong])
    return rows


def simple(group: dict) -> list[list]:
    """Rows of the receptive fields and the attention distance."""
    rows = []
    for name, run in group.items():
        for part, one in ([("", run)] if "own" in run or "missing" in run else run.items()):
            ratio = cost(one)
            label = f"{name}, `{part}`" if part else name
            rows.append([label, f"{ratio[0]:.2f} ({ratio[1]:.2f} to {ratio[2]:.2f})" if ratio else one["missing"],
                         f"{one['peak']:.2f}" if ratio else "", f"{one['error']:.0e}" if ratio else ""])
    return rows


def floor(results: dict) -> str:
    found = results.get("products", {}).get("all", {})
    if "block" not in found:
        return ""
    rows = []
    for grain in ("block", "fine"):
        own, run = found[grain], results.get("cka", {}).get(f"helpers, {grain}, unbiased", {})
        alone = run["inside"] / median(run["bare"]) if run.get("inside") else None
        part = own["seconds"] / found["bare"]
        rows.append([grain, own["layers"], f"{own['flop'] / 1e9:.0f}", f"{own['bytes'] / 1e9:.2f}",
                     f"{own['flop'] / found['forward_flop']:.3f}", f"{part:.3f}",
                     f"{alone:.3f}" if alone else "", f"{alone / part:.2f}" if alone else ""])
    return table(["layers", "count", "Gflop", "GB read", "of the forward passes, on paper", "measured, X Xᵀ alone",
                  "measured, all of CKA", "all of CKA over X Xᵀ"], rows)


def draw(results: dict) -> str:
    """Cost and error of each contender, side by side; returns the alt text."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    from helpers.plots import COLOURS, STYLE, WIDTH

    true = results.get("reference", {}).get("all", {})
    runs = {name: (cost(run), error(run, true)) for name, run in results["cka"].items()
            if cost(run) and name != "bare passes" and "fine" not in name}
    runs = dict(sorted(runs.items(), key=lambda item: -item[1][0][0]))
    with plt.rc_context(STYLE | {"svg.hashsalt": "benchmarks", "font.size": 9}):
        figure, (left, right) = plt.subplots(1, 2, figsize=(WIDTH, 0.34 * len(runs) + 1), sharey=True)
        for height, (name, (ratio, wrong)) in enumerate(runs.items()):
            look = {"color": COLOURS[0 if name.startswith("helpers") else 1],
                    "marker": "o" if name.startswith("helpers") else "s"}
            left.plot(ratio[1:], [height, height], color=look["color"], linewidth=2)
            left.plot(ratio[0], height, **look)
            if wrong is not None and wrong < float("inf"):
                right.plot(max(wrong, 1e-8), height, **look)
            elif wrong is not None:
                right.text(1, height, "not a number", ha="right", va="center", fontsize=8)
        left.set_yticks(range(len(runs)), list(runs))
        left.axvline(1, color="#6B6B6B", linewidth=1, linestyle="--")
        left.set(xscale="log", xlabel="processor time,\nbare passes = 1")
        left.set_xticks([0.5, 1, 2, 4], ["0.5", "1", "2", "4"])
        left.minorticks_off()
        right.set(xscale="log", xlabel="largest error of a CKA value", xlim=(5e-9, 2))
        right.axvline(1e-3, color="#6B6B6B", linewidth=1, linestyle="--")
        figure.savefig(FIGURE, metadata={"Date": None})
    plt.close(figure)
    said = [f"{name} {ratio[0]:.2f}" + (f" with an error of {wrong:.0e}" if wrong is not None else "")
            for name, (ratio, wrong) in runs.items()]
    return "Two dot plots: cost over the bare passes, and largest error from float64. " + "; ".join(said) + "."


TEXT = """# Benchmarks

What the course's measures cost, and how right they are, beside the libraries that do the same. This page is written by `make bench`, which anyone can run: {images} images of 224 pixels a side, batches of {batch}, one thread, on {processor}, Python {python}, torch {torch}, timm {timm}.

Times are processor seconds over those of the **bare forward passes**: the same batches through the same two networks (timm's `resnet18` and `vit_tiny_patch16_224`, random weights) and nothing else. Both take turns {repeats} times in one process, so that other work on the machine slows both; shown are the median and, in brackets, the smallest and largest ratio. The row "bare passes" sets the bare passes against themselves, and so shows the noise.

## CKA of all pairs of blocks

{figure}

{cka}

"CKA alone" is what is spent on anything but the forward passes: Gram matrices inside the hooks, and HSIC. Memory is the largest resident memory of the process over that of the bare passes. The error is the largest difference of any entry from the same estimator in float64, forward passes included; minibatch estimators are held against the minibatch reference, libraries that take all features at once against that of all images. "Fine" layers are norms, convolutions, attention and hidden layers of MLPs as well as blocks.

## Where the time goes

{floor}

On paper, a batch of n images and a layer of d features cost 2 n² d operations and n d numbers read. What is left beside X Xᵀ is the sum over chunks in float64 and, for features whose mean is large beside what differs between images, a second product with the mean taken off: without it, float32 would not have the digits.

## Fast mode

`compare(..., fast=True)` runs the networks under autocast in bfloat16, where the processor has instructions for it, and a network of convolutions in channels-last order. Gram matrices stay in float32 and HSIC in float64; the model itself is not converted. Largest difference from float64 of any entry in a network compared with itself:

{accuracy}

{verdict}

## Memory

{flat}

## Receptive fields and attention distance

Over one forward and one backward pass, the least that a field of one place needs (gradient of the mean over channels). The error is relative to the field's largest value; openerf's own definition, negative gradients cut, is held against that definition in float64.

{receptive}

Over forward passes that form the attention weights, without which there is no distance; the error is in pixels. "Published" is a direct translation of the function that the paper's authors published, which drops CLS without renormalising.

{attention}

## The course itself

{course}
"""


def write(results: dict) -> None:
    alt = draw(results) if results.get("cka") else ""
    accuracy = {name: run for name, run in results.get("accuracy", {}).items() if "missing" not in run}
    worst = max((run[f"fast {kind}"] for run in accuracy.values() for kind in ("unbiased", "biased")), default=None)
    verdict = "" if worst is None else (
        f"The largest is {worst:.1e}, "
        + ("within 0.001, on these networks; on others it has not been shown, so fast mode stays a choice."
           if worst <= 1e-3 else "more than 0.001, so fast mode is a choice and never the default."))
    rows = [[name, *(f"{run[f'{mode} {kind}']:.0e}" for mode in ("exact", "fast") for kind in ("unbiased", "biased"))]
            for name, run in accuracy.items()]
    peaks = {name: run.get("peak", float("nan")) for name, run in results.get("flat", {}).items()}
    flat = [[name, f"{peak:.2f}"] for name, peak in peaks.items()]
    filled = TEXT.format(
        **results["settings"],
        figure=f"```{{image}} _static/benchmarks.svg\n:alt: {alt}\n```" if alt else "",
        cka=table(["", "time over bare passes", "CKA alone", "memory over bare passes, GiB", "error"],
                  contenders(results)),
        floor=floor(results), verdict=verdict,
        accuracy=table(["network", "exact, unbiased", "exact, biased", "fast, unbiased", "fast, biased"], rows),
        flat=table(["largest resident memory", "GiB"], flat),
        receptive=table(["", "time", "peak, GiB", "error"], simple(results.get("receptive", {}))),
        attention=table(["", "time", "peak, GiB", "error"], simple(results.get("attention", {}))),
        course=course(results.get("course", {}).get("all", {})),
    )
    PAGE.write_text(filled)


def course(found: dict) -> str:
    if not found:
        return "Not measured in this run."
    spent = found["import"]
    rows = [["`import helpers`, beyond torch's own import", f"{max(spent['helpers'] - spent['torch'], 0):.2f} s"],
            ["`import helpers.cka`, beyond torch's", f"{max(spent['cka'] - spent['torch'], 0):.2f} s"],
            ["all of its modules, beyond torch's and timm's", f"{max(spent['all'] - spent['timm'], 0):.2f} s"],
            ["`shapes.draw`, images a second", f"{found['images a second']:,.0f}"]]
    for name, run in found.get("notebooks", {}).items():
        rows.append([f"`{name}`", f"{run['processor']:.0f} s of processor, {run['clock']:.0f} s by the clock"])
    return table(["", "measured"], rows)
