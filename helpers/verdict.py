"""A verdict: one measured claim with its interval, saved as JSON and shown as a sentence.

A chapter writes its rule down, measures, lets `decide` apply the rule, and hands the numbers to
`verdict`; the last chapter reads them all with `load_results`.
"""

from __future__ import annotations

import difflib
import html
import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from .files import write_whole

FINDINGS: tuple[str, ...] = (  # in the order of the chapters
    "uniform-vit", "grid-resnet", "cross-model", "attention-distance", "local-heads-need-data",
    "local-heads-match-resnet", "receptive-field", "norm-ratio-transition", "skip-removal",
    "localization", "gap-loses-location", "token-probes", "data-scale-layers", "probe-depth",
    "shape-texture-depth",
)

# what `holds` says, the badge's colour (white text on each passes 4.5:1), and its sign
_BADGES = {
    True: ("holds here", "#1a7f37", "✓"),
    False: ("does not hold here", "#9a6700", "✗"),
    None: ("undecided", "#57606a", "?"),
}
_KEYS = ("finding", "claim", "value", "interval", "holds", "paper", "n_images", "models", "rule", "control")


@dataclass(frozen=True)
class Verdict:
    """One finding as measured. Shown as a sentence in a notebook; `as_dict()` is what the file holds."""

    finding: str
    claim: str  # the sentence that was tested
    value: float
    interval: tuple[float, float]  # 95 % unless the chapter says otherwise
    holds: bool | None  # None: the interval straddles the rule's threshold
    paper: str  # what the paper found, and where
    n_images: int
    models: tuple[str, ...]
    rule: str = ""  # how `holds` follows from the numbers, as a sentence
    control: float | dict[str, float] | None = None  # the same number without what is claimed to cause it
    extra: dict = field(default_factory=dict)

    def as_dict(self) -> dict:
        own = {key: getattr(self, key) for key in _KEYS}
        return {**own, "interval": list(self.interval), "models": list(self.models), **self.extra}

    @property
    def badge(self) -> str:
        return _BADGES[self.holds][0]

    def _lines(self) -> list[tuple[str, str]]:
        """What is shown after the claim: (heading, text)."""
        low, high = self.interval
        unit = f" {self.extra['unit']}" if self.extra.get("unit") else ""
        measured = (f"{_show(self.value)}{unit}, interval {_show(low)} to {_show(high)}, "
                    f"over {self.n_images:,} images ({', '.join(self.models)})")
        control = self.control
        if isinstance(control, dict):
            control = "; ".join(f"{name} {_show(number)}" for name, number in control.items())
        elif control is not None:
            control = _show(control)
        rows = [("Measured", measured), ("Control", control), ("Rule", self.rule), ("Paper", self.paper)]
        return [(heading, text) for heading, text in rows if text]

    def __repr__(self) -> str:
        head = f"{self.finding}: {self.badge}. {self.claim}"
        return "\n".join([head, *(f"  {heading}: {text}" for heading, text in self._lines())])

    def _repr_html_(self) -> str:
        _, colour, sign = _BADGES[self.holds]
        rows = "".join(f"<br><b>{heading}:</b> {html.escape(text)}" for heading, text in self._lines())
        return (
            f'<div style="border-left:4px solid {colour};padding:.4em .8em;margin:.5em 0">'
            f'<span style="background:{colour};color:#fff;border-radius:.6em;padding:.1em .6em;'
            f'font-weight:600"><span aria-hidden="true">{sign}</span> {self.badge}</span> '
            f"<b>{html.escape(self.claim)}</b>{rows}</div>"
        )

    def _repr_markdown_(self) -> str:
        rows = "".join(f"  \n**{heading}:** {text}" for heading, text in self._lines())
        return f"**{_BADGES[self.holds][2]} {self.badge}:** {self.claim}{rows}"


def verdict(
    finding: str,
    claim: str,
    value: float,
    interval: Sequence[float],
    holds: bool | None,
    paper: str,
    n_images: int,
    models: Sequence[str] | str,
    *,
    rule: str = "",
    control: float | dict[str, float] | None = None,
    folder: str | Path | None = None,
    save: bool = True,
    **extra,
) -> Verdict:
    """State one finding: check the numbers, save them as `<finding>.json`, return what shows the sentence.

    `value` lies inside `interval` (low, high); `holds` is what the chapter's rule gave (see `decide`);
    `control` is one number or a few named ones; `extra` may hold anything JSON can (`unit="px"` is shown).
    `folder` is where the file goes (default: `results_folder()`); with `save=False` nothing is written
    and the finding may have any name. Numbers are kept to four significant digits, beyond which the
    order of additions on another processor shows. Raises ValueError for numbers that contradict
    each other and for a finding that the course does not have.
    """
    if save and finding not in FINDINGS:
        near = difflib.get_close_matches(str(finding), FINDINGS, n=3, cutoff=0.3) or FINDINGS
        raise ValueError(f"no finding is called {finding!r}; the nearest: {', '.join(near)}")
    made = _checked(dict(
        finding=finding, claim=claim, value=value, interval=interval, holds=holds, paper=paper,
        n_images=n_images, models=[models] if isinstance(models, str) else models,
        rule=rule, control=control, **extra,
    ))
    if save:
        target = Path(folder) if folder is not None else results_folder()
        text = json.dumps(made.as_dict(), indent=1, sort_keys=True) + "\n"
        write_whole(target / f"{finding}.json", text)
    return made


def decide(
    interval: Sequence[float], *, above: float | None = None, below: float | None = None
) -> bool | None:
    """True when the whole interval lies `above` (or `below`) the threshold, False when all of it lies
    on the other side, None when it straddles it: the numbers cannot tell."""
    if (above is None) == (below is None):
        raise ValueError(f"decide needs one threshold, above or below; got above={above}, below={below}")
    low, high = (float(end) for end in interval)
    if not low <= high:
        raise ValueError(f"an interval is (low, high) with low <= high; got ({low}, {high})")
    if above is not None:
        return True if low > above else False if high <= above else None
    return True if high < below else False if low >= below else None


def every(*decisions: bool | None) -> bool | None:
    """What several decisions of `decide` give together: False if any fails, else None if any is open."""
    if not decisions:
        raise ValueError("every needs at least one decision")
    return False if False in decisions else None if None in decisions else True


def bootstrap(
    statistic: Callable[[np.ndarray], object],
    n: int,
    *,
    repeats: int = 1000,
    seed: int = 0,
    level: float = 0.95,
):
    """Percentile interval of `statistic` over resamplings of `n` images or batches: (low, high).

    `statistic(index)` gets `n` numbers from 0 to n-1, drawn with replacement, shape (n,) int64, and returns
    a number (then low and high are floats) or an array (then they are arrays of its shape).
    For an unbiased CKA resample *batches*: an image that is drawn twice into one Gram matrix is
    similar to itself in every layer, and the interval would sit above the value.
    """
    if n < 2:
        raise ValueError(f"bootstrap needs at least 2 images or batches to resample; got n={n}")
    if repeats < 1 or not 0 < level < 1:
        raise ValueError(f"bootstrap needs repeats >= 1 and 0 < level < 1; got {repeats} and {level}")
    rng = np.random.default_rng(seed)
    draws = np.stack([np.asarray(statistic(rng.integers(n, size=n)), np.float64) for _ in range(repeats)])
    if draws.ndim == 1 and not np.isfinite(draws).all():
        bad = int((~np.isfinite(draws)).sum())
        raise ValueError(f"the statistic was not finite in {bad} of {repeats} resamplings: "
                         "is a layer constant, or n too small?")
    low, high = np.quantile(draws, [(1 - level) / 2, (1 + level) / 2], axis=0)
    return (float(low), float(high)) if draws.ndim == 1 else (low, high)


def combine_seeds(*measured: tuple[float, Sequence[float]]) -> tuple[float, tuple[float, float]]:
    """One (value, interval) from one of each seed: the mean, and the interval that covers them all.

    Two seeds are too few to estimate a spread from, so the interval is not narrowed by averaging.
    """
    if not measured:
        raise ValueError("combine_seeds needs at least one (value, (low, high))")
    values, intervals = zip(*measured, strict=True)
    lows, highs = zip(*intervals, strict=True)
    return float(np.mean(values)), (float(min(lows)), float(max(highs)))


def load_results(folder: str | Path | None = None) -> dict[str, Verdict]:
    """All verdicts of a folder (default: `results_folder()`), by finding, in the order of the chapters.

    A finding without a file is left out. Raises ValueError, naming the file, for one that is not a verdict.
    """
    folder = Path(folder) if folder is not None else results_folder()
    if not folder.is_dir():
        raise ValueError(f"there is no folder {folder}: run the chapters first, they write it")
    found = {path.stem: _read(path) for path in sorted(folder.glob("*.json"))}
    return {finding: found[finding] for finding in FINDINGS if finding in found}


def load_findings(folder: str | Path | None = None) -> dict[str, Verdict | str]:
    """All findings of the course, in the order of the chapters: each one's verdict, or why there is none.

    Nothing is raised for a file that is missing or spoilt, nor for a folder that is: the reason, a sentence,
    stands in the verdict's place.
    """
    folder = Path(folder) if folder is not None else results_folder()
    found: dict[str, Verdict | str] = {}
    for finding in FINDINGS:
        path = folder / f"{finding}.json"
        try:
            found[finding] = _read(path) if path.exists() else f"there is no {path.name}: run its chapter"
        except ValueError as error:
            found[finding] = str(error)
    return found


def results_folder() -> Path:
    """`notebooks/results` of the course around the working folder, else of the one this module is part of;
    where there is neither, `results` in the working folder."""
    here = Path.cwd()
    for root in (here, *here.parents, Path(__file__).resolve().parents[1]):
        if (root / "notebooks").is_dir() and (root / "helpers").is_dir():
            return root / "notebooks" / "results"
    return here / "results"


def _read(path: Path) -> Verdict:
    fix = "delete it and run its chapter again"
    try:
        stored = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ValueError(f"{path.name} cannot be read as JSON ({error}): {fix}") from error
    missing = [key for key in _KEYS if key not in stored] if isinstance(stored, dict) else list(_KEYS)
    if missing:
        raise ValueError(f"{path.name} is no verdict, it lacks {', '.join(missing)}: {fix}")
    if stored["finding"] != path.stem or path.stem not in FINDINGS:
        raise ValueError(f"{path.name} holds {stored['finding']!r}, not a finding of that name: {fix}")
    try:
        return _checked(stored)
    except (ValueError, TypeError) as error:
        raise ValueError(f"{path.name} contradicts itself ({error}): {fix}") from error


def _checked(given: dict) -> Verdict:
    """A Verdict from plain values, numbers rounded; ValueError when they cannot all be true."""
    given = {key: _plain(value, key) for key, value in given.items()}
    name, value, ends, holds = (given[key] for key in ("finding", "value", "interval", "holds"))
    if not isinstance(ends, list) or len(ends) != 2 or not all(_is_number(end) for end in ends):
        raise ValueError(f"{name}: the interval must be two numbers (low, high); got {ends!r}")
    if not _is_number(value):
        raise ValueError(f"{name}: the value must be a number; got {value!r}")
    if not ends[0] <= value <= ends[1]:
        raise ValueError(f"{name}: the value {value} is outside its interval {ends[0]} to {ends[1]}: "
                         "was the interval resampled from another statistic, or a biased one?")
    if holds is not None and not isinstance(holds, bool):
        raise ValueError(f"{name}: holds is True, False or None (undecided); got {holds!r}")
    count = given["n_images"]
    if not _is_number(count) or count != int(count) or count < 1:
        raise ValueError(f"{name}: n_images must be a whole number, at least 1; got {count!r}")
    for key in ("claim", "paper"):
        if not isinstance(given[key], str) or not given[key].strip():
            raise ValueError(f"{name}: {key} must be a sentence; got {given[key]!r}")
    if not isinstance(given["rule"], str):
        raise ValueError(f"{name}: rule must be a sentence; got {given['rule']!r}")
    control = given["control"]
    controls = control.values() if isinstance(control, dict) else [] if control is None else [control]
    if not all(map(_is_number, controls)):
        raise ValueError(f"{name}: control must be a number, or numbers by name; got {control!r}")
    models = given["models"]
    if not isinstance(models, list) or not models or not all(isinstance(model, str) for model in models):
        raise ValueError(f"{name}: models must name at least one model; got {models!r}")
    extra = {key: value for key, value in given.items() if key not in _KEYS}
    own = {key: given[key] for key in _KEYS}
    own |= {"interval": tuple(ends), "models": tuple(models), "n_images": int(count)}
    return Verdict(**own, extra=extra)


def _plain(value, key):
    """What JSON can hold, from Python, numpy or torch values; floats finite, to four significant digits."""
    if hasattr(value, "tolist"):
        value = value.tolist()
    if isinstance(value, dict):
        return {str(name): _plain(item, key) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item, key) for item in value]
    if isinstance(value, float):
        if not math.isfinite(value):
            raise ValueError(f"{key} is {value}: is a layer constant, or a count zero?")
        return float(f"{value:.4g}")
    if value is None or isinstance(value, (bool, int, str)):
        return value
    kind = type(value).__name__
    raise ValueError(f"{key} must be numbers, text, lists or dictionaries of them; got {kind}")


def _is_number(value) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _show(number: float) -> str:
    """Three significant digits, never in powers of ten for everyday sizes."""
    text = f"{number:.3g}"
    return f"{number:,.0f}" if "e+" in text else text.replace("-", "\N{MINUS SIGN}", 1)
