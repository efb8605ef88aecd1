"""Training: a run cut off anywhere goes on as if nothing had happened."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace

import numpy as np
import pytest
import torch

from helpers import shapes, train, zoo

TINY = replace(train.RESNET, cycles=(96, 64), batch=16, report=64, warmup=32, distinct=40)


@pytest.fixture(autouse=True)
def few_images(monkeypatch):
    monkeypatch.setattr(train, "LOOK_AT", 32)
    monkeypatch.setattr(train, "JUDGE_ON", 32)


def run(folder, name="tiny", recipe=TINY, **options):
    return train.train(name, recipe, weights=folder, cache=folder / "cache", progress=False, **options)


def test_a_run_resumed_in_the_middle_ends_bit_for_bit_the_same(tmp_path, monkeypatch):
    whole = run(tmp_path / "a")
    step, calls = train._step, iter(range(100))

    def dies(*arguments):
        if next(calls) == 7:
            raise KeyboardInterrupt
        return step(*arguments)

    monkeypatch.setattr(train, "_step", dies)
    clock = iter(range(0, 10**6, 61))
    monkeypatch.setattr(train.time, "monotonic", lambda: next(clock))  # so it saves at every step
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path / "b")
    monkeypatch.setattr(train, "_step", step)
    again = run(tmp_path / "b", resume=True)
    a, b = whole.model.state_dict(), again.model.state_dict()
    assert all(torch.equal(a[k], b[k]) for k in a)
    assert whole.history == again.history
    files = [(tmp_path / f / "tiny.safetensors").read_bytes() for f in "ab"]
    assert files[0] == files[1]


def test_twenty_interruptions_change_no_bit(tmp_path, monkeypatch):
    recipe = replace(TINY, cycles=(160,), batch=4, warmup=16)  # 40 steps
    whole = run(tmp_path / "a", recipe=recipe)
    chance, step, died = np.random.default_rng(20), train._step, []

    def may_die(*arguments):
        if len(died) < 20 and chance.random() < 0.5:
            died.append(arguments)
            raise KeyboardInterrupt
        return step(*arguments)

    clock = np.cumsum(chance.choice([1, 61], 10**4)).tolist()  # so it saves at about every second step
    monkeypatch.setattr(train.time, "monotonic", iter(clock).__next__)
    monkeypatch.setattr(train, "_step", may_die)
    again = None
    while again is None:
        with contextlib.suppress(KeyboardInterrupt):
            again = run(tmp_path / "b", recipe=recipe, resume=True)
    a, b = whole.model.state_dict(), again.model.state_dict()
    assert len(died) == 20 and all(torch.equal(a[k], b[k]) for k in a)


def test_a_process_killed_without_warning_leaves_only_whole_files(tmp_path):
    code = (
        "import torch; torch.set_num_threads(1)\n"
        "from dataclasses import replace; from pathlib import Path; from helpers import train\n"
        "train.LOOK_AT = 32; clock = iter(range(0, 10**9, 61)); train.time.monotonic = lambda: next(clock)\n"
        f"train.train('killed', replace(train.RESNET, batch=4), weights=Path({str(tmp_path)!r}), "
        f"cache=Path({str(tmp_path)!r}), progress=False)"
    )
    process = subprocess.Popen([sys.executable, "-c", code], env={**os.environ, "OMP_NUM_THREADS": "1"})
    saved, give_up = tmp_path / "killed.safetensors", time.monotonic() + 300
    while not saved.exists() and time.monotonic() < give_up and process.poll() is None:
        time.sleep(0.2)
    time.sleep(0.5)
    process.send_signal(signal.SIGKILL)
    process.wait()
    back = train.Run.start(replace(train.RESNET, batch=4), "cpu")
    back.restore(saved)
    assert back.images > 0 and back.images % 4 == 0


def test_a_saved_run_is_never_overwritten_unasked(tmp_path):
    run(tmp_path, recipe=replace(TINY, cycles=(32,)))
    with pytest.raises(ValueError, match="--resume"):
        run(tmp_path)


def test_every_cycle_writes_a_checkpoint_and_a_card_that_zoo_reads(tmp_path, monkeypatch):
    run(tmp_path)
    monkeypatch.setattr(zoo, "WEIGHTS", tmp_path)
    cards = {card.name: card for card in zoo.cards()}
    assert cards["tiny"].images == 160 and cards["tiny"].distinct == 40
    low, high = cards["tiny"].accuracy["shape"][1:]
    assert 0 <= low < high <= 1
    assert not zoo.load("tiny").training
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".")]  # nothing half written


def test_a_run_can_go_on_from_a_checkpoint():
    recipe = train.RECIPES["vit-long"]
    first, began = train.Run.start(recipe, "cpu").model.state_dict(), zoo.load("vit").state_dict()
    assert recipe.seed not in {train.RECIPES[name].seed for name in ("vit", "vit-b")}  # other images than theirs
    assert all(torch.equal(first[name], tensor) for name, tensor in began.items())


def test_repeated_images_are_each_seen_once_a_pass():
    bank = shapes.draw(40, (TINY.seed, 2))
    seen = torch.cat([train._batch(TINY, bank, start).images for start in range(0, 80, 16)])
    for one_pass in (seen[:40], seen[40:80]):
        same = (one_pass.flatten(1)[:, None] == bank.images.flatten(1)[None]).all(-1)  # (40, 40)
        assert (same.sum(0) == 1).all() and (same.sum(1) == 1).all()
    assert not torch.equal(seen[:40], seen[40:80])  # in another order


def test_fresh_images_never_repeat_and_never_meet_the_held_out_ones():
    fresh = replace(TINY, distinct=None)
    batches = [train._batch(fresh, None, start).images for start in (0, 16, 32)]
    batches += [shapes.draw(16, seed).images for seed in (train.HELD_OUT, train.HELD_OUT + 1, 0)]
    images = torch.cat(batches).flatten(1)
    assert len(torch.unique(images, dim=0)) == len(images)


def test_the_rate_warms_up_falls_and_starts_again():
    rates = np.array([train.rate(TINY, images) for images in range(0, 160, 16)])
    assert rates[0] < rates[1] and (np.diff(rates[2:6]) < 0).all()  # first cycle: images 0 to 95
    assert rates[6] > rates[5] and (np.diff(rates[7:]) < 0).all()
    assert rates.max() <= TINY.rate


def test_positions_norms_and_biases_are_not_decayed():
    optimiser = train.Run.start(train.VIT, "cpu").optimiser
    decayed, plain = optimiser.param_groups
    assert decayed["weight_decay"] > 0 == plain["weight_decay"]
    assert all(p.ndim >= 2 for p in decayed["params"])
    assert zoo.build("vit").pos_embed.shape in {p.shape for p in plain["params"]}


@pytest.mark.parametrize("name", train.RECIPES)
def test_every_recipe_builds_and_goes_through_json(name):
    recipe = train.RECIPES[name]
    model = zoo.build(**json.loads(json.dumps(recipe.model)))
    assert model(shapes.draw(2).images).shape == (2, zoo.OUTPUTS)
    assert 0.4e6 < sum(p.numel() for p in model.parameters()) < 1.5e6


def test_an_unknown_recipe_is_refused(capsys):
    with pytest.raises(SystemExit):
        train.main(["vti"])
    assert "vit-gap" in capsys.readouterr().err


def test_wilson_interval_matches_its_definition():
    share, low, high = train._wilson(90, 100)
    for end in (low, high):  # the ends solve |share - p| = z sqrt(p (1 - p) / n)
        assert abs(abs(share - end) - 1.96 * (end * (1 - end) / 100) ** 0.5) < 1e-3
