"""The problem sets: their sources, and one whole class marked with nbgrader from release to the list of grades."""

import csv
import os
import re
import subprocess
from pathlib import Path

import nbformat
import pytest

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "notebooks" / "assignments"
SOURCES = sorted(FOLDER.glob("ps*.ipynb"))
TEACHER = ROOT / ".venv-teacher" / "bin"
SEED = 31415926535  # long enough to be found by chance in no checksum
sources = pytest.mark.parametrize("path", SOURCES, ids=lambda path: path.stem)


def cells(path):
    return nbformat.read(path, 4).cells


def grader(cell):
    return cell.metadata.get("nbgrader", {})


def test_there_are_four():
    assert [path.stem for path in SOURCES] == ["ps1", "ps2", "ps3", "ps4"]


@sources
def test_points_in_the_title_are_those_of_the_cells(path):
    title = cells(path)[0].source
    points = int(re.search(r"(\d+) points", title)[1])
    minutes = int(re.search(r"About (\d+) minutes", title)[1])
    assert points == sum(grader(cell).get("points", 0) for cell in cells(path)) and 60 <= minutes <= 120


@sources
def test_points_in_a_heading_are_those_of_the_cells_below_it(path):
    stated, found = 0, 0
    for cell in cells(path)[1:]:
        heading = re.match(r"#{2,3} .*\((\d+) points?", cell.source)
        if heading:
            assert stated == found, f"before {cell.source[:40]}"
            stated, found = int(heading[1]), 0
        found += grader(cell).get("points", 0)
    assert stated == found


@sources
def test_every_hidden_test_draws_its_cases_from_the_teachers_seed(path):
    hidden = [cell.source for cell in cells(path) if "BEGIN HIDDEN TESTS" in cell.source]
    assert len(hidden) >= 3
    for source in hidden:
        visible, rest = source.split("### BEGIN HIDDEN TESTS")
        assert "seed=0" in rest and rest.strip().endswith("### END HIDDEN TESTS") and visible.strip()
        compile(source, path.stem, "exec")


@sources
def test_sources_hold_no_outputs_and_know_each_task_once(path):
    ids = [grader(cell)["grade_id"] for cell in cells(path) if grader(cell)]
    assert len(ids) == len(set(ids)) and not any(cell.get("outputs") for cell in cells(path))
    for cell in cells(path):
        if grader(cell).get("solution") and cell.cell_type == "code":
            assert cell.source.count("### BEGIN SOLUTION") == cell.source.count("### END SOLUTION") >= 1


# One class

WRONG = {
    "hsic": "def hsic(K, L):\n    return (K * L).sum() / (len(K) - 1) ** 2",  # nothing centred
    "hsic1": "def hsic1(K, L):\n    n = len(K)\n    return (K * L).sum() / (n * (n - 3))",
}
LOOPS = {"first_share": "def first_share(x):\n    while True:\n        pass"}
TAMPERED = """
from helpers import checking
checking.Check.hint = lambda *args, **more: ""
checking.Check.require = lambda *args, **more: None
checking._close = lambda *args, **more: True
np.allclose = torch.allclose = lambda *args, **more: True
"""
MARKS = {"right": 20, "half": 7, "wrong": 4, "endless": 18, "tampering": 0, "empty": 0}  # of 20 marked by machine


def submissions(release):
    """Who hands in what: the student's copy with some cells replaced."""
    tasks = {cell.id: cell.source for cell in cells(FOLDER / "ps1.ipynb") if grader(cell).get("solution")}
    answers = {
        "right": tasks,
        "half": {id: tasks[id] for id in ("centred_gram", "hsic", "first_share")},
        "wrong": tasks | WRONG,
        "endless": tasks | LOOPS,
        "tampering": {id: f"{TAMPERED}\ndef {id}(*args):\n    return 0.5" for id in tasks if not id.startswith("answer")},
        "empty": {},
    }
    for student, changed in answers.items():
        book = nbformat.read(release, 4)
        for cell in book.cells:
            cell.source = changed.get(cell.id, cell.source)
            if student == "tampering" and cell.id.endswith("_test"):
                cell.source = "pass  # nothing to see here"
                cell.metadata["nbgrader"]["points"] = 100
        yield student, book


def hand_in(room, student, name, book):
    place = room / "submitted" / student / name
    place.mkdir(parents=True)
    nbformat.write(book, place / f"{name}.ipynb")


def call(*command):
    env = {**os.environ, "PATH": f"{TEACHER}{os.pathsep}{os.environ['PATH']}", "MPLBACKEND": "agg", "OMP_NUM_THREADS": "1"}
    done = subprocess.run([TEACHER / "python", *map(str, command)], cwd=FOLDER, env=env, capture_output=True, text=True)
    return done.returncode, done.stdout + done.stderr


@pytest.fixture(scope="module")
def nbgrader():
    if not TEACHER.exists() or call("-c", "import nbgrader")[0]:
        pytest.skip("nbgrader is not installed in .venv-teacher: `make assignments` does it")


def release(room, out, seed):
    code, said = call("release.py", "--classroom", room, "--out", out, "--seed", seed)
    assert code == 0, said


def test_a_class_from_release_to_the_list_of_grades(nbgrader, tmp_path):
    """One test, since each step needs the one before."""
    room = tmp_path / "room"
    release(room, tmp_path / "out", SEED)
    release(tmp_path / "other room", tmp_path / "again", SEED + 1)
    names = [path.stem for path in SOURCES]
    for name in names:
        public = (tmp_path / "out" / f"{name}.ipynb").read_bytes()
        assert public == (tmp_path / "again" / f"{name}.ipynb").read_bytes(), "the student's copy depends on the seed"
        assert not re.search(rb"HIDDEN|BEGIN SOLUTION|\.require\(|" + str(SEED).encode(), public)

    for student, book in submissions(tmp_path / "out" / "ps1.ipynb"):
        hand_in(room, student, "ps1", book)
    for path in SOURCES[1:]:  # the solutions as a student's answers: what they must be marked with is full marks
        hand_in(room, "right", path.stem, nbformat.read(path, 4))

    for name in names:
        code, said = call("-m", "nbgrader", "autograde", name, f"--CourseDirectory.root={room}", "--Execute.timeout=60")
        assert code == 0, said
    code, said = call("-m", "nbgrader", "generate_feedback", "ps1", f"--CourseDirectory.root={room}")
    assert code == 0, said
    code, said = call("-m", "nbgrader", "export", "--to", tmp_path / "grades.csv", f"--CourseDirectory.root={room}")
    assert code == 0, said

    with open(tmp_path / "grades.csv") as file:
        rows = {(row["assignment"], row["student_id"]): row for row in csv.DictReader(file)}
    got = {student: float(rows["ps1", student]["score"] or 0) for student in MARKS}
    assert got == MARKS
    assert {float(rows["ps1", student]["max_score"]) for student in MARKS} == {25}, "points were tampered with"
    for path in SOURCES[1:]:
        by_machine = sum(grader(c).get("points", 0) for c in cells(path) if not grader(c).get("solution"))
        assert float(rows[path.stem, "right"]["score"]) == by_machine, path.stem

    for student in MARKS:
        page = (room / "feedback" / student / "ps1" / "ps1.html").read_text()
        assert not re.search(rf"HIDDEN TESTS|{SEED}|\.require\(|import_module|rng\.integers\(15", page), student
    assert "neither matrix was centred" in (room / "feedback" / "wrong" / "ps1" / "ps1.html").read_text()


def test_the_teachers_guide_knows_points_and_minutes():
    guide = (ROOT / "book" / "teachers_guide.md").read_text()
    for path in SOURCES:
        title = cells(path)[0].source
        machine = sum(grader(c).get("points", 0) for c in cells(path) if not grader(c).get("solution"))
        person = sum(grader(c).get("points", 0) for c in cells(path) if grader(c).get("solution"))
        minutes = re.search(r"About (\d+) minutes", title)[1]
        assert re.search(rf"^\| {path.stem[2:]} .*\| {minutes} \| {machine} \| {person} \|$", guide, re.M), path.stem
    for path in (ROOT / "notebooks").glob("[0-9]*.ipynb"):
        said = re.search(r"[Aa]bout (\d+) minutes", cells(path)[0].source)
        row = re.search(rf"^\| {int(path.stem[:2])} \| (\d+) \|", guide, re.M)
        assert row and (not said or abs(int(said[1]) - int(row[1])) <= 15), path.stem
