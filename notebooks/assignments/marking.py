"""Two steps that nbgrader lacks: hidden tests with the teacher's seed, and feedback without hidden tests."""

import re

from nbgrader.preprocessors import NbGraderPreprocessor
from traitlets import Integer

BEGIN, END = "### BEGIN HIDDEN TESTS", "### END HIDDEN TESTS"
HIDDEN = re.compile(f"{BEGIN}\n(.*?)\n{END}", re.DOTALL)

# The checkers as they are on disk, whatever the cells above did to those in memory; they and what compares
# numbers must still reject what is wrong
FRESH = """import importlib, sys
import torch
for _name in [name for name in sys.modules if name.startswith("helpers.check")]:
    del sys.modules[_name]
checks = importlib.import_module("helpers.checks")
assert checks.centring.hint(lambda n: [[0.0] * n] * n), "the checkers were tampered with"
assert not torch.allclose(torch.ones(2), torch.zeros(2)), "torch was tampered with"
"""


class PlantSeed(NbGraderPreprocessor):
    """At release, the teacher's seed takes the place of `seed=0` in hidden tests."""

    seed = Integer(-1, help="draws the hidden cases; keep it to yourself").tag(config=True)

    def preprocess(self, nb, resources):
        if self.seed < 0:
            raise ValueError("no seed for the hidden cases: release with `make assignments SEED=…`")
        return super().preprocess(nb, resources)

    def preprocess_cell(self, cell, resources, index):
        def planted(found):
            body = re.sub(r"\bseed=0\b", f"seed={self.seed}", found[1])
            return f"{BEGIN}\n{FRESH}{body}\n{END}"

        cell.source = HIDDEN.sub(planted, cell.source)
        return cell, resources


class HideHiddenTests(NbGraderPreprocessor):
    """In feedback a hidden test leaves only its last line, the hint: no code, no seed, no traceback."""

    def preprocess_cell(self, cell, resources, index):
        if HIDDEN.search(cell.source):
            cell.source = HIDDEN.sub("# (hidden tests)", cell.source)
            for output in cell.get("outputs", []):
                if output.output_type == "error":
                    output.traceback = [f"{output.ename}: {output.evalue}"]
        return cell, resources
