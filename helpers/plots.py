"""Every figure of the course: one function a figure, each returns the matplotlib Figure.

Figures are opaque white with dark text, so that they read the same on a light and on a dark page; no wider
than 6.4 inches, so that their 11 point text is still legible on a phone. Lines differ in
colour (Okabe and Ito's, safe for colour-blind readers), dash and marker, and carry their name at their
end. Similarities share one colour scale, from 0 to 1. Arrays may be torch or numpy.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import wraps

import numpy as np

from .slider import frame_slider  # noqa: F401  (a figure too: chapters find it here)

WIDTH = 6.4  # inches
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#A6548A", "#8A6D00", "#4D4D4D")
DASHES = ("-", (0, (5, 2)), (0, (1, 1.5)), (0, (6, 2, 1, 2)), (0, (3, 1)), (0, (8, 3)))
MARKERS = ("o", "s", "^", "D", "v", "P")
GREY = "#6B6B6B"
STYLE = {
    "figure.facecolor": "white", "axes.facecolor": "white", "savefig.facecolor": "white",
    "figure.dpi": 120, "savefig.dpi": 120, "figure.constrained_layout.use": True,
    "font.family": "sans-serif", "font.sans-serif": ["DejaVu Sans"],  # ships with matplotlib
    "font.size": 11, "axes.titlesize": 12, "axes.labelsize": 11,
    "xtick.labelsize": 10, "ytick.labelsize": 10,
    "text.color": "#1a1a1a", "axes.labelcolor": "#1a1a1a", "axes.edgecolor": GREY, "axes.axisbelow": True,
    "xtick.color": GREY, "ytick.color": GREY, "xtick.labelcolor": "#1a1a1a", "ytick.labelcolor": "#1a1a1a",
    "axes.spines.top": False, "axes.spines.right": False, "axes.grid": False,
    "grid.color": "#DDDDDD", "grid.linewidth": 0.8, "lines.linewidth": 2, "lines.markersize": 5,
    "image.cmap": "viridis", "image.interpolation": "nearest",
}


def _figure(draw):
    """Draw in the course's style and let go of the figure, so that a notebook shows it once.

    Matplotlib is imported here, when the first figure is drawn.
    """

    @wraps(draw)
    def styled(*arguments, **options):
        import matplotlib.pyplot as plt

        with plt.rc_context(STYLE):
            figure = draw(*arguments, **options)
        plt.close(figure)
        return figure

    return styled


def _array(values, dimensions: int, what: str) -> np.ndarray:
    """float64 array of so many dimensions, or a ValueError that says which."""
    if hasattr(values, "detach"):
        values = values.detach().cpu()
    array = np.asarray(values, dtype=np.float64)
    if array.ndim != dimensions or array.size == 0:
        raise ValueError(f"{what} must have {dimensions} dimensions, none empty; got shape {array.shape}")
    return array


def _axes(rows=1, columns=1, height=3.4, width=WIDTH, **options):
    """(figure, array of axes (rows, columns))."""
    import matplotlib.pyplot as plt

    return plt.subplots(rows, columns, figsize=(width, height), squeeze=False, **options)


def _panels(count, columns, height_over_width=1.0, room=0.86):
    """Panels side by side and below each other, the ones left over hidden: (figure, flat array of axes).

    `room`: the share of the width that is left for panels beside a colour bar and labels.
    """
    columns = min(columns, count)
    rows = math.ceil(count / columns)
    width = WIDTH if columns > 1 else 4.4
    height = rows * (room * width / columns * height_over_width + 0.3)
    figure, axes = _axes(rows, columns, height, width)
    for axis in axes.flat[count:]:
        axis.set_axis_off()
    return figure, axes.ravel()[:count]


# ---------------------------------------------------------------- images

@_figure
def image_grid(images, titles: Sequence[str] | None = None, columns: int = 5):
    """Images (n, 3, H, W) in [0, 1] (or (n, H, W), shown grey), `columns` a row, each under its title."""
    images = np.asarray(images.detach().cpu() if hasattr(images, "detach") else images, dtype=np.float64)
    if images.ndim not in (3, 4) or not len(images) or (images.ndim == 4 and images.shape[1] not in (1, 3)):
        raise ValueError(f"image_grid needs images (n, 3, H, W) or (n, H, W); got shape {images.shape}")
    if titles is not None and len(titles) != len(images):
        raise ValueError(f"image_grid needs one title an image; got {len(titles)} for {len(images)} images")
    figure, axes = _panels(len(images), columns, images.shape[-2] / images.shape[-1], room=1)
    for index, (axis, image) in enumerate(zip(axes, images, strict=True)):
        image = image.transpose(1, 2, 0).squeeze() if image.ndim == 3 else image  # (3, H, W) -> (H, W, 3)
        axis.imshow(np.clip(image, 0, 1), cmap="gray", vmin=0, vmax=1)
        axis.set_title(titles[index] if titles is not None else "", fontsize=10)
        axis.set_axis_off()
    return figure


@_figure
def reach(image, boxes: Mapping[str, tuple[float, float, float, float]], grid: int = 0, title: str = ""):
    """What a unit could see: an image (3, H, W) in [0, 1], one panel a network, dimmed outside its box.

    `boxes`: {name: (top, left, bottom, right)} in pixels, cut at the image's edges. `grid` draws the borders
    of patches of so many pixels on all panels.
    """
    from matplotlib.patches import Rectangle

    picture = _array(image, 3, "an image").transpose(1, 2, 0)  # (3, H, W) -> (H, W, 3)
    height, width = picture.shape[:2]
    figure, axes = _axes(1, len(boxes), height=WIDTH / len(boxes) * height / width + 0.7)
    for axis, (name, (top, left, bottom, right)) in zip(axes.flat, boxes.items(), strict=True):
        top, left, bottom, right = max(top, 0), max(left, 0), min(bottom, height), min(right, width)
        seen = np.zeros((height, width, 1), bool)
        seen[round(top):round(bottom), round(left):round(right)] = True
        axis.imshow(np.where(seen, picture, 0.75 + 0.25 * picture).clip(0, 1), extent=(0, width, height, 0))
        axis.add_patch(Rectangle((left, top), right - left, bottom - top, fill=False, clip_on=False,
                                 edgecolor=COLOURS[1], linewidth=2.5))
        for at in range(grid, max(height, width), grid) if grid else ():
            axis.axhline(at, color="white", linewidth=0.7, alpha=0.8)
            axis.axvline(at, color="white", linewidth=0.7, alpha=0.8)
        axis.set(xticks=[0, width], yticks=[0, height])
        axis.set_title(name, fontsize=11)
    axes[0, 0].set(xlabel="pixels", ylabel="pixels")
    figure.suptitle(title)
    return figure


# ---------------------------------------------------------------- similarity

def _comparison(comparison, rows=None, columns=None):
    """(values (Lx, Ly), row names, column names) of a Comparison or of a matrix."""
    values = _array(getattr(comparison, "values", comparison), 2, "a similarity map")
    rows = rows if rows is not None else getattr(comparison, "rows", None)
    columns = columns if columns is not None else getattr(comparison, "columns", None)
    rows = list(rows) if rows is not None else [str(i) for i in range(values.shape[0])]
    columns = list(columns) if columns is not None else [str(i) for i in range(values.shape[1])]
    if (len(rows), len(columns)) != values.shape:
        raise ValueError(f"a map {values.shape} needs as many names; got {len(rows)} and {len(columns)}")
    return values, rows, columns


def _stage(name):
    """The block or stage that a layer belongs to, kept short: blocks.3.norm1 -> 3, layer2.0 -> layer2."""
    parts = str(name).split(".")
    if parts[0] in ("blocks", "stages") and len(parts) > 1:
        return parts[1]
    return parts[0]


def _ticks(names, most=6):
    """Where to put ticks on an axis of layers, and what to write: the first layer of each stage."""
    stages = [_stage(name) for name in names]
    starts = [i for i, stage in enumerate(stages) if i == 0 or stage != stages[i - 1]]
    starts = starts[:: math.ceil(len(starts) / most)]
    room = len(names) / 25  # two names closer than this would be written over each other
    starts = [i for i, end in zip(starts, [*starts[1:], math.inf], strict=True) if end - i > room]
    return starts, [stages[i] for i in starts]


def _axis_title(names, given):
    if given is not None:
        return given
    first = {str(name).partition(".")[0] for name in names}
    return "ViT block" if "blocks" in first else "ResNet unit" if "layer1" in first else "layer"


def _heat(axis, values, vmin=0.0, vmax=1.0, cmap="viridis", **options):
    """A map with row 0 at the bottom; what is not a number is grey."""
    import matplotlib

    cmap = matplotlib.colormaps[cmap].with_extremes(bad="#BBBBBB")
    options = {"origin": "lower", "aspect": "auto", **options}
    return axis.imshow(np.ma.masked_invalid(values), vmin=vmin, vmax=vmax, cmap=cmap, **options)


def _draw_map(axis, comparison, rows=None, columns=None, row_label=None, column_label=None, ticks=6):
    values, rows, columns = _comparison(comparison, rows, columns)
    image = _heat(axis, values)
    axis.set_box_aspect(1)
    axis.set_xticks(*_ticks(columns, ticks), rotation=90 if "layer1" in map(_stage, columns) else 0)
    axis.set_yticks(*_ticks(rows, ticks))
    axis.set_xlabel(_axis_title(columns, column_label))
    axis.set_ylabel(_axis_title(rows, row_label))
    return image


@_figure
def cka_heatmap(
    comparison, rows=None, columns=None, title: str = "", row_label=None, column_label=None, label="CKA"
):
    """One map of similarities: a Comparison, or values (Lx, Ly) with the names of rows and columns.

    First layers at the bottom left. The scale is always 0 to 1; negative values of the unbiased estimator
    are drawn as 0, NaN (a constant layer) grey.
    """
    figure, axes = _axes(width=4.8, height=4.2)
    image = _draw_map(axes[0, 0], comparison, rows, columns, row_label, column_label)
    axes[0, 0].set_title(title)
    figure.colorbar(image, ax=axes, label=label, shrink=0.85)
    return figure


@_figure
def cka_maps(comparisons: Mapping[str, object], columns: int = 2, title: str = "", label: str = "CKA",
             row_label=None, column_label=None):
    """Several maps on one scale, each under its name: {name: Comparison or (Lx, Ly)}.

    Labels that would repeat the panel to the left are left out.
    """
    if not comparisons:
        raise ValueError("cka_maps needs at least one map")
    figure, axes = _panels(len(comparisons), columns)
    left = ""
    for k, (axis, (name, comparison)) in enumerate(zip(axes, comparisons.items(), strict=True)):
        image = _draw_map(axis, comparison, None, None, row_label, column_label, 6 if columns < 3 else 4)
        axis.set_title(name, fontsize=11)
        if k % columns and left == axis.get_ylabel():
            axis.set_ylabel("")
        left = axis.get_ylabel() or left
    figure.colorbar(image, ax=figure.axes, label=label, shrink=0.6)
    figure.suptitle(title)
    return figure


@_figure
def closest_depth(comparisons, title: str = "", row_label=None, column_label=None):
    """For each row (a ViT block), the column (a ResNet unit) that resembles it most.

    `comparisons`: a Comparison or (Lx, Ly), or {name: the same} with equal layers, the control among them.
    The larger the marker, the larger the similarity.
    """
    if not isinstance(comparisons, Mapping):
        comparisons = {"": comparisons}
    figure, axes = _axes(height=3.8)
    axis, ends = axes[0, 0], []
    for k, (name, comparison) in enumerate(comparisons.items()):
        values, rows, columns = _comparison(comparison)
        filled = np.where(np.isnan(values), -np.inf, values)
        best = filled.argmax(1)  # (Lx,)
        x, size = np.arange(len(rows)), 15 + 110 * np.clip(filled.max(1), 0, 1)
        axis.plot(x, best, color=COLOURS[k], linestyle=DASHES[k], linewidth=1.2)
        axis.scatter(x, best, s=size, color="white" if k else COLOURS[k], edgecolor=COLOURS[k], zorder=3,
                     marker=MARKERS[k])
        ends.append((x[-1], best[-1], name, COLOURS[k]))
    axis.set_xticks(*_ticks(rows, most=12))
    axis.set_yticks(*_ticks(columns))
    axis.set_ylim(-1, len(columns))
    axis.grid(axis="y")
    _name_ends(axis, ends)
    axis.set_xlabel(_axis_title(rows, row_label))
    axis.set_ylabel(f"most similar {_axis_title(columns, column_label)}")
    axis.set_title(title)
    return figure


@_figure
def gram_matrices(grams: Mapping[str, object], groups: Sequence[str], columns: int = 2, title: str = ""):
    """Centred Gram matrices {name: (n, n)}, each over its largest off-diagonal entry: blue alike, red unlike.

    `groups` (n,) names each image's group, images of one group side by side; the borders are drawn.
    """
    if not grams:
        raise ValueError("gram_matrices needs at least one matrix")
    figure, axes = _panels(len(grams), columns, 1.18)  # the groups' names stand upright below
    groups = list(groups)
    starts = [i for i, group in enumerate(groups) if i == 0 or group != groups[i - 1]]
    middles = [(a + b - 1) / 2 for a, b in zip(starts, [*starts[1:], len(groups)], strict=True)]
    for k, (axis, (name, gram)) in enumerate(zip(axes, grams.items(), strict=True)):
        gram = _array(gram, 2, "a Gram matrix")
        if gram.shape != (len(groups), len(groups)):
            raise ValueError(f"{len(groups)} groups need a Gram matrix of as many images, not {gram.shape}")
        off_diagonal = np.abs(gram - np.diag(gram.diagonal())).max()
        image = _heat(axis, gram / (off_diagonal or 1), -1, 1, cmap="RdBu", origin="upper", aspect="equal")
        for start in starts[1:]:
            axis.axhline(start - 0.5, color="#1a1a1a", linewidth=0.5)
            axis.axvline(start - 0.5, color="#1a1a1a", linewidth=0.5)
        names = [groups[i] for i in starts]
        axis.set_yticks(middles, names if k % columns == 0 else [""] * len(names), fontsize=10)
        axis.set_xticks(middles, names, rotation=90, fontsize=10)
        axis.set_title(name, fontsize=11)
    figure.colorbar(image, ax=figure.axes, label="similarity of two images", shrink=0.6)
    figure.suptitle(title)
    return figure


@_figure
def pair_cloud(first, second, xlabel: str, ylabel: str, most: int = 4000, title: str = ""):
    """Each pair of images a dot: its centred similarity in one Gram matrix (n, n) against that in another.

    Pairs of two different images only, each once, and `most` of them at even steps. The line is the
    least-squares fit through the origin.
    """
    first, second = (_array(gram, 2, "a Gram matrix") for gram in (first, second))
    pairs = np.triu_indices(len(first), 1)
    x, y = first[pairs], second[pairs]
    step = math.ceil(len(x) / most)
    figure, axes = _axes(height=3.8, width=4.8)
    axis = axes[0, 0]
    axis.scatter(x[::step], y[::step], s=6, color=COLOURS[0], alpha=0.3, linewidth=0)
    ends = np.array([x.min(), x.max()])
    axis.plot(ends, ends * (x @ y) / (x @ x), color=COLOURS[1])
    axis.axhline(0, color=GREY, linewidth=0.8, zorder=0)
    axis.axvline(0, color=GREY, linewidth=0.8, zorder=0)
    axis.set(xlabel=xlabel, ylabel=ylabel, title=title)
    return figure


@_figure
def confusions(shares: Mapping[str, object], classes: Sequence[str], title: str = ""):
    """What a probe calls the images of each class: {name: (c, c)}, a row a true class that sums to 1."""
    if not shares:
        raise ValueError("confusions needs at least one matrix")
    figure, axes = _panels(len(shares), 2, 1.3, room=0.8)  # the classes' names stand upright below
    for k, (axis, (name, values)) in enumerate(zip(axes, shares.items(), strict=True)):
        values = _array(values, 2, "a confusion matrix")
        if values.shape != (len(classes), len(classes)):
            raise ValueError(f"{len(classes)} classes need a matrix of as many, not {values.shape}")
        image = _heat(axis, values, origin="upper", aspect="equal")
        axis.set_xticks(range(len(classes)), classes, rotation=90)
        axis.set_yticks(range(len(classes)), [""] * len(classes) if k % 2 else classes)
        axis.set_xlabel("named")
        axis.set_ylabel("" if k % 2 else "true")
        axis.set_title(name, fontsize=11)
    figure.colorbar(image, ax=figure.axes, label="share of the row's images", shrink=0.6)
    figure.suptitle(title)
    return figure


# ---------------------------------------------------------------- curves and dots

def _name_ends(axis, ends):
    """Write each curve's name at its right end, apart where they would overlap: (x, y, name, colour)."""
    ends = sorted((end for end in ends if end[2] and np.isfinite(end[1])), key=lambda end: end[1])
    if not ends:
        return
    # heights as shares of the axis, so that they can be spread evenly whatever the scale
    place = axis.transAxes.inverted().transform
    heights = [place(axis.transData.transform((x, y)))[1] for x, y, _, _ in ends]
    gap = 0.085
    heights = np.clip(heights, 0, 1)
    for i in range(1, len(heights)):
        heights[i] = max(heights[i], heights[i - 1] + gap)
    heights -= max(0.0, heights[-1] - 1)
    for i in range(len(heights) - 2, -1, -1):
        heights[i] = min(heights[i], heights[i + 1] - gap)
    for height, (_, _, name, colour) in zip(heights, ends, strict=True):
        _beside(axis, height, name, colour, axis.transAxes)


def _beside(axis, y, text, colour, transform=None):
    """Write at the right of the axis, at a height in data (or in `transform`'s) units."""
    axis.text(1.02, y, text, color=colour, transform=transform or axis.get_yaxis_transform(), va="center",
              fontweight="bold", fontsize=10)


def _curve(x, values, index):
    """(x, y, low, high), each (L,), from y, (y, low, high) or (x, y, low, high); no band: None, None."""
    if isinstance(values, (tuple, list)) and len(values) and np.ndim(values[0]) == 1:
        if len(values) not in (3, 4):
            raise ValueError(f"a curve is y, (y, low, high) or (x, y, low, high); got {len(values)} arrays")
        *own, y, low, high = values
        x = own[0] if own else x
    else:
        y, low, high = values, None, None
    y = _array(y, 1, "a curve")
    x = np.arange(len(y), dtype=float) if x is None else _array(x, 1, "x")
    if len(x) != len(y):
        raise ValueError(f"curve {index}: x has {len(x)} points and y has {len(y)}")
    band = [None if end is None else _array(end, 1, "a band") for end in (low, high)]
    if any(end is not None and len(end) != len(y) for end in band):
        raise ValueError(f"curve {index}: its band must have as many points as the curve, {len(y)}")
    return x, y, *band


@_figure
def lines_with_band(
    curves: Mapping[str, object], xlabel: str, ylabel: str, title: str = "", x=None, ylim=None,
    log_x: bool = False, level: float | None = None, level_name: str = "", ticks: Sequence[str] | None = None,
):
    """Curves with their intervals as bands, named at their right ends.

    `curves`: {name: y (L,), or (y, low, high), or (x, y, low, high)}; `x` (L,) serves those without
    their own (default 0, 1, 2, …); `ticks`: names of layers to write below the axis;
    `level`: a horizontal line to compare with (chance, uniform attention), and its name.
    """
    if not curves:
        raise ValueError("lines_with_band needs at least one curve")
    figure, axes = _axes()
    axis, ends = axes[0, 0], []
    for k, (name, values) in enumerate(curves.items()):
        xs, y, low, high = _curve(x, values, name)
        colour, dash, marker = (styles[k % len(styles)] for styles in (COLOURS, DASHES, MARKERS))
        if low is not None and high is not None:
            axis.fill_between(xs, low, high, color=colour, alpha=0.18, linewidth=0)
        axis.plot(xs, y, color=colour, linestyle=dash, marker=marker if len(y) <= 40 else "")
        ends.append((xs[-1], y[-1], name, colour))
    if log_x:
        axis.set_xscale("log")
    if level is not None:
        axis.axhline(level, color=GREY, linestyle=(0, (2, 2)), linewidth=1.2, zorder=1)
        ends.append((0, level, level_name, GREY))
    if ylim is not None:
        axis.set_ylim(*ylim)
    if ticks is not None:
        axis.set_xticks(*_ticks(ticks, most=12))
    axis.grid(axis="y")
    axis.set(xlabel=xlabel, ylabel=ylabel, title=title)
    axis.autoscale_view()
    _name_ends(axis, ends)
    return figure


def training_curve(seen, values: Mapping[str, Sequence[float]], ylabel: str = "share right", chance=None,
                   log_x: bool = False, title: str = "", ylim=(0, 1.02)):
    """What a training log holds against the images seen: `seen` (steps,), {name: (steps,)}."""
    from matplotlib.ticker import EngFormatter

    figure = lines_with_band(values, "images seen in training", ylabel, title, x=seen, ylim=ylim, log_x=log_x,
                             level=chance, level_name="chance")
    figure.axes[0].xaxis.set_major_formatter(EngFormatter(sep=""))  # 50k
    return figure


@_figure
def dots_with_intervals(
    names: Sequence[str], values, intervals, xlabel: str = "", holds: Sequence[bool | None] | None = None,
    controls=None, threshold: float | None = None, shared: bool = True, title: str = "",
):
    """One row each: a value (k,) with its interval (k, 2) and, hollow, its control (k,) (NaN: none).

    `holds` marks rows with a filled circle (holds), a cross (does not) or a hollow circle (undecided).
    With `shared=False`, for rows in different units, each row runs over its own range and the numbers
    are written beside it.
    """
    values, intervals = _array(values, 1, "values"), _array(intervals, 2, "intervals")
    count = len(values)
    controls = np.full(count, np.nan) if controls is None else _array(controls, 1, "controls")
    if not (len(names) == count == len(controls) and intervals.shape == (count, 2)):
        raise ValueError("dots_with_intervals needs k names, values, controls and intervals (k, 2); got "
                         f"{len(names)}, {count}, {len(controls)} and {intervals.shape}")
    holds = [True] * count if holds is None else list(holds)
    figure, axes = _axes(height=0.9 + 0.36 * count)
    axis = axes[0, 0]
    texts = [f"{v:.3g} [{low:.3g}, {high:.3g}]" for v, (low, high) in zip(values, intervals, strict=True)]
    if not shared:
        values, intervals, controls = _each_to_own_range(values, intervals, controls)
    rows = zip(values, intervals, controls, holds, strict=True)
    for y, (value, (low, high), control, verdict) in enumerate(rows):
        _, marker, colour, face = _MARKS[verdict]
        axis.plot([low, high], [y, y], color=colour, linewidth=3, solid_capstyle="butt", alpha=0.6)
        axis.plot(control, y, marker="D", color=GREY, markerfacecolor="white", markersize=6)
        axis.plot(value, y, marker=marker, color=colour, markerfacecolor=face, markersize=8)
    if threshold is not None:
        axis.axvline(threshold, color=GREY, linestyle=(0, (2, 2)), linewidth=1.2, zorder=1)
    if not shared:
        axis.set_xticks([])
        for y, text in enumerate(texts):
            _beside(axis, y, text, "#1a1a1a")
    axis.set_yticks(range(count), names)
    axis.set_ylim(count - 0.5, -0.5)
    axis.grid(axis="y")
    axis.set(xlabel=xlabel, title=title)
    _explain_marks(axis, holds, controls)
    return figure


@_figure
def scorecard(groups: Mapping[str, Mapping[str, object]], title: str = ""):
    """Findings in groups, one row each: {group: {name: (value, low, high, holds), or a reason why not}}.

    Every row runs over its own range with zero in the middle, since units differ: what counts is the side of
    the line and the length of the interval. Numbers stand beside it; a row without them says "not measured".
    """
    lines = [(None, group, None) for group in groups]
    for group, rows in reversed(list(groups.items())):
        at = lines.index((None, group, None)) + 1
        lines[at:at] = [(name, group, row) for name, row in rows.items()]
    if not any(name for name, _, _ in lines):
        raise ValueError("scorecard needs at least one finding")
    figure, axes = _axes(height=0.7 + 0.29 * len(lines))
    axis, shown = axes[0, 0], []
    for y, (name, group, row) in enumerate(lines):
        if name is None:
            axis.text(-0.02, y, group, transform=axis.get_yaxis_transform(), ha="right", va="center",
                      fontweight="bold", fontsize=10)
            continue
        if isinstance(row, str):
            axis.axhspan(y - 0.45, y + 0.45, facecolor="#EEEEEE", zorder=0)
            _beside(axis, y, "not measured", GREY)
            continue
        value, low, high, holds = row
        _, marker, colour, face = _MARKS[holds]
        reach = max(abs(low), abs(value), abs(high)) or 1.0
        axis.plot([low / reach, high / reach], [y, y], color=colour, linewidth=3, solid_capstyle="butt",
                  alpha=0.6)
        axis.plot(value / reach, y, marker=marker, color=colour, markerfacecolor=face, markersize=8)
        axis.text(1.02, y, f"{value:.2g} [{low:.2g}, {high:.2g}]", color=colour, fontsize=10, va="center",
                  transform=axis.get_yaxis_transform())
        shown.append(holds)
    named = [y for y, (name, _, _) in enumerate(lines) if name]
    axis.set_yticks(named, [lines[y][0] for y in named], fontsize=10)
    axis.tick_params(axis="y", length=0)
    axis.axvline(0, color=GREY, linestyle=(0, (2, 2)), linewidth=1.2, zorder=1)
    axis.set(xlim=(-1.1, 1.1), xticks=[], ylim=(len(lines) - 0.5, -0.5), title=title,
             xlabel="against ←  0  → for the claim")
    _explain_marks(axis, shown, always=True)
    return figure


def _each_to_own_range(values, intervals, controls):
    """Each row's numbers mapped so that its smallest is 0 and its largest 1."""
    rows = np.column_stack([values, intervals, controls])  # (k, 4)
    low = np.nanmin(rows, 1, keepdims=True)
    span = np.nanmax(rows, 1, keepdims=True) - low
    rows = (rows - low) / np.where(span > 0, span, 1)
    return rows[:, 0], rows[:, 1:3], rows[:, 3]


_MARKS = {  # what a verdict's row looks like: name, marker, colour, fill
    True: ("holds", "o", COLOURS[0], COLOURS[0]),
    False: ("does not hold", "X", COLOURS[1], COLOURS[1]),
    None: ("undecided", "o", GREY, "white"),
}


def _explain_marks(axis, holds, controls=np.nan, always=False):
    """A legend of the marks in use, below the figure; none when there is nothing to tell apart."""
    from matplotlib.lines import Line2D

    several = always or len(set(holds)) > 1
    shown = [mark for verdict, mark in _MARKS.items() if verdict in holds] if several else []
    if np.isfinite(controls).any():
        shown.append(("control", "D", GREY, "white"))
    handles = [Line2D([], [], linestyle="", marker=marker, color=colour, markerfacecolor=face, label=name)
               for name, marker, colour, face in shown]
    if handles:
        axis.figure.legend(handles=handles, loc="outside lower center", ncols=len(handles), frameon=False)


# ---------------------------------------------------------------- attention

def _uniform_line(axis, uniform):
    axis.axhline(uniform, color=GREY, linestyle=(0, (2, 2)), linewidth=1.2, zorder=1)
    _beside(axis, uniform, "uniform", GREY)


@_figure
def attention_distances(distances, uniform: float, title: str = ""):
    """Each block's heads, sorted from most local to most global: distances (L, h) in pixels.

    `uniform`: the distance that attention would have if it were spread evenly. First blocks are dark,
    last blocks are light.
    """
    import matplotlib

    distances = np.sort(_array(distances, 2, "distances"), 1)
    blocks, heads = distances.shape
    # up to 0.85: white would swallow the yellow end
    shades = matplotlib.colormaps["viridis"](np.linspace(0, 0.85, blocks))  # (L, 4)
    figure, axes = _axes(height=3.8)
    axis = axes[0, 0]
    for block, row in enumerate(distances):
        axis.plot(np.arange(1, heads + 1), row, color=shades[block], marker="o", markersize=4, linewidth=1.6)
    _uniform_line(axis, uniform)
    axis.set_ylim(0, max(distances.max(), uniform) * 1.08)
    axis.set_xticks(range(1, heads + 1))
    axis.set(xlabel="head of the block, sorted", ylabel="mean attention distance (px)", title=title)
    steps = matplotlib.colors.BoundaryNorm(np.arange(-0.5, blocks), blocks)
    mappable = matplotlib.cm.ScalarMappable(steps, matplotlib.colors.ListedColormap(shades))
    figure.colorbar(mappable, ax=axis, label="block", ticks=range(0, blocks, math.ceil(blocks / 6)))
    return figure


@_figure
def attention_scatter(distances, uniform: float, title: str = ""):
    """Each head a dot, each block a column, the blocks' means a line: distances (L, h) in pixels."""
    distances = _array(distances, 2, "distances")
    blocks = np.arange(len(distances))
    figure, axes = _axes()
    axis = axes[0, 0]
    every = np.repeat(blocks, distances.shape[1])  # (L, h) -> (L * h,)
    axis.scatter(every, distances.ravel(), s=28, color=COLOURS[0], alpha=0.7)
    axis.plot(blocks, distances.mean(1), color=COLOURS[1], marker="_", markersize=14)
    _uniform_line(axis, uniform)
    axis.set_ylim(0, max(distances.max(), uniform) * 1.08)
    axis.set_xticks(blocks[:: math.ceil(len(blocks) / 12)])
    mean, height = distances.mean(1)[-1], 0.09 * axis.get_ylim()[1]
    if abs(mean - uniform) < height:  # do not write one name over the other
        mean = uniform + math.copysign(height, mean - uniform)
    _beside(axis, mean, "block mean", COLOURS[1])
    axis.set(xlabel="block", ylabel="mean attention distance (px)", title=title)
    return figure


@_figure
def head_subsets(distances, similarity: Mapping[str, object], title: str = "", ylabel: str = "CKA"):
    """Similarity of subsets of heads to ResNet layers against how local the subset is.

    `distances` (s,): mean attention distance of each subset in pixels; `similarity`: {layer: (s,)}.
    """
    distances = _array(distances, 1, "distances")
    order = np.argsort(distances)
    figure, axes = _axes(height=3.8)
    axis, ends = axes[0, 0], []
    for k, (name, values) in enumerate(similarity.items()):
        values = _array(values, 1, f"similarity of {name}")
        if len(values) != len(distances):
            raise ValueError(f"{name} has {len(values)} subsets and there are {len(distances)} distances")
        colour, dash, marker = (styles[k % len(styles)] for styles in (COLOURS, DASHES, MARKERS))
        axis.plot(distances[order], values[order], color=colour, linestyle=dash, marker=marker)
        ends.append((distances[order][-1], values[order][-1], name, colour))
    axis.set_ylim(0, 1)
    axis.grid(axis="y")
    axis.set(xlabel="mean attention distance of the heads (px)", ylabel=ylabel, title=title)
    _name_ends(axis, ends)
    return figure


# ---------------------------------------------------------------- receptive fields and maps over space

@_figure
def fields(maps, titles: Sequence[str], columns: int = 4, radii=None, title: str = ""):
    """Effective receptive fields (k, H, W), each over its own maximum, one scale from 0 to 1.

    `radii` (k,) in pixels, where given, draws the circle that holds the stated mass around the centre.
    """
    from matplotlib.patches import Circle

    maps = _array(maps, 3, "fields")
    if len(titles) != len(maps) or (radii is not None and len(radii) != len(maps)):
        raise ValueError(f"fields needs a title (and a radius) for each of the {len(maps)} maps")
    height, width = maps.shape[1:]
    figure, axes = _panels(len(maps), columns, height / width)
    for k, (axis, field) in enumerate(zip(axes, maps, strict=True)):
        peak = np.nanmax(np.abs(field))
        image = _heat(axis, field / (peak if peak > 0 else 1), cmap="inferno", origin="upper", aspect="equal",
                      extent=(0, width, height, 0))
        if radii is not None:
            axis.add_patch(Circle((width / 2, height / 2), float(radii[k]), fill=False, color="white",
                                  linewidth=1.5, linestyle=(0, (4, 2))))
        axis.set_title(titles[k], fontsize=10)
        axis.set_xticks([0, width], ["", ""] if k else None)
        axis.set_yticks([0, height], ["", ""] if k else None)
    axes[0].set_ylabel("pixels")
    figure.colorbar(image, ax=figure.axes, label="share of the largest", shrink=0.8)
    figure.suptitle(title)
    return figure


def radius_against_depth(radii: Mapping[str, object], title: str = "", most: float | None = None,
                         ylabel: str = "radius that holds half the mass (px)"):
    """Radius of the receptive field against relative depth: {network: (L,), or (y, low, high)} in pixels.

    `most`: the radius of an even field over the whole image, drawn as a line.
    """
    placed = {}
    for name, values in radii.items():
        _, y, low, high = _curve(None, values, name)
        placed[name] = (np.linspace(0, 1, len(y)), y, *((y, y) if low is None else (low, high)))
    return lines_with_band(placed, "depth (0: first block, 1: last)", ylabel, title, level=most,
                           level_name="even")


@_figure
def localisation(
    maps, tokens: Sequence[tuple[int, int]] = (), titles: Sequence[str] | None = None, columns: int = 3,
    label: str = "CKA", title: str = "", scale: tuple[float, float] = (0.0, 1.0),
):
    """One map over the patches for each token: maps (k, gh, gw).

    `tokens` [(row, column)] marks each map's own patch; without it none is marked (a map of accuracy over
    tokens, say).
    """
    maps = _array(maps, 3, "maps")
    tokens = list(tokens)
    if tokens and len(tokens) != len(maps):
        raise ValueError(f"localisation needs one token a map; got {len(tokens)} for {len(maps)}")
    if titles is None:
        titles = [f"token ({row}, {column})" for row, column in tokens] or [""] * len(maps)
    figure, axes = _panels(len(maps), columns, maps.shape[1] / maps.shape[2])
    for k, axis in enumerate(axes):
        image = _heat(axis, maps[k], *scale, origin="upper", aspect="equal")
        if tokens:
            row, column = tokens[k]
            for colour, thickness in (("black", 3.5), ("white", 1.5)):  # seen on any colour of the map
                axis.plot(column, row, "s", markersize=13, markerfacecolor="none", markeredgecolor=colour,
                          markeredgewidth=thickness)
        axis.set_title(titles[k], fontsize=10)
        axis.set_xticks([0, maps.shape[2] - 1])
        axis.set_yticks([0, maps.shape[1] - 1])
    axes[0].set(xlabel="patch column", ylabel="patch row")
    figure.colorbar(image, ax=figure.axes, label=label, shrink=0.8)
    figure.suptitle(title)
    return figure


# ---------------------------------------------------------------- skip connections

@_figure
def norm_ratio_heatmap(ratios, title: str = "", cls: bool = True):
    """Norm ratio of the skip over the branch for every token: ratios (L, t), CLS first where there is one.

    The colour runs to the 98th percentile, so that one outlier token does not darken the rest.
    """
    ratios = _array(ratios, 2, "ratios")
    figure, axes = _axes(height=3.6)
    axis = axes[0, 0]
    image = _heat(axis, ratios, 0, float(np.nanpercentile(ratios, 98)), cmap="cividis")
    if cls:
        axis.axvline(0.5, color="white", linewidth=1.5)
    axis.set(xlabel="token (CLS first)" if cls else "token", ylabel="block", title=title)
    figure.colorbar(image, ax=axes, label="‖z‖ / ‖f(z)‖", extend="max")
    return figure


@_figure
def norm_ratio_curves(cls, patches, branches: Sequence[str] = ("attention", "MLP"), title: str = "",
                      names: Sequence[str] = ("CLS", "patches")):
    """Norm ratio against depth, one panel a branch: cls (L, 2) or None, patches (L, 2)."""
    groups = [(name, _array(values, 2, name)) for name, values in zip(names, (cls, patches), strict=True)
              if values is not None]
    if any(values.shape[1] != len(branches) for _, values in groups):
        raise ValueError(f"norm_ratio_curves needs one column for each of {list(branches)}")
    figure, axes = _axes(len(branches), 1, height=2.5 * len(branches), sharex=True)
    for column, (axis, branch) in enumerate(zip(axes.flat, branches, strict=True)):
        ends = []
        for k, (name, values) in enumerate(groups):
            y = values[:, column]
            axis.plot(y, color=COLOURS[k], linestyle=DASHES[k], marker=MARKERS[k])
            ends.append((len(y) - 1, y[-1], name, COLOURS[k]))
        axis.set_ylim(bottom=0)
        axis.grid(axis="y")
        axis.set(title=f"{branch} branch", ylabel="‖z‖ / ‖f(z)‖")
        _name_ends(axis, ends)
    axes[-1, 0].set_xlabel("block")
    figure.suptitle(title)
    return figure
