"""A slider that needs no kernel: precomputed pictures, one at a time, in a self-contained piece of HTML."""

from __future__ import annotations

import base64
import hashlib
import html
import io
import json
import string
from collections.abc import Sequence


class FrameSlider:
    """Self-contained HTML; a notebook shows it, `str(…)` gives it, its repr never changes with the pixels."""

    def __init__(self, page: str, labels: Sequence[str]):
        self.page, self.labels = page, list(labels)

    def _repr_html_(self) -> str:
        return self.page

    __str__ = _repr_html_

    def __repr__(self) -> str:
        return f"slider over {len(self.labels)} frames: {self.labels[0]} to {self.labels[-1]}"


def frame_slider(
    frames: Sequence[object], labels: Sequence[str], alts: Sequence[str], title: str, start: int = 0,
    dpi: int = 110, colours: int = 128, limit: int = 1_000_000,
) -> FrameSlider:
    """Precomputed pictures under a slider that works on a page, in JupyterLab and without a network.

    `frames`: Figures of one size, or PNGs as bytes. `labels` and `alts`, one a frame: what is written beside
    the slider, and what a screen reader says of the picture. `title` names the slider. Arrow keys, Home,
    End, Page Up and Page Down, dragging and the two buttons move it; without JavaScript the frame at
    `start` and a note are shown. Each picture keeps `colours` colours; figures are drawn at `dpi`, or
    fewer (down to 60) when the whole would pass `limit` bytes. Raises ValueError when it still does.
    """
    frames, labels, alts = list(frames), [str(text) for text in labels], [str(text) for text in alts]
    if len(frames) < 2 or not len(frames) == len(labels) == len(alts):
        raise ValueError(f"frame_slider needs two frames or more, with a label and an alt text each; got "
                         f"{len(frames)} frames, {len(labels)} labels, {len(alts)} alt texts")
    if not all(text.strip() for text in [*labels, *alts, title]):
        raise ValueError("frame_slider needs a title, and labels and alt texts that are not empty")
    if not 0 <= start < len(frames):
        raise ValueError(f"frame_slider starts at one of its {len(frames)} frames; got start={start}")
    while True:
        pictures = [_png(frame, dpi, colours) for frame in frames]
        sizes = {size for _, size in pictures}
        total = sum(len(data) for data, _ in pictures)
        if total <= limit or dpi <= 60 or isinstance(frames[0], bytes):
            break
        dpi = max(60, int(dpi * 0.85))
    if len(sizes) > 1:
        raise ValueError(f"frame_slider needs frames of one size; got {sorted(sizes)} pixels")
    if total > limit:
        raise ValueError(f"the slider {title!r} holds {total:,} bytes, over its limit of {limit:,}: "
                         "use fewer frames or fewer colours")
    page = _slider_page([data for data, _ in pictures], labels, alts, title, start, *sizes)
    return FrameSlider(page, labels)


def _png(frame, dpi, colours):
    """(base64 text, (width, height)) of a Figure or of PNG bytes, in so many colours and with no metadata."""
    from PIL import Image

    if not isinstance(frame, bytes):
        buffer = io.BytesIO()
        frame.savefig(buffer, format="png", dpi=dpi, metadata={"Software": None})
        frame = buffer.getvalue()
    image = Image.open(io.BytesIO(frame)).convert("RGB").quantize(colours, dither=Image.Dither.NONE)
    buffer = io.BytesIO()
    image.save(buffer, format="png", optimize=True)
    return base64.b64encode(buffer.getvalue()).decode(), image.size


# The slider's parts are hidden until the script runs; the script serves every copy of its slider on the
# page (JupyterLab may show one output twice). JupyterLab takes the arrow keys for itself, so
# keydown is handled here and goes no further.
_PAGE = """<div class="frame-slider $id" style="max-width:$widthpx;margin:.5em 0">
<img src="data:image/png;base64,$first" alt="$alt" width="$width" height="$height"
 style="max-width:100%;height:auto">
<div class="frame-controls" role="group" aria-label="$title"
 style="display:none;flex-wrap:wrap;align-items:center;gap:.5em">
<button type="button" aria-label="previous frame" style="$button">&#8249;</button>
<input type="range" min="0" max="$last" step="1" value="$start" aria-label="$title" aria-valuetext="$label"
 style="flex:1 1 9em;min-width:0;height:44px">
<button type="button" aria-label="next frame" style="$button">&#8250;</button>
<span class="frame-label" aria-hidden="true" style="min-width:$letters;text-align:right">$label</span>
</div>
<p class="frame-note"><em>$title: $label, one of $count frames. The slider that shows the others needs
JavaScript (in a notebook, a trusted one).</em></p>
</div>
<script>
(() => {
const frames = $frames, labels = $labels, alts = $alts;
for (const root of document.querySelectorAll(".$id:not([data-ready])")) {
  root.dataset.ready = "yes";
  const image = root.querySelector("img"), range = root.querySelector("input");
  const text = root.querySelector(".frame-label"), [back, on] = root.querySelectorAll("button");
  const first = image.src;
  const show = (wanted) => {
    const k = Math.max(0, Math.min(labels.length - 1, wanted));
    range.value = k;
    range.setAttribute("aria-valuetext", labels[k]);
    text.textContent = labels[k];
    image.alt = alts[k];
    image.src = frames[k] ? "data:image/png;base64," + frames[k] : first;
  };
  const steps = {ArrowRight: 1, ArrowUp: 1, ArrowLeft: -1, ArrowDown: -1, PageUp: $page, PageDown: -$page,
                 Home: -Infinity, End: Infinity};
  range.addEventListener("input", () => show(+range.value));
  range.addEventListener("keydown", (event) => {
    if (!(event.key in steps) || event.ctrlKey || event.metaKey || event.altKey) return;
    event.preventDefault();
    event.stopPropagation();
    show(+range.value + steps[event.key]);
  });
  back.addEventListener("click", () => show(+range.value - 1));
  on.addEventListener("click", () => show(+range.value + 1));
  root.querySelector(".frame-controls").style.display = "flex";
  root.querySelector(".frame-note").style.display = "none";
  show($start);
}
})();
</script>"""
_BUTTON = ("width:44px;height:44px;font:inherit;color:inherit;background:transparent;"
           "border:1px solid currentColor;border-radius:.4em;cursor:pointer")


def _slider_page(pictures, labels, alts, title, start, size):
    """The slider's HTML. Its id is a hash of all that it shows: the same content gives the same bytes."""
    shown = json.dumps([pictures, labels, alts, title, start])
    later = [None if k == start else data for k, data in enumerate(pictures)]  # start: in the image

    def script(value):  # nothing in a string may end the script element
        return json.dumps(value, ensure_ascii=False).replace("<", "\\u003c")

    return string.Template(_PAGE.replace("$widthpx", "${width}px")).substitute(
        id="slider-" + hashlib.sha256(shown.encode()).hexdigest()[:12],
        first=pictures[start], alt=html.escape(alts[start]), label=html.escape(labels[start]),
        title=html.escape(title), width=size[0], height=size[1], start=start, last=len(labels) - 1,
        count=len(labels), page=max(1, len(labels) // 4), letters=f"{max(map(len, labels)) * 0.62:.1f}em",
        button=_BUTTON, frames=script(later), labels=script(labels), alts=script(alts),
    )
