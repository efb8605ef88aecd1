"""How nbgrader releases and marks the problem sets. It reads this file when it is called in this folder.

Everything of one class (copies, submissions, marks, the database) lies in classroom/, which git leaves alone.
"""

import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent if "__file__" in globals() else Path.cwd()
sys.path.insert(0, str(HERE))

from marking import HideHiddenTests, PlantSeed  # noqa: E402
from nbconvert.preprocessors import CSSHTMLHeaderPreprocessor  # noqa: E402
from nbgrader import preprocessors as nb  # noqa: E402

c = get_config()  # noqa: F821  (nbgrader provides it)

c.CourseDirectory.course_id = "vits-and-cnns"
c.CourseDirectory.root = str(HERE / "classroom")

c.ClearSolutions.code_stub = {"python": "raise NotImplementedError  # your code takes the place of this line"}
c.ClearSolutions.text_stub = "*Your answer takes the place of this line.*"

c.GenerateAssignment.preprocessors = [
    nb.LockCells, nb.ClearSolutions, nb.ClearOutput, nb.CheckCellMetadata,
    PlantSeed,  # before the tests are saved in the database, from where marking takes them
    nb.ComputeChecksums, nb.SaveCells, nb.ClearHiddenTests, nb.ClearMarkScheme, nb.ComputeChecksums,
    nb.CheckCellMetadata,
]
c.GenerateFeedback.preprocessors = [nb.GetGrades, HideHiddenTests, CSSHTMLHeaderPreprocessor]

c.Execute.timeout = 120  # seconds a cell may take when it is marked: endless loops end here
c.Execute.interrupt_on_timeout = True
c.Execute.raise_on_iopub_timeout = False
