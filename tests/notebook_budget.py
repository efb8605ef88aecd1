"""A pytest plugin beside nbval: what each notebook takes, as a table; above the limit the run fails.

    pytest -p tests.notebook_budget --nbval --seconds-per-notebook 60 notebooks/
"""

from __future__ import annotations

import os
from collections import defaultdict
from pathlib import Path

import nbformat
import pytest
from nbval.kernel import RunningKernel

SECONDS: dict[str, float] = defaultdict(float)


def pytest_addoption(parser):
    parser.addoption("--seconds-per-notebook", type=float, default=60.0)


def pytest_configure(config):
    """nbval keeps no history, and without it IPython does not notice a semicolon at the end of a cell.

    Chapter 13 shows stored measurements; other networks, named in COURSE_REAL, would give other numbers.
    """
    os.environ.pop("COURSE_REAL", None)

    def execute(self, source, allow_stdin=None):
        return self.kc.execute(source, store_history=True, allow_stdin=allow_stdin, stop_on_error=False)
    RunningKernel.execute_cell_input = execute


def pytest_runtest_logreport(report):
    SECONDS[report.nodeid.split("::")[0]] += report.duration


def limit(notebook: Path, default: float) -> float:
    """Seconds: the default, or what the notebook's metadata says ("seconds": 300), never less."""
    return max(default, float(nbformat.read(notebook, as_version=4).metadata.get("seconds", 0)))


def _over(config) -> list[str]:
    allowed = config.getoption("--seconds-per-notebook")
    return [name for name, seconds in SECONDS.items() if seconds > limit(config.rootpath / name, allowed)]


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session, exitstatus):
    if exitstatus == 0 and not hasattr(session.config, "workerinput") and _over(session.config):
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter, config):
    over = _over(config)
    terminalreporter.section("seconds a notebook")
    for name in sorted(SECONDS):
        mark = "  TOO SLOW" if name in over else ""
        terminalreporter.write_line(f"{SECONDS[name]:7.1f}  {name}{mark}")
