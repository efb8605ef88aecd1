"""The cell that fetches the course: the same in every chapter, and it works from an empty folder."""

import json
import os
import re
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "book" / "tools"))
import first_cell  # noqa: E402

CHAPTERS = sorted((ROOT / "notebooks").glob("[0-9]*.ipynb"))


def _code(path):
    return [cell for cell in nbformat.read(path, as_version=4).cells if cell.cell_type == "code"]


@pytest.mark.parametrize("path", CHAPTERS, ids=lambda p: p.stem)
def test_every_chapter_begins_with_it(path):
    assert _code(path)[0].source == first_cell.source(), "run: python book/tools/first_cell.py"


def test_it_names_the_packages_that_the_helpers_import():
    listed = set(re.findall(r'"(\w+)"', first_cell.CELL.split("needed = ")[1].split("]")[0]))
    used = {name for path in (ROOT / "helpers").glob("*.py")
            for name in re.findall(r"^(?:from|import) (\w+)", path.read_text(encoding="utf-8"), re.M)}
    brought = {"numpy", "PIL"}  # by torchvision and matplotlib
    own = set(sys.stdlib_module_names) | {"helpers"}
    assert used - own - brought <= listed


@pytest.fixture
def bare_kernel(tmp_path, monkeypatch):
    """A kernel with this environment's packages, but without the course (which is installed from its folder)."""
    folder = tmp_path / "environment"
    venv.create(folder, with_pip=False)
    python = folder / "bin" / "python"
    site = subprocess.run([python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"],
                          capture_output=True, text=True, check=True).stdout.strip()
    # a folder named in a .pth file brings its packages, not its own .pth files: so not the course
    (Path(site) / "packages.pth").write_text(sysconfig.get_path("purelib") + "\n")
    spec = tmp_path / "jupyter" / "kernels" / "bare"
    spec.mkdir(parents=True)
    (spec / "kernel.json").write_text(json.dumps(
        {"argv": [str(python), "-m", "ipykernel_launcher", "-f", "{connection_file}"],
         "display_name": "bare", "language": "python"}))
    monkeypatch.setenv("JUPYTER_PATH", str(tmp_path / "jupyter"))
    monkeypatch.delenv("PYTHONPATH", raising=False)
    return "bare"


def test_a_chapter_runs_alone_in_an_empty_folder(tmp_path, bare_kernel, monkeypatch):
    if not (ROOT / ".git").exists():
        pytest.skip("the course is not a git repository here, so there is nothing to clone")
    chapter = nbformat.read(ROOT / "notebooks" / "07_skip_norms.ipynb", as_version=4)
    chapter.cells = [cell for cell in chapter.cells if cell.cell_type == "code"][:4]
    chapter.cells.append(nbformat.v4.new_code_cell("import helpers; print(helpers.__file__)"))
    empty = tmp_path / "empty"
    empty.mkdir()
    monkeypatch.setenv("COURSE_REPOSITORY", str(ROOT))
    done = NotebookClient(chapter, timeout=300, kernel_name=bare_kernel,
                          resources={"metadata": {"path": str(empty)}}).execute()
    assert done.cells[-1].outputs[0].text.strip() == os.path.join(empty, "course", "helpers", "__init__.py")


def test_in_a_copy_of_the_course_it_fetches_nothing(tmp_path, bare_kernel):
    (tmp_path / "helpers").mkdir()
    (tmp_path / "helpers" / "__init__.py").touch()
    (tmp_path / "notebooks").mkdir()
    cells = [nbformat.v4.new_code_cell(first_cell.source()), nbformat.v4.new_code_cell("import helpers")]
    NotebookClient(nbformat.v4.new_notebook(cells=cells), timeout=60, kernel_name=bare_kernel,
                   resources={"metadata": {"path": str(tmp_path / "notebooks")}}).execute()
    assert not (tmp_path / "notebooks" / "course").exists()
