"""Execute the notebooks that are out of date and write them so that a second run changes no byte.

    python book/tools/notebooks.py                    what is out of date
    python book/tools/notebooks.py --all [FILE ...]   whether out of date or not
    python book/tools/notebooks.py --check            only say what is out of date

While a notebook runs, the kernel notes which files of the repository it imports and reads: helpers,
weights, cards, results. Their hashes go into the notebook's metadata beside the hash of its own code.
A notebook is out of date when any of them has changed. Notebooks run in the order of their names, so that
one which reads the results of others comes after them.
"""

from __future__ import annotations

import argparse
import copy
import hashlib
import json
import os
import sys
import time
from pathlib import Path

import nbformat
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError, CellTimeoutError, DeadKernelError

sys.path.insert(0, str(Path(__file__).parent))
from normalise import normalise  # noqa: E402  (beside this file, which is no package)

ROOT = Path(__file__).resolve().parents[2]
KEY = "made_from"  # of the notebook's metadata

# Runs before the first cell: every file opened from here on is noted with its mode.
WATCH = """
def _watch():
    import os, sys
    sys.course_opened = set()
    def note(event, args):
        if event == "open" and isinstance(args[0], (str, bytes)):
            writes = isinstance(args[1], str) and set(args[1]) & set("wax+")
            sys.course_opened.add((os.path.abspath(os.fsdecode(args[0])), bool(writes)))
        elif event == "os.rename":
            sys.course_opened.add((os.path.abspath(os.fsdecode(args[1])), True))
    sys.addaudithook(note)
_watch(); del _watch
"""
# Runs after the last cell. Modules are asked for apart: Python may read their bytecode instead of the source.
TELL = """
import json, sys
print(json.dumps({"opened": sorted(sys.course_opened),
                  "modules": sorted({str(m.__file__) for m in list(sys.modules.values())
                                     if getattr(m, "__file__", None)})}))
"""


def code_hash(notebook) -> str:
    """Of the code cells only: prose can be edited without a new run."""
    return _digest("\0".join(c.source for c in notebook.cells if c.cell_type == "code").encode())


def file_hash(path: Path) -> str:
    """Of the bytes; of a module without its comment lines and blank lines."""
    data = path.read_bytes()
    if path.suffix == ".py":
        lines = (line.rstrip() for line in data.decode().splitlines())
        data = "\n".join(line for line in lines if line and not line.lstrip().startswith("#")).encode()
    return _digest(data)


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:16]


def why_stale(path: Path, root: Path = ROOT) -> str | None:
    """The reason to execute this notebook again, or None."""
    notebook = nbformat.read(path, as_version=4)
    made_from = notebook.metadata.get(KEY)
    if not made_from:
        return "it was never executed by this tool"
    if made_from["code"] != code_hash(notebook):
        return "its code has changed"
    for name, digest in made_from["files"].items():
        if not (root / name).is_file():
            return f"{name} is gone"
        if file_hash(root / name) != digest:
            return f"{name} has changed"
    return None


def inputs(opened: list, modules: list[str], root: Path = ROOT) -> dict[str, str]:
    """Hash by name of each file of the repository that was imported or read, and not written, by a run."""
    written = {path for path, writes in opened if writes}
    read = {path for path, writes in opened if not writes} | set(modules)
    found = {}
    for path in map(Path, read - written):
        try:
            name = path.resolve().relative_to(root)
        except ValueError:
            continue  # of the system or of an installed package
        hidden = any(part.startswith((".", "__pycache__", "_build")) for part in name.parts)
        if not hidden and path.is_file() and path.suffix not in (".ipynb", ".pyc"):
            found[name.as_posix()] = file_hash(path)
    return dict(sorted(found.items()))


def execute(path: Path, root: Path = ROOT, timeout: int = 900):
    """The notebook as a fresh kernel, started in its folder, leaves it. The file is not touched."""
    notebook = nbformat.read(path, as_version=4)
    run = copy.deepcopy(notebook)
    run.cells = [nbformat.v4.new_code_cell(WATCH), *run.cells, nbformat.v4.new_code_cell(TELL)]
    client = NotebookClient(run, timeout=timeout, kernel_name="python3", startup_timeout=600,
                            record_timing=False, extra_arguments=["--IPKernelApp.log_level=ERROR"],
                            resources={"metadata": {"path": str(path.parent)}})
    client.execute()
    told = json.loads(run.cells[-1].outputs[0].text)
    notebook.cells = run.cells[1:-1]
    normalise(notebook, forbidden=(str(root), str(Path.home()) + "/"))
    files = inputs(told["opened"], told["modules"], root)
    notebook.metadata[KEY] = {"code": code_hash(notebook), "files": files}
    return notebook


def write(notebook, path: Path) -> None:
    """All of the file or nothing of it: written beside, then moved into place."""
    beside = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        beside.write_text(nbformat.writes(notebook).rstrip("\n") + "\n", encoding="utf-8")
        os.replace(beside, path)
    finally:
        beside.unlink(missing_ok=True)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("paths", nargs="*", type=Path, metavar="FILE", help="default: every chapter")
    parser.add_argument("--all", action="store_true", help="execute even what is up to date")
    parser.add_argument("--check", action="store_true", help="execute nothing; exit 1 if any is out of date")
    options = parser.parse_args(arguments)
    os.environ.pop("COURSE_REAL", None)  # chapter 13 would measure a reader's networks; its pages show ours
    failed = 0
    for path in options.paths or sorted((ROOT / "notebooks").glob("[0-9]*.ipynb")):
        reason = "asked for" if options.all else why_stale(path)
        print(f"{path.stem:<24} {f'out of date: {reason}' if reason else 'up to date'}", flush=True)
        if reason and options.check:
            failed += 1
        elif reason:
            failed += not _run(path)
    return min(failed, 1)


def _run(path: Path) -> bool:
    start = time.monotonic()
    try:
        write(execute(path), path)
    except (CellExecutionError, CellTimeoutError, DeadKernelError, ValueError) as error:
        print(f"{path.stem:<24} FAILED, the file is left as it was\n{error}", file=sys.stderr, flush=True)
        return False
    print(f"{path.stem:<24} executed in {time.monotonic() - start:.0f} s", flush=True)
    return True


if __name__ == "__main__":
    sys.exit(main())
