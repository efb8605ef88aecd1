"""Verdicts: what is written, what is shown, what is refused."""

import json
import os
import subprocess
import sys

import numpy as np
import pytest
import torch

from helpers import verdict as v

GOOD = dict(
    finding="uniform-vit", claim="The ViT is more uniform than the ResNet.", value=0.81234567,
    interval=(0.79, 0.83), holds=True, paper="Figure 1: uniform.", n_images=2000, models=["vit", "vit-b"],
)


def say(folder, **changes):
    return v.verdict(**{**GOOD, **changes}, folder=folder)


def test_file_holds_every_key_and_is_byte_stable(tmp_path):
    say(tmp_path, rule="the interval lies above 0.5", control={"untrained": np.float32(0.5)}, unit="px")
    first = (tmp_path / "uniform-vit.json").read_bytes()
    stored = json.loads(first)
    assert stored == {
        "finding": "uniform-vit", "claim": GOOD["claim"], "value": 0.8123, "interval": [0.79, 0.83],
        "holds": True, "paper": GOOD["paper"], "n_images": 2000, "models": ["vit", "vit-b"],
        "rule": "the interval lies above 0.5", "control": {"untrained": 0.5}, "unit": "px",
    }
    assert list(stored) == sorted(stored)
    # a difference in the seventh digit, as another processor makes, leaves the file as it is
    say(tmp_path, rule="the interval lies above 0.5", control={"untrained": 0.5000001}, unit="px",
        value=0.81234599)
    assert (tmp_path / "uniform-vit.json").read_bytes() == first
    assert os.listdir(tmp_path) == ["uniform-vit.json"]  # no half-written file left behind


def test_torch_and_numpy_numbers_are_taken(tmp_path):
    made = say(tmp_path, value=torch.tensor(0.8), interval=torch.tensor([0.7, 0.9]), holds=np.bool_(False),
               n_images=np.int64(12), curve=np.linspace(0, 1, 3))
    assert made.holds is False and made.n_images == 12 and made.extra["curve"] == [0.0, 0.5, 1.0]
    assert v.load_results(tmp_path)["uniform-vit"] == made


@pytest.mark.parametrize("changes, words", [
    (dict(value=0.9), "outside its interval"),
    (dict(interval=(0.83, 0.79)), "outside its interval"),
    (dict(value=float("nan")), "value is nan"),
    (dict(interval=(0.7, float("inf"))), "interval is inf"),
    (dict(interval=(0.7,)), "two numbers"),
    (dict(holds="yes"), "True, False or None"),
    (dict(holds=1), "True, False or None"),
    (dict(n_images=0), "n_images"),
    (dict(n_images=2.5), "n_images"),
    (dict(models=[]), "at least one model"),
    (dict(claim=" "), "claim must be a sentence"),
    (dict(paper=None), "paper must be a sentence"),
    (dict(control=float("nan")), "control is nan"),
    (dict(picture=object()), "picture must be"),
    (dict(finding="uniform-vitt"), "nearest: uniform-vit"),
    (dict(finding="../uniform-vit"), "no finding is called"),
])
def test_what_contradicts_itself_is_refused_and_not_written(tmp_path, changes, words):
    with pytest.raises(ValueError, match=words):
        say(tmp_path, **changes)
    assert not list(tmp_path.iterdir())


def test_a_failed_write_leaves_the_old_file_whole(tmp_path, monkeypatch):
    say(tmp_path)
    before = (tmp_path / "uniform-vit.json").read_bytes()

    def full(*_):
        raise OSError("No space left on device")

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(OSError, match="No space"):
        say(tmp_path, holds=False)
    assert (tmp_path / "uniform-vit.json").read_bytes() == before
    assert os.listdir(tmp_path) == ["uniform-vit.json"]


@pytest.mark.parametrize("holds, words", [
    (True, "holds here"), (False, "does not hold here"), (None, "undecided"),
])
def test_the_badge_is_said_in_words_everywhere(tmp_path, holds, words):
    made = say(tmp_path, holds=holds, claim="<b>a & b</b>", control=0.5)
    assert words in repr(made) and words in made._repr_html_() and words in made._repr_markdown_()
    assert "&lt;b&gt;a &amp; b" in made._repr_html_()  # text stays text
    assert "0.812, interval 0.79 to 0.83, over 2,000 images (vit, vit-b)" in repr(made)
    assert "0x" not in repr(made)


def test_badges_have_contrast_with_their_white_text():
    def luminance(colour):
        parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
        linear = [p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    for _, colour, _ in v._BADGES.values():
        assert 1.05 / (luminance(colour) + 0.05) >= 4.5, colour


def test_unsaved_verdicts_may_have_any_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert "my-own" in repr(v.verdict(**{**GOOD, "finding": "my-own"}, save=False))
    assert not list(tmp_path.iterdir())


def test_results_go_to_the_course_around_the_working_folder(tmp_path, monkeypatch):
    for part in ("helpers", "notebooks/assignments"):
        (tmp_path / part).mkdir(parents=True)
    for here in (tmp_path, tmp_path / "notebooks", tmp_path / "notebooks" / "assignments"):
        monkeypatch.chdir(here)
        assert v.results_folder() == tmp_path / "notebooks" / "results"


def test_every():
    assert v.every(True, True) is True
    assert v.every(True, None) is None
    assert v.every(True, None, False) is False
    with pytest.raises(ValueError, match="at least one"):
        v.every()


def test_decide():
    assert v.decide((0.2, 0.3), above=0.1) is True
    assert v.decide((0.2, 0.3), above=0.3) is False
    assert v.decide((0.2, 0.3), above=0.25) is None
    assert v.decide((0.2, 0.3), below=0.4) is True
    assert v.decide((0.2, 0.3), below=0.2) is False
    assert v.decide((0.2, 0.3), below=0.25) is None
    for wrong in ({}, dict(above=0, below=1)):
        with pytest.raises(ValueError, match="one threshold"):
            v.decide((0, 1), **wrong)
    with pytest.raises(ValueError, match="low <= high"):
        v.decide((0.3, 0.2), above=0)
    with pytest.raises(ValueError, match="low <= high"):
        v.decide((float("nan"), 0.2), above=0)


def test_bootstrap_of_a_mean_is_the_normal_interval():
    sample = np.random.default_rng(1).standard_normal(400)
    low, high = v.bootstrap(lambda index: sample[index].mean(), 400, repeats=4000)
    half = 1.96 * sample.std() / 20
    assert low == pytest.approx(sample.mean() - half, abs=0.01)
    assert high == pytest.approx(sample.mean() + half, abs=0.01)
    assert isinstance(low, float)
    assert (low, high) == v.bootstrap(lambda index: sample[index].mean(), 400, repeats=4000)  # seeded
    assert (low, high) != v.bootstrap(lambda index: sample[index].mean(), 400, repeats=4000, seed=1)
    narrow = v.bootstrap(lambda index: sample[index].mean(), 400, repeats=4000, level=0.5)
    assert low < narrow[0] < narrow[1] < high


def test_bootstrap_of_a_curve_and_of_tensors():
    sample = torch.rand(50, 3, generator=torch.Generator().manual_seed(0))
    low, high = v.bootstrap(lambda index: sample[index].mean(0), 50, repeats=50)
    assert low.shape == high.shape == (3,)
    assert (low < high).all()


@pytest.mark.parametrize("call, words", [
    (lambda: v.bootstrap(lambda index: 0.0, 1), "at least 2"),
    (lambda: v.bootstrap(lambda index: 0.0, 5, repeats=0), "repeats"),
    (lambda: v.bootstrap(lambda index: 0.0, 5, level=95), "level"),
    (lambda: v.bootstrap(lambda index: float("nan"), 5, repeats=7), "7 of 7"),
    (lambda: v.combine_seeds(), "at least one"),
])
def test_bootstrap_refuses(call, words):
    with pytest.raises(ValueError, match=words):
        call()


def test_two_seeds_make_one_interval_that_covers_both():
    assert v.combine_seeds((0.2, (0.1, 0.3)), (0.4, (0.35, 0.5))) == (pytest.approx(0.3), (0.1, 0.5))


def test_results_come_back_in_the_order_of_the_chapters(tmp_path):
    for finding in reversed(v.FINDINGS):
        say(tmp_path, finding=finding)
    assert tuple(v.load_results(tmp_path)) == v.FINDINGS


def change(**changes):
    return lambda text: json.dumps({**json.loads(text), **changes})


@pytest.mark.parametrize("spoil, words", [
    (lambda text: text[: len(text) // 2], "cannot be read as JSON"),
    (lambda text: "", "cannot be read as JSON"),
    (lambda text: "[1, 2]", "no verdict, it lacks"),
    (lambda text: "{}", "it lacks finding, claim"),
    (change(value=7.0), "contradicts itself"),
    (change(value="high"), "contradicts itself"),
    (change(interval=None), "contradicts itself"),
    (change(holds="maybe"), "contradicts itself"),
    (change(rule=3), "rule must be a sentence"),
    (change(control="high"), "control must be a number"),
    (change(control={"untrained": None}), "control must be a number"),
    (change(n_images="many"), "n_images must be a whole number"),
    (lambda text: text.replace('"claim": "', '"claim": NaN, "was": "'), "claim is nan"),
    (change(finding="grid-resnet"), "not a finding of that name"),
])
def test_malformed_files_are_named(tmp_path, spoil, words):
    say(tmp_path)
    path = tmp_path / "uniform-vit.json"
    path.write_text(spoil(path.read_text()))
    with pytest.raises(ValueError, match=words) as caught:
        v.load_results(tmp_path)
    assert "uniform-vit.json" in str(caught.value) and "run its chapter again" in str(caught.value)


def test_missing_folder_and_missing_findings(tmp_path):
    with pytest.raises(ValueError, match="run the chapters first"):
        v.load_results(tmp_path / "nowhere")
    assert v.load_results(tmp_path) == {}


def test_every_finding_has_its_verdict_or_the_reason_why_there_is_none(tmp_path):
    say(tmp_path)
    (tmp_path / "grid-resnet.json").write_text("")
    (tmp_path / "cross-model.json").mkdir()
    found = v.load_findings(tmp_path)
    assert tuple(found) == v.FINDINGS
    assert isinstance(found["uniform-vit"], v.Verdict)
    assert "grid-resnet.json cannot be read as JSON" in found["grid-resnet"]
    assert "cross-model.json cannot be read" in found["cross-model"]
    assert all("run its chapter" in found[finding] for finding in v.FINDINGS[3:])
    assert all("run its chapter" in reason for reason in v.load_findings(tmp_path / "nowhere").values())


def test_a_verdict_needs_no_torch_and_no_matplotlib():
    code = "import sys, helpers.verdict; print(sorted({'torch', 'matplotlib'} & set(sys.modules)))"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ran.stdout.strip() == "[]"
