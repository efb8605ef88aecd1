"""The page of `make bench`: what it says of given numbers. The measurements themselves are not tests."""

import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parent / "bench"))
import page  # noqa: E402

SETTINGS = {"images": 8, "batch": 4, "repeats": 2, "processor": "a processor", "python": "3", "torch": "2", "timm": "1"}
RUN = {"bare": [2.0, 2.0], "own": [2.0, 3.0], "peak": 1.5, "inside": 0.04, "estimator": "minibatch unbiased", "values": [[0.5, 0.25]]}
RESULTS = {
    "settings": SETTINGS,
    "reference": {"all": {"minibatch unbiased": [[0.5, 0.26]]}},
    "cka": {
        "bare passes": RUN | {"own": [2.0, 2.0], "peak": 1.0, "values": None},
        "helpers, block, unbiased": RUN,
        "other": RUN | {"values": [[float("nan"), 0.25]]},
        "absent": {"missing": "not installed here: No module named 'absent'"},
    },
    "accuracy": {"vit": {f"{mode} {kind}": 2e-3 for mode in ("exact", "fast") for kind in ("unbiased", "biased")}},
}


@pytest.fixture
def written(tmp_path, monkeypatch):
    monkeypatch.setattr(page, "PAGE", tmp_path / "page.md")
    monkeypatch.setattr(page, "FIGURE", tmp_path / "figure.svg")
    page.write(RESULTS)
    return page.PAGE.read_text()


def test_the_page_says_cost_memory_and_error(written):
    assert "| helpers, block, unbiased | 1.25 (1.00 to 1.50) | 0.020 | 0.50 | 0.01 |" in written
    assert "| absent |  |  |  | not installed here" in written
    assert page.error(RESULTS["cka"]["other"], RESULTS["reference"]["all"]) == float("inf")
    assert "more than 0.001" in written and "helpers, block, unbiased 1.25 with an error of 1e-02" in written
    assert page.FIGURE.stat().st_size > 1000 and "{" not in written.replace("```{image}", "")


def test_a_part_that_was_not_measured_is_left_empty(tmp_path, monkeypatch):
    monkeypatch.setattr(page, "PAGE", tmp_path / "page.md")
    page.write({"settings": SETTINGS})
    assert "Not measured in this run." in page.PAGE.read_text()
