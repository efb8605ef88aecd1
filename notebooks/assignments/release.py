"""Write the students' copies of the problem sets: `make assignments`, or with SEED=… for a class.

Without a seed: release/psN.ipynb, the same bytes every time, after checking that each stub has its solution
and that nothing of a solution or a hidden test is left. With one, the sets are also registered in classroom/,
where marking finds the hidden cases that the seed draws; students get the same copies.
"""

import argparse
import logging
import os
import shutil
import sys
import tempfile
from pathlib import Path

import nbformat
from nbgrader.converters import GenerateAssignment
from nbgrader.coursedir import CourseDirectory
from nbgrader.preprocessors import SaveCells
from traitlets.config.loader import PyFileConfigLoader

HERE = Path(__file__).resolve().parent
SETS = sorted(path.stem for path in HERE.glob("ps*.ipynb"))
MARKERS = ("BEGIN SOLUTION", "END SOLUTION", "HIDDEN TESTS", "seed=0")
STUBS = ("raise NotImplementedError", "*Your answer takes")


def check(source: Path, copy: Path) -> list[str]:
    """What is wrong with a student's copy, in words; empty when nothing is."""
    ours, theirs = ({cell.id: cell for cell in nbformat.read(path, 4).cells} for path in (source, copy))
    wrong = [] if list(ours) == list(theirs) else ["cells were lost or moved"]
    for id, cell in theirs.items():
        is_task = cell.metadata.get("nbgrader", {}).get("solution")
        stubs = sum(cell.source.count(stub) for stub in STUBS)
        solution = ours[id].source.count("### BEGIN SOLUTION") if cell.cell_type == "code" else 1
        if is_task and (stubs != solution or not ours[id].source.strip()):
            wrong.append(f"{id}: {stubs} stubs for {solution} solutions")
        if not is_task and stubs:
            wrong.append(f"{id}: a stub in a cell that is no task")
        wrong += [f"{id}: {marker!r} is left" for marker in MARKERS if marker in cell.source]
        if cell.get("outputs"):
            wrong.append(f"{id}: outputs are left")
    return wrong


def generate(root: Path, name: str, seed: int, database: bool) -> Path:
    """Copy one source into the course directory `root`; nbgrader makes the student's copy."""
    (root / "source" / name).mkdir(parents=True, exist_ok=True)
    shutil.copy(HERE / f"{name}.ipynb", root / "source" / name)
    config = PyFileConfigLoader("nbgrader_config.py", str(HERE)).load_config()
    config.CourseDirectory.root = str(root)
    config.PlantSeed.seed = seed
    if not database:
        config.GenerateAssignment.preprocessors.remove(SaveCells)
    course = CourseDirectory(config=config, assignment_id=name)
    log = logging.getLogger(name)
    log.setLevel(logging.ERROR)
    GenerateAssignment(course, config=config, force=True, no_database=not database, log=log).start()
    return root / "release" / name / f"{name}.ipynb"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, help="draws the hidden cases; registers the sets in classroom/")
    parser.add_argument("--classroom", type=Path, default=HERE / "classroom")
    parser.add_argument("--out", type=Path, default=HERE / "release")
    parser.add_argument("sets", nargs="*", default=SETS)
    given = parser.parse_args()
    # nbgrader calls alembic by name: let it find the one beside this Python
    os.environ["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    given.out.mkdir(parents=True, exist_ok=True)
    for name in given.sets:
        with tempfile.TemporaryDirectory() as folder:
            made = generate(Path(folder), name, 0, database=False)
            if wrong := check(HERE / f"{name}.ipynb", made):
                sys.exit(f"{name}: " + "; ".join(wrong))
            shutil.copy(made, given.out / f"{name}.ipynb")
        if given.seed is not None:
            ours = generate(given.classroom.resolve(), name, given.seed, database=True)
            if ours.read_bytes() != (given.out / f"{name}.ipynb").read_bytes():
                sys.exit(f"{name}: the class's copy differs from the public one")
        print(f"{given.out / name}.ipynb")
    if given.seed is not None:
        print(f"Registered in {given.classroom}: the hidden cases come from your seed.")


if __name__ == "__main__":
    main()
