"""Exercises that end in a checker: the folded solution is handed to it, as a learner would."""

import re
import textwrap
from pathlib import Path

import nbformat
import pytest
import torch

from helpers import checks

ROOT = Path(__file__).resolve().parents[1]
CALL = re.compile(r"checks\.(\w+)\((my_\w+)\)")
SOLUTION = re.compile(r"```\{admonition\} Solution\n:class: dropdown\n(.*?)```", re.S)


def _exercises():
    for path in sorted((ROOT / "notebooks").glob("[0-9]*.ipynb")):
        for cell in nbformat.read(path, as_version=4).cells:
            if cell.cell_type == "markdown" and CALL.search(cell.source):
                yield pytest.param(cell.source, id=f"{path.stem}-{CALL.search(cell.source)[1]}")


def _code(solution: str) -> str:
    """The indented lines of a solution; the lines between them that are prose are left out."""
    return textwrap.dedent("\n".join(line for line in solution.splitlines() if line.startswith("    ")))


@pytest.mark.parametrize("text", list(_exercises()))
def test_the_folded_solution_passes_the_checker(text):
    mine = {"torch": torch}
    exec(_code(SOLUTION.search(text)[1]), mine)
    for checker, function in CALL.findall(text):
        getattr(checks, checker).require(mine[function])


def test_several_chapters_end_in_a_checker():
    assert len(list(_exercises())) >= 4
