"""What goes wrong outside the course: full and read-only disks, kills in a write, damaged files, odd networks."""

import ast
import errno
import os
import pickle
import platform
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import nbformat
import numpy as np
import pytest
import timm
import torch
from safetensors.torch import save_file
from torch import nn

import helpers.record
from helpers import attention, cka, giants, location, receptive, report, shapes, skips, verdict, zoo
from helpers.files import write_whole

ROOT = Path(helpers.record.__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "book" / "tools"))
import notebooks as tool  # noqa: E402

IMAGES = shapes.draw(64, seed=77).images


# --- features and batches -------------------------------------------------------------------------


def test_a_container_and_its_child_are_two_layers():
    model = nn.Sequential(nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(inplace=True)), nn.Conv2d(4, 5, 3))
    x = IMAGES[:8]
    both = helpers.record.record(model, x, ["0", "0.0", "0.1"])
    with torch.no_grad():
        conv = model[0][0](x)
    for name, value in {"0": conv.relu(), "0.0": conv, "0.1": conv.relu()}.items():
        torch.testing.assert_close(both[name], value.flatten(1))
    result = cka.compare(model, model, x, ["0", "0.0"], ["0", "0.0"])
    assert result.values.diagonal().sub(1).abs().max() < 1e-6 and result.values[0, 1] < 1


MEASURES = {
    "compare": lambda x: cka.compare(zoo.load("vit"), zoo.load("vit"), x),
    "mean_distance": lambda x: attention.mean_distance(zoo.load("vit"), x),
    "norm_ratios": lambda x: skips.norm_ratios(zoo.load("vit"), x),
    "localise": lambda x: location.localise(zoo.load("vit"), x, "blocks.1"),
    "field": lambda x: receptive.field(zoo.load("vit"), x, "blocks.1"),
}


@pytest.mark.parametrize("measure", MEASURES)
def test_every_measure_checks_its_images(measure):
    x, spoilt = IMAGES[:4], IMAGES[:4].clone()
    spoilt[1, 0, 3, 3] = float("nan")
    for bad, words in ((spoilt, "1 of 4 images hold NaN"), (x[:0], "n ≥ 1"), ((x * 255).byte(), "uint8"),
                       (x[:, :1], "needs")):
        with pytest.raises(ValueError, match=words):
            MEASURES[measure](bad)
    with pytest.warns(UserWarning, match="0-255"):
        MEASURES[measure](x * 255)


WRAPPED = {
    "compiled": lambda model: torch.compile(model, backend="eager"),
    "compiled and run": lambda model: run_once(torch.compile(model, backend="eager")),
    "in DataParallel": nn.DataParallel,
    "in train mode": lambda model: model.train(),
}


def run_once(model):
    model(IMAGES[:4])
    return model


@pytest.mark.parametrize("kind", WRAPPED)
@pytest.mark.parametrize("measure", ["mean_distance", "norm_ratios", "localise", "field"])
def test_every_measure_takes_wrapped_models_and_leaves_their_mode(monkeypatch, measure, kind):
    plain = numbers_of(MEASURES[measure](IMAGES[:4]))
    model = WRAPPED[kind](zoo.load("vit"))
    modes = [module.training for module in model.modules()]
    monkeypatch.setattr(zoo, "load", lambda name: model)
    assert torch.equal(numbers_of(MEASURES[measure](IMAGES[:4])), plain)
    assert [module.training for module in model.modules()] == modes


def numbers_of(found):
    return next(value for value in (found, *(getattr(found, name, None) for name in ("patches", "maps")))
                if isinstance(value, torch.Tensor))


def test_images_follow_the_model_to_another_device():
    with torch.device("meta"):  # a device that every machine has; it computes shapes alone
        model = nn.Sequential(nn.Conv2d(3, 4, 3))
    kept = helpers.record.observe(model, IMAGES[:8], ["0"])["0"]
    assert kept.device.type == "meta" and len(kept) == 8 and IMAGES.device.type == "cpu"


# --- files ----------------------------------------------------------------------------------------

TENTHS = [0.0, 0.0001, 0.01, 0.1, 0.3, 0.5, 0.7, 0.9, 0.99, 0.9999]


@pytest.fixture(scope="module")
def own(tmp_path_factory):
    """A user's own checkpoint, in both formats; it has no card, so no checksum."""
    folder = tmp_path_factory.mktemp("own")
    state = timm.create_model("test_vit").state_dict()
    save_file(state, folder / "own.safetensors")
    torch.save(state, folder / "own.pth")
    return folder


@pytest.mark.parametrize("kind", ["safetensors", "pth"])
@pytest.mark.parametrize("keep", TENTHS)
def test_a_users_own_checkpoint_cut_short_is_refused(own, tmp_path, kind, keep):
    content = (own / f"own.{kind}").read_bytes()
    (tmp_path / f"cut.{kind}").write_bytes(content[: int(len(content) * keep)])
    with pytest.raises(ValueError, match="could not be read"):
        zoo.load("test_vit", tmp_path / f"cut.{kind}")


@pytest.mark.parametrize("kind", ["safetensors", "pth"])
def test_a_users_own_checkpoint_of_another_model_is_refused(own, kind):
    with pytest.raises(ValueError, match="could not be read as weights of 'test_resnet'"):
        zoo.load("test_resnet", own / f"own.{kind}")


class Bomb:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


def test_pickles_in_stored_measurements_are_never_run(tmp_path):
    went_off = tmp_path / "went-off"
    np.savez(tmp_path / "evil.npz", facts=np.array([Bomb(went_off)], dtype=object))
    with pytest.raises(ValueError):
        giants.stored(tmp_path / "evil.npz")
    (tmp_path / "plain.npz").write_bytes(pickle.dumps(Bomb(went_off)))
    with pytest.raises(ValueError):
        giants.stored(tmp_path / "plain.npz")
    torch.save({"n": Bomb(went_off)}, tmp_path / "one-00000.pt")
    evil = (tmp_path / "one-00000.pt").read_bytes()
    assert report.stage("one", tmp_path, 1, lambda i: {}) == [{}]
    (tmp_path / "one-00000.pt").write_bytes(report._seal(tmp_path / "one-00000.pt", evil) + evil)
    with pytest.raises(pickle.UnpicklingError):  # sealed by hand
        report.stage("one", tmp_path, 1, lambda i: {})
    assert not went_off.exists()
    pickle.loads(pickle.dumps(Bomb(went_off)))
    assert went_off.exists()  # the bomb is a real one


def test_nothing_in_the_course_unpickles_or_evaluates():
    for path in [*ROOT.glob("helpers/*.py"), *ROOT.glob("book/tools/*.py")]:
        for call in (n for n in ast.walk(ast.parse(path.read_text())) if isinstance(n, ast.Call)):
            said, options = ast.unparse(call.func), {k.arg: ast.unparse(k.value) for k in call.keywords}
            assert said not in ("eval", "exec", "pickle.load", "pickle.loads", "yaml.load"), path.name
            if said == "torch.load":
                assert options.get("weights_only") == "True", path.name
            assert options.get("allow_pickle", "False") == "False", path.name


def notebook(text):
    return nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(text, id="one")])


def say(folder, size):
    return verdict.verdict(
        finding="uniform-vit", claim="x" * size, value=0.8, interval=(0.7, 0.9), holds=True, paper="Fig. 1.",
        n_images=20, models=["vit"], folder=folder)


WRITERS = {  # folder, number of bytes -> a file of about that size, by each of the course's writers
    "bytes": ("a.safetensors", lambda folder, size: write_whole(folder / "a.safetensors", bytes([size % 251]) * size)),
    "verdict": ("uniform-vit.json", say),
    "notebook": ("a.ipynb", lambda folder, size: tool.write(notebook("x" * size), folder / "a.ipynb")),
}


def mounted(folder, options):
    """A small disk of its own; the test is left out where one may not be mounted."""
    folder.mkdir()
    if shutil.which("mount") is None or subprocess.run(
            ["mount", "-t", "tmpfs", "-o", options, "tmpfs", folder], capture_output=True).returncode:
        pytest.skip("a file system may not be mounted here")
    return folder


@pytest.fixture
def disk(tmp_path):
    folder = mounted(tmp_path / "disk", "size=1m")
    yield folder
    subprocess.run(["umount", folder], check=True)


@pytest.mark.parametrize("writer", WRITERS)
def test_on_a_full_disk_the_old_file_stays_whole_and_alone(disk, writer):
    name, write = WRITERS[writer]
    write(disk, 1000)
    before = (disk / name).read_bytes()
    with pytest.raises(Exception, match="No space|os error 28|I/O"):
        write(disk, 2_000_000)
    assert (disk / name).read_bytes() == before and os.listdir(disk) == [name]


@pytest.mark.parametrize("writer", WRITERS)
def test_in_a_read_only_folder_writing_fails_and_nothing_changes(disk, writer):
    name, write = WRITERS[writer]
    write(disk, 1000)
    before = (disk / name).read_bytes()
    subprocess.run(["mount", "-o", "remount,ro", disk], check=True)
    with pytest.raises(Exception, match="Read-only|os error 30"):
        write(disk, 2000)
    assert (disk / name).read_bytes() == before and os.listdir(disk) == [name]


def small_giants():
    empty = report.Results({}, [])
    return giants.Giants(empty, empty, torch.randn(2, 3, 400_000), {"images": "none"})


def test_stored_measurements_stay_whole_on_a_full_disk(disk):
    (disk / "giants.npz").write_bytes(b"old")
    with pytest.raises(OSError, match="giants.npz could not be written .*No space.*still there"):
        giants.save(small_giants(), disk / "giants.npz")
    assert (disk / "giants.npz").read_bytes() == b"old" and os.listdir(disk) == ["giants.npz"]


@pytest.mark.parametrize("keep", TENTHS)
def test_stored_measurements_cut_short_are_refused_in_a_sentence(tmp_path, keep):
    content = (verdict.results_folder() / giants.STORED).read_bytes()
    (tmp_path / "giants.npz").write_bytes(content[: int(len(content) * keep)])
    with pytest.raises(ValueError, match="giants.npz is damaged.*restore notebooks/results.*helpers.giants"):
        giants.stored(tmp_path / "giants.npz")


@pytest.mark.parametrize("at", [0.001, 0.25, 0.5, 0.75, 0.999])
def test_one_flipped_byte_in_stored_measurements_is_noticed(tmp_path, at):
    content = bytearray((verdict.results_folder() / giants.STORED).read_bytes())
    content[int(len(content) * at)] ^= 0xFF
    (tmp_path / "giants.npz").write_bytes(content)
    with pytest.raises(ValueError, match="giants.npz is damaged"):
        giants.stored(tmp_path / "giants.npz")


@pytest.mark.parametrize("spoil", [lambda p: np.savez(p, a=np.zeros(3)), lambda p: np.save(p.open("wb"), np.zeros(3)),
                                   lambda p: np.savez(p, facts=np.array("{}")), lambda p: p.write_text("hello")])
def test_other_files_are_no_stored_measurements(tmp_path, spoil):
    spoil(tmp_path / "giants.npz")
    with pytest.raises(ValueError, match="does not hold stored measurements"):
        giants.stored(tmp_path / "giants.npz")


def no_space(self, content):
    """A disk that takes half of a file."""
    with open(self, "wb") as file:
        file.write(content[: len(content) // 2])
    raise OSError(errno.ENOSPC, "No space left on device")


def test_a_write_cut_off_in_the_middle_names_the_file_and_keeps_the_old_one(tmp_path, monkeypatch):
    (tmp_path / "a.json").write_text("old")
    monkeypatch.setattr(Path, "write_bytes", no_space)
    with pytest.raises(OSError, match="a.json could not be written in .*No space left on device.*still there"):
        write_whole(tmp_path / "a.json", "new")
    with pytest.raises(OSError, match="b.json .*nothing of it is left behind"):
        write_whole(tmp_path / "b.json", "new")
    assert os.listdir(tmp_path) == ["a.json"] and (tmp_path / "a.json").read_text() == "old"


def test_a_folder_that_cannot_be_made_is_said_in_a_sentence(tmp_path):
    """Root may write anywhere, but not below a file."""
    (tmp_path / "file").write_text("I am no folder")
    with pytest.raises(OSError, match="a.json could not be written in .*Not a directory|File exists"):
        write_whole(tmp_path / "file" / "a.json", "new")


SMALL = ["test_vit", "--random-weights", "-n", "16", "--batch", "8", "--size", "32", "--field-images", "2",
         "--field-draws", "1"]


def test_a_report_on_a_full_disk_stops_in_a_sentence_and_goes_on(tmp_path, monkeypatch, capsys):
    given, put = [*SMALL, "--out", str(tmp_path / "r.html")], Path.write_bytes

    def full_after_one(self, content):
        (no_space if len(list(tmp_path.rglob("*.pt"))) else put)(self, content)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "write_bytes", full_after_one)
        assert report.main(given) == 2
    said = capsys.readouterr().err
    assert "networks-one-pass-00001.pt could not be written" in said and "No space left on device" in said
    assert "the same command goes on" in said
    assert [file.name for file in tmp_path.rglob("*") if file.is_file()] == ["networks-one-pass-00000.pt"]
    measured, measure = [], report.measure
    monkeypatch.setattr(report, "measure", lambda *given: measured.append(1) or measure(*given))
    assert report.main(given) == 0 and len(measured) == 3  # one of the four was kept
    assert sorted(os.listdir(tmp_path)) == ["r.html", "r.json"]


def test_a_photograph_replaced_in_the_folder_is_another_run(tmp_path):
    (tmp_path / "a.png").write_bytes(b"one")
    args = report.arguments([*SMALL, "--images", str(tmp_path)])
    before = report.fingerprint(args, {}, torch.zeros(1))
    assert report.fingerprint(args, {}, torch.zeros(1)) == before
    (tmp_path / "a.png").write_bytes(b"another")
    assert report.fingerprint(args, {}, torch.zeros(1)) != before


def test_a_report_whose_folder_cannot_be_made_stops_in_a_sentence(tmp_path, capsys):
    (tmp_path / "file").write_text("I am no folder")
    assert report.main([*SMALL, "--out", str(tmp_path / "file" / "r.html")]) == 2
    assert "No report. networks-one-pass-00000.pt could not be written" in capsys.readouterr().err


def test_a_piece_on_a_full_disk_leaves_nothing_half_written(disk):
    with pytest.raises(OSError, match="one-00001.pt could not be written in .*No space"):
        report.stage("one", disk / "run", 2, lambda i: {"n": torch.zeros(10 if i == 0 else 2_000_000)})
    assert os.listdir(disk / "run") == ["one-00000.pt"]


@pytest.mark.parametrize("spoil", [
    *(lambda folder, keep=keep: cut(folder / "one-00001.pt", keep) for keep in TENTHS),
    lambda folder: flip(folder / "one-00001.pt", -200),
    lambda folder: shutil.copy(folder / "one-00000.pt", folder / "one-00001.pt"),
    lambda folder: shutil.copy(folder.parent / "other" / "one-00001.pt", folder / "one-00001.pt"),
    lambda folder: torch.save({"n": torch.tensor(7)}, folder / "one-00001.pt"),
], ids=[*map(str, TENTHS), "flipped byte", "another piece", "another run", "another writer"])
def test_a_piece_that_is_not_this_runs_own_is_measured_again(tmp_path, capsys, spoil):
    report.stage("one", tmp_path / "other", 2, lambda i: {"n": torch.tensor(-i)})
    report.stage("one", tmp_path / "run", 2, lambda i: {"n": torch.tensor(i)})
    spoil(tmp_path / "run")
    done = []
    parts = report.stage("one", tmp_path / "run", 2, lambda i: done.append(i) or {"n": torch.tensor(i)})
    assert done == [1] and [int(part["n"]) for part in parts] == [0, 1]
    assert "one-00001.pt in" in (said := capsys.readouterr().err) and "measured again" in said
    report.stage("one", tmp_path / "run", 2, lambda i: done.append(i))
    assert done == [1]


def cut(path, keep):
    content = path.read_bytes()
    path.write_bytes(content[: int(len(content) * keep)])


def flip(path, at):
    content = bytearray(path.read_bytes())
    content[at] ^= 1
    path.write_bytes(content)


# --- interruption ---------------------------------------------------------------------------------


def killed(work, seconds):
    """Run work() in a process of its own and kill it without warning; True if it was still running."""
    child = os.fork()
    if child == 0:
        try:
            work()
        finally:
            os._exit(0)
    time.sleep(seconds)
    os.kill(child, signal.SIGKILL)
    return os.WIFSIGNALED(os.waitpid(child, 0)[1])


@pytest.mark.parametrize("writer", WRITERS)
def test_killed_twenty_times_while_it_writes_a_file_is_old_or_new(tmp_path, writer):
    name, write = WRITERS[writer]
    whole = []
    for size in (1_000_000, 1_500_000):
        write(tmp_path, size)
        whole.append((tmp_path / name).read_bytes())

    def over_and_over():
        while True:
            write(tmp_path, 1_000_000)
            write(tmp_path, 1_500_000)

    chance = random.Random(writer)
    for _ in range(20):
        assert killed(over_and_over, chance.uniform(0.01, 0.1))
        assert (tmp_path / name).read_bytes() in whole


def test_a_report_killed_twenty_times_gives_the_same_pieces(tmp_path):
    def work(i):
        return {"n": torch.full((300_000,), float(i))}

    chance, kills = random.Random(1), 0
    for _ in range(20):
        kills += killed(lambda: report.stage("one", tmp_path, 400, work), chance.uniform(0.01, 0.06))
        assert all(report._kept(file) for file in tmp_path.glob("one-*.pt"))
    assert kills == 20
    parts = report.stage("one", tmp_path, 400, work)
    assert all(bool((part["n"] == i).all()) for i, part in enumerate(parts))


def test_a_whole_report_killed_at_random_moments_ends_with_the_same_numbers(tmp_path):
    given, chance, kills = [*SMALL, "-n", "64", "--out"], random.Random(2), 0
    assert report.main([*given, str(tmp_path / "whole.html")]) == 0
    for _ in range(2):  # a process of its own each time: autograd does not outlive a fork
        process = subprocess.Popen([sys.executable, "-m", "helpers.report", *given, tmp_path / "cut.html"], cwd=ROOT,
                                   stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        before, give_up = len(list(tmp_path.rglob("*.pt"))), time.monotonic() + 60
        while len(list(tmp_path.rglob("*.pt"))) == before and process.poll() is None and time.monotonic() < give_up:
            time.sleep(0.01)
        time.sleep(chance.uniform(0, 0.2))
        process.kill()
        kills += process.wait() == -signal.SIGKILL
    assert kills == 2 and 2 <= len(list(tmp_path.rglob("*.pt")))
    assert report.main([*given, str(tmp_path / "cut.html")]) == 0
    for name in ("html", "json"):
        assert (tmp_path / f"cut.{name}").read_bytes() == (tmp_path / f"whole.{name}").read_bytes()


def test_an_execution_killed_at_random_moments_leaves_the_notebook_as_it_was(tmp_path):
    path, chance = tmp_path / "a.ipynb", random.Random(3)
    tool.write(notebook("import time\ntime.sleep(60)"), path)
    before = path.read_bytes()
    for _ in range(3):
        process = subprocess.Popen([sys.executable, ROOT / "book" / "tools" / "notebooks.py", "--all", path],
                                   stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        time.sleep(chance.uniform(0.5, 4))
        process.kill()
        assert process.wait() == -signal.SIGKILL
        assert path.read_bytes() == before and os.listdir(tmp_path) == ["a.ipynb"]


# --- determinism ----------------------------------------------------------------------------------

TOLERANCE = {"attention distance (px)": 1e-4, "norm ratio": 1e-3, "CKA": 1e-5}  # as the page says
OLD = {"ATEN_CPU_CAPABILITY": "default", "ONEDNN_MAX_CPU_ISA": "SSE41", "MKL_ENABLE_INSTRUCTIONS": "SSE4_2"}


def numbers():
    x, vit = IMAGES, zoo.load("vit")
    return {"attention distance (px)": attention.mean_distance(vit, x.split(32)),
            "norm ratio": skips.norm_ratios(vit, x.split(32)).patches,
            "CKA": cka.compare(vit, zoo.load("resnet"), x.split(32)).values}


@pytest.mark.skipif(platform.machine() not in ("x86_64", "AMD64"), reason="another kind of processor")
def test_older_instructions_of_the_processor_do_not_show(tmp_path):
    code = f"import sys, torch; torch.set_num_threads(1); sys.path[:0] = [{str(Path(__file__).parent)!r}]; " \
           "import test_faults; torch.save(test_faults.numbers(), sys.argv[1])"
    subprocess.run([sys.executable, "-B", "-c", code, tmp_path / "old.pt"], check=True, cwd=ROOT,
                   env={**os.environ, **OLD})
    old, new = torch.load(tmp_path / "old.pt", weights_only=True), numbers()
    far = {name: float((old[name] - new[name]).abs().max()) for name in new}
    print(far)
    assert max(far.values()) > 0  # else the setting changed nothing
    assert all(far[name] < TOLERANCE[name] for name in far)


def test_batches_of_512_give_the_distances_of_batches_of_32():
    x = shapes.draw(512, seed=77).images
    one, other = (attention.mean_distance(zoo.load("vit"), x.split(size)) for size in (32, 512))
    assert float((one - other).abs().max()) < TOLERANCE["attention distance (px)"]


# --- what is written ------------------------------------------------------------------------------

WATCHED = """
import os, sys
outside = set()
def watch(event, args):
    if event == "open" and (args[2] or 0) & (os.O_WRONLY | os.O_RDWR | os.O_CREAT):
        outside.add(os.path.realpath(os.fsdecode(args[0])) if not isinstance(args[0], int) else "")
    elif event in ("os.mkdir", "os.rename"):
        outside.add(os.path.realpath(os.fsdecode(args[event == "os.rename"])))
sys.addaudithook(watch)
from helpers import attention, cka, shapes, verdict, zoo
x, vit = shapes.draw(16, seed=1).images, zoo.load("vit")
attention.mean_distance(vit, x); cka.compare(vit, zoo.load("resnet"), x)
verdict.verdict(finding="uniform-vit", claim="A claim.", value=0.8, interval=(0.7, 0.9), holds=True,
                paper="Figure 1.", n_images=20, models=["vit"], folder=sys.argv[1])
print("\\n".join(sorted(outside)))
"""


def test_measuring_writes_to_the_chosen_folder_alone(tmp_path):
    told = subprocess.run([sys.executable, "-B", "-c", WATCHED, tmp_path / "out"], check=True, cwd=ROOT,
                          capture_output=True, text=True).stdout.split("\n")
    chosen = [path for path in told if path.startswith(str(tmp_path / "out"))]
    assert chosen
    torchs = "torchinductor_"  # the cache that PyTorch's compiler makes when it is imported
    others = {path for path in told if path and path not in chosen and torchs not in path}
    assert not {path for path in others if not path.startswith(("/dev/", "/proc/"))}
