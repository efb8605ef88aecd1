"""The notebook tool on a small repository of its own, and what must hold for every committed chapter."""

import base64
import copy
import os
import re
import shutil
import struct
import subprocess
import sys
import zlib
from pathlib import Path

import nbformat
import pytest
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook, new_output

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "book" / "tools"))
import normalise as tidy  # noqa: E402

import notebooks as tool  # noqa: E402

CHAPTERS = sorted((ROOT / "notebooks").glob("[0-9]*.ipynb"))
chapters = pytest.mark.parametrize("path", CHAPTERS, ids=lambda p: p.stem)

CELLS = [
    "import matplotlib.pyplot as plt\nimport measure\nfrom pathlib import Path",
    "x = measure.twice(int(Path('weights.txt').read_text()))\nx",
    "Path('result.json').write_text(str(x))\nprint(object())",
    "fig, ax = plt.subplots(figsize=(1, 1))\nax.plot([0, x]);",
    "from ipywidgets import interact\ninteract(lambda k: k, k=(0, 3));",
]


def _repository(folder: Path) -> Path:
    (folder / "measure.py").write_text("# a comment\ndef twice(n):\n    return 2 * n\n")
    (folder / "weights.txt").write_text("21")
    path = folder / "01_small.ipynb"
    nbformat.write(new_notebook(cells=[new_markdown_cell("# Small"), *map(new_code_cell, CELLS)]), path)
    return path


@pytest.fixture
def chapter(tmp_path) -> Path:
    return _repository(tmp_path)


@pytest.fixture(scope="session")
def executed_once(tmp_path_factory) -> Path:
    path = _repository(tmp_path_factory.mktemp("executed"))
    tool.write(tool.execute(path, root=path.parent), path)
    return path.parent


@pytest.fixture
def executed(executed_once, tmp_path) -> Path:
    return shutil.copytree(executed_once, tmp_path / "copy") / "01_small.ipynb"


def test_runs_of_one_notebook_give_the_same_bytes(executed):
    first = executed.read_bytes()
    tool.write(tool.execute(executed, root=executed.parent), executed)
    assert executed.read_bytes() == first
    png = base64.b64decode(nbformat.read(executed, as_version=4).cells[4].outputs[0].data["image/png"])
    assert png.startswith(tidy.PNG_START) and b"Software" not in png


def test_inputs_are_what_was_imported_and_read_not_what_was_written(executed):
    made_from = nbformat.read(executed, as_version=4).metadata[tool.KEY]
    assert set(made_from["files"]) == {"measure.py", "weights.txt"}


def test_cells_keep_order_source_and_count(executed):
    notebook = nbformat.read(executed, as_version=4)
    code = [c for c in notebook.cells if c.cell_type == "code"]
    assert [c.source for c in code] == CELLS
    assert [c.execution_count for c in code] == [1, 2, 3, 4, 5]
    assert code[1].outputs[0].data["text/plain"] == "42"


def _edit(path: Path, change) -> None:
    notebook = nbformat.read(path, as_version=4)
    change(notebook)
    nbformat.write(notebook, path)


def test_fresh_after_a_run_and_after_changes_that_cannot_matter(executed):
    assert tool.why_stale(executed, executed.parent) is None
    _edit(executed, lambda nb: nb.cells[0].update(source="# Other prose"))
    (executed.parent / "measure.py").write_text("def twice(n):\n\n    # another comment\n    return 2 * n\n")
    assert tool.why_stale(executed, executed.parent) is None


@pytest.mark.parametrize("change, reason", [
    (lambda p: _edit(p, lambda nb: nb.cells[2].update(source="1")), "its code has changed"),
    (lambda p: (p.parent / "measure.py").write_text("def twice(n): return 3"), "measure.py has changed"),
    (lambda p: (p.parent / "weights.txt").write_text("22"), "weights.txt has changed"),
    (lambda p: (p.parent / "weights.txt").unlink(), "weights.txt is gone"),
    (lambda p: _edit(p, lambda nb: nb.metadata.pop(tool.KEY)), "never executed"),
])
def test_stale_for_each_reason(executed, change, reason):
    change(executed)
    assert reason in tool.why_stale(executed, executed.parent)


def test_a_failing_notebook_is_left_as_it_was(chapter, capfd):
    _edit(chapter, lambda nb: nb.update(cells=[new_code_cell("1 / 0")]))
    before = chapter.read_bytes()
    assert tool.main(["--all", str(chapter)]) == 1
    assert chapter.read_bytes() == before
    assert "ZeroDivisionError" in capfd.readouterr().err
    assert not list(chapter.parent.glob("*.tmp"))


def test_check_executes_nothing(chapter, capsys):
    before = chapter.read_bytes()
    assert tool.main(["--check", str(chapter)]) == 1
    assert chapter.read_bytes() == before
    assert "never executed" in capsys.readouterr().out


def _chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def test_plain_png_drops_text_and_keeps_pixels():
    start = tidy.PNG_START + _chunk(b"IHDR", b"x" * 13)
    end = _chunk(b"IDAT", b"pixels") + _chunk(b"IEND", b"")
    signed = start + _chunk(b"tEXt", b"Software\0v") + _chunk(b"tIME", b"now") + end
    assert tidy.plain_png(signed) == start + end
    assert tidy.plain_png(b"not a PNG") == b"not a PNG"


def test_normalise_joins_streams_and_drops_random_ids():
    cell = new_code_cell("x", outputs=[
        new_output("stream", name="stdout", text="a "),
        new_output("stream", name="stdout", text="<f at 0x7f00aa11>"),
        new_output("stream", name="stderr", text="b"),
        new_output("execute_result", data={tidy.WIDGET: {"model_id": "1f"}, "text/plain": "interactive"}),
    ])
    notebook = new_notebook(metadata={"widgets": {"state": 1}})
    notebook.cells = [cell, copy.deepcopy(cell)]
    tidy.normalise(notebook)
    assert [o.get("text") for o in notebook.cells[0].outputs] == ["a <f at 0x0>", "b", None]
    assert notebook.cells[0].outputs[2].data == {"text/plain": "interactive"}
    assert notebook.cells[0].id != notebook.cells[1].id
    assert "widgets" not in notebook.metadata


def test_normalise_refuses_a_path_of_this_machine():
    output = new_output("stream", name="stdout", text="/home/somebody/course/a.py:3")
    cell = new_code_cell("x", outputs=[output])
    with pytest.raises(ValueError, match="code cell 1 names a path"):
        tidy.normalise(new_notebook(cells=[cell]), forbidden=("/home/somebody",))


@pytest.mark.parametrize("seconds, code", [(0.0, 1), (60.0, 0)])
def test_a_slow_notebook_fails_the_run(tmp_path, pytester_run, seconds, code):
    cell = new_code_cell("import time\ntime.sleep(0.2)\n1 + 1;", execution_count=1)  # and shows no value
    nbformat.write(new_notebook(cells=[cell]), tmp_path / "slow.ipynb")
    result = pytester_run(tmp_path / "slow.ipynb", "--seconds-per-notebook", str(seconds))
    assert result.returncode == code, result.stdout
    assert ("TOO SLOW" in result.stdout) == bool(code)


@pytest.fixture
def pytester_run(tmp_path):
    def run(*arguments):
        command = [sys.executable, "-m", "pytest", "-p", "tests.notebook_budget", "--nbval",
                   "--nbval-current-env", "-p", "no:cacheprovider", *map(str, arguments)]
        return subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=600,
                              env=os.environ | {"PYTHONPATH": str(ROOT)})
    return run


# ---- the committed chapters

def _code(path: Path) -> list:
    return [c for c in nbformat.read(path, as_version=4).cells if c.cell_type == "code"]


@chapters
def test_chapter_is_written_by_the_tool(path):
    """Byte for byte: a notebook saved by hand carries clocks, versions and ids that change with each save."""
    notebook = nbformat.read(path, as_version=4)
    tidy.normalise(notebook)
    assert tool.KEY in notebook.metadata, "run: make notebooks ONLY=" + path.relative_to(ROOT).as_posix()
    assert nbformat.writes(notebook).rstrip("\n") + "\n" == path.read_text(encoding="utf-8")


@chapters
def test_chapter_outputs_hold_no_error_and_no_warning(path):
    for cell in _code(path):
        for output in cell.outputs:
            assert output.output_type != "error", f"stored error in: {cell.source[:80]}"
            assert output.get("name") != "stderr", f"stored warning: {output.get('text')}"


@chapters
def test_chapter_figures_have_alt_text_that_says_what_they_show(path):
    for cell in _code(path):
        if any("image/png" in o.get("data", {}) for o in cell.outputs):
            alt = cell.metadata.get("mystnb", {}).get("image", {}).get("alt", "")
            assert len(alt) >= 40, f"no mystnb.image.alt, or too short a one: {cell.source[:80]}"


@chapters
def test_chapter_says_why_a_cell_is_not_compared(path):
    for cell in _code(path):
        tags = cell.metadata.get("tags", [])
        if {"nbval-ignore-output", "nbval-skip"} & set(tags):
            assert re.search(r"#.*\w{4,}", cell.source), f"no comment says why: {cell.source[:80]}"
