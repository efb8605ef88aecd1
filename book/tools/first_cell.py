"""The first code cell of every chapter: it makes `helpers` importable wherever the notebook is opened.

    python book/tools/first_cell.py        writes it into the chapters that lack it or have another one

The repository's address comes from _config.yml. In a copy of the course the cell does nothing.
"""

from __future__ import annotations

import re
from pathlib import Path

import nbformat

ROOT = Path(__file__).resolve().parents[2]
MARK = "# Opened alone (on Colab, say), this notebook fetches the course; in a copy of it, this does nothing."
CELL = MARK + '''
import importlib.util
import os
import subprocess
import sys

if importlib.util.find_spec("helpers") is None:
    if not os.path.isdir("../helpers") and not os.path.isdir("course"):
        address = os.environ.get("COURSE_REPOSITORY", "{url}")
        subprocess.run(["git", "clone", "--quiet", "--depth=1", address, "course"], check=True)
    sys.path.insert(0, os.path.abspath(".." if os.path.isdir("../helpers") else "course"))
    needed = ["torch", "torchvision", "timm", "safetensors", "matplotlib", "tqdm", "ipywidgets"]
    missing = [name for name in needed if importlib.util.find_spec(name) is None]
    if missing:
        subprocess.run([sys.executable, "-m", "pip", "install", "--quiet", *missing], check=True)'''


def source(root: Path = ROOT) -> str:
    """The cell's text, with the address that _config.yml names."""
    config = (root / "_config.yml").read_text(encoding="utf-8")
    return CELL.replace("{url}", re.search(r"^repository:\s*\n\s*url:\s*(\S+)", config, re.M).group(1))


def put(notebook, text: str) -> bool:
    """Make `text` the notebook's first code cell; whether anything changed."""
    first = next(i for i, cell in enumerate(notebook.cells) if cell.cell_type == "code")
    if notebook.cells[first].source == text:
        return False
    if notebook.cells[first].get("id") == "course":
        notebook.cells[first].source = text
    else:  # no page needs it: a page runs nothing
        cell = nbformat.v4.new_code_cell(text, id="course", metadata={"tags": ["remove-cell"]})
        notebook.cells.insert(first, cell)
    return True


if __name__ == "__main__":
    for path in sorted((ROOT / "notebooks").glob("[0-9]*.ipynb")):
        chapter = nbformat.read(path, as_version=4)
        if any(cell.cell_type == "code" for cell in chapter.cells) and put(chapter, source()):
            path.write_text(nbformat.writes(chapter) + "\n", encoding="utf-8")
            print(path.name)
