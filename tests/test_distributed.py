"""The report with its images shared out over two processes: the same numbers, and a death that is told."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from helpers import report

GIVEN = ["test_vit", "test_resnet", "--random-weights", "--n", "40", "--batch", "8", "--size", "32",
         "--field-images", "20", "--field-draws", "1"]  # 5 batches and 3 pieces of fields: no even share for two
PROCESS = """
import os, sys
import torch
torch.set_num_threads(1)
from helpers import report

def keep(title, facts, trained, *rest):
    torch.save({"parts": trained.parts, "fields": trained.fields}, sys.argv[1])
    return "", {}

report.page.write, report.RULES, measure = keep, (), report.measure
first = report.main(sys.argv[3:])

def dies(networks, images):
    if report.rank() == 1:
        os._exit(9)
    return measure(networks, images)

report.measure, os.environ["MASTER_PORT"] = dies, sys.argv[2]
print("first", first, "second", report.main([*sys.argv[3:], "--seed", "7"]), flush=True)
"""


def free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return str(s.getsockname()[1])


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    """(folder, [(exit code, what it printed, what it complained of) of each process])."""
    folder = tmp_path_factory.mktemp("two")
    (folder / "process.py").write_text(PROCESS)
    ports, command = (free_port(), free_port()), [sys.executable, folder / "process.py", folder / "two.pt"]
    shared = {**os.environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": ports[0], "WORLD_SIZE": "2", "OMP_NUM_THREADS": "1",
              "PYTHONPATH": str(Path(report.__file__).parents[1])}
    started = [subprocess.Popen([*command, ports[1], *GIVEN, "--out", folder / "r.html"], text=True,
                                env={**shared, "RANK": str(r), "LOCAL_RANK": str(r)},
                                stdout=subprocess.PIPE, stderr=subprocess.PIPE) for r in range(2)]
    try:
        return folder, [(*process.communicate(timeout=600), process.returncode) for process in started]
    finally:
        for process in started:
            process.kill()


def same(x, y):
    """All numbers of two nested results agree within 1e-6."""
    if isinstance(x, torch.Tensor):
        torch.testing.assert_close(x, y, atol=1e-6, rtol=1e-6)
    elif isinstance(x, dict):
        assert x.keys() == y.keys()
        for key in x:
            same(x[key], y[key])
    elif isinstance(x, (list, tuple)) and x:
        assert len(x) == len(y)
        for a, b in zip(x, y, strict=True):
            same(a, b)
    else:
        assert x == y


def test_two_processes_give_the_numbers_of_one(two, tmp_path, monkeypatch):
    alone = {}
    monkeypatch.setattr(report, "RULES", ())
    monkeypatch.setattr(report.page, "write", lambda title, facts, trained, *rest: (
        alone.update(parts=trained.parts, fields=trained.fields), ("", {}))[1])
    assert report.main([*GIVEN, "--out", str(tmp_path / "r.html")]) == 0
    together = torch.load(two[0] / "two.pt", weights_only=True)
    assert [part["images"] for part in together["parts"]] == [8] * 5
    same(alone, together)


def test_a_process_that_dies_ends_the_run_with_a_message(two):
    folder, ((printed, complained, _), (_, _, died)) = two
    assert died == 9 and "first 0 second 1" in printed
    assert "Process 0 lost another process" in complained and "goes on from what is finished" in complained
    assert list((folder / "r.parts").rglob("*.pt")), "what was finished is kept"
