# Every target sets up .venv by itself. The stamp's name holds a checksum of what was installed,
# so that a changed requirement, and nothing else, leads to a new installation.
SHELL := /bin/sh
.DEFAULT_GOAL := help

VENV := .venv
PY := $(VENV)/bin/python
LOCKED := -c constraints.txt
checksum = $(shell cat $(1) 2>/dev/null | cksum | cut -d' ' -f1)
READER := $(VENV)/.reader-$(call checksum,requirements.txt constraints.txt pyproject.toml)
TESTER := $(VENV)/.tester-$(call checksum,requirements.txt constraints.txt pyproject.toml tests/requirements.txt)

TEACHER := .venv-teacher
GRADER := $(TEACHER)/.ready-$(call checksum,constraints.txt notebooks/assignments/requirements.txt)

BENCH := .venv-bench
BENCHER := $(BENCH)/.ready-$(call checksum,constraints.txt tests/bench/requirements.txt)

# the first Python from 3.11 to 3.13 that can make a virtual environment
FITS := import ensurepip, sys, venv; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))
PYTHON ?= $(shell for p in python3 python3.13 python3.12 python3.11; do \
	$$p -c '$(FITS)' >/dev/null 2>&1 && echo $$p && break; done)

# one thread a process: figures and numbers are the same on every machine, and two notebooks run side by side
export OMP_NUM_THREADS := 1
unexport MPLBACKEND
export PIP_DISABLE_PIP_VERSION_CHECK := 1
export PYTHONHASHSEED := 0

WORKERS ?= 2
# on a shared machine (CI) the two cores may be lent to others for half of the time
SECONDS_PER_NOTEBOOK ?= $(if $(CI),120,60)
NOTEBOOKS = $(wildcard notebooks/[0-9]*.ipynb)

.PHONY: help book test lab train notebooks assignments bench venv clean
help:  ## this list
	@grep -E '^[a-z]+:.*## ' Makefile | sed 's/:.*## /\t/' | expand -t 12

book: $(READER)  ## re-execute what is out of date, build the book, print where it is
	@$(PY) book/tools/notebooks.py
	@echo "Building the book ..."
	@$(VENV)/bin/jupyter-book build . -W -n --keep-going -q
	@echo "The book is at $(CURDIR)/_build/html/index.html"

test: $(TESTER)  ## everything: style, helpers, notebooks, book; ends with a summary
	@failed=0; \
	echo "== 1/4 style";     $(PY) -m ruff check . || failed=1; \
	echo "== 2/4 helpers and tools"; $(MAKE) -s $(GRADER) || failed=1; \
	$(PY) -m pytest tests --ignore tests/test_book.py -n $(WORKERS) || failed=1; \
	if [ -n "$(NOTEBOOKS)" ]; then echo "== 3/4 notebooks, at most $(SECONDS_PER_NOTEBOOK) s each, two side by side"; \
	$(PY) -m pytest -p tests.notebook_budget --seconds-per-notebook $(SECONDS_PER_NOTEBOOK) \
		--nbval --nbval-current-env --nbval-cell-timeout 300 --nbval-sanitize-with tests/nbval_sanitize.cfg \
		-n $(WORKERS) --dist loadfile $(NOTEBOOKS) || failed=1; fi; \
	echo "== 4/4 the built book, in a browser"; $(PY) -m pytest tests/test_book.py || failed=1; \
	exit $$failed

lab: $(READER)  ## JupyterLab on the notebooks
	@$(PY) -m jupyterlab notebooks

train: $(READER)  ## train the lab's networks again, or NAMES="vit resnet"; goes on where it stopped
	@$(PY) -m helpers.train --resume $(or $(NAMES),vit resnet)

notebooks: $(READER)  ## re-execute every notebook, or ONLY="notebooks/02_cka.ipynb", and write stable outputs
	@$(PY) book/tools/notebooks.py --all $(ONLY)

assignments: $(GRADER)  ## the students' copies of the problem sets; SEED=4711 registers them for marking
	@$(TEACHER)/bin/python notebooks/assignments/release.py $(if $(SEED),--seed $(SEED))

bench: $(BENCHER)  ## cost and error of the measures beside other libraries', into book/benchmarks.md (an hour)
	@$(BENCH)/bin/python tests/bench/run.py $(BENCH_OPTIONS)

venv: $(PY)  ## an empty .venv: install a CPU build of torch there first if you want one
$(PY):
	@test -n "$(PYTHON)" || { echo "No Python from 3.11 to 3.13 with its venv module was found."; \
		echo "Install one (Debian: apt install python3-venv) or name it: make PYTHON=/path/to/python3.12"; exit 1; }
	@echo "Making $(VENV) with $$($(PYTHON) --version)"
	@$(PYTHON) -m venv $(VENV)

$(READER): | $(PY)
	@echo "Installing what the course needs (once; several minutes, about 6 GB with the CUDA build of torch) ..."
	@$(PY) -m pip install --no-compile $(LOCKED) -r requirements.txt
	@$(PY) -m pip install --no-deps -e .
	@rm -f $(VENV)/.reader-*; touch $@

$(TESTER): | $(READER)
	@$(PY) -m pip install --no-compile $(LOCKED) -r tests/requirements.txt
	@rm -f $(VENV)/.tester-*; touch $@

# nbgrader, apart from what readers need: an environment that sees the course's packages and adds its own
purelib = $$($(1) -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
SEES := import os, site; site.addsitedir("%s"); os.environ.setdefault("JUPYTER_PATH", "%s")\n
$(GRADER): | $(READER)
	@rm -rf $(TEACHER); $(PY) -m venv $(TEACHER)
	@printf '$(SEES)' "$(call purelib,$(PY))" "$(CURDIR)/$(VENV)/share/jupyter" \
		> "$(call purelib,$(TEACHER)/bin/python)/course.pth"
	@$(TEACHER)/bin/python -m pip install -q $(LOCKED) -r notebooks/assignments/requirements.txt
	@touch $@

# the libraries that `make bench` compares with, one by one: one that cannot be installed is left out of the page
$(BENCHER): | $(READER)
	@rm -rf $(BENCH); $(PY) -m venv $(BENCH)
	@printf '$(SEES)' "$(call purelib,$(PY))" "$(CURDIR)/$(VENV)/share/jupyter" \
		> "$(call purelib,$(BENCH)/bin/python)/course.pth"
	@grep -v '^#' tests/bench/requirements.txt | while read -r need reason; do \
		$(BENCH)/bin/python -m pip install -q --no-deps "$$need" </dev/null || echo "Not to be had here: $$need"; done
	@touch $@

clean:  ## remove what was built; keeps .venv, weights and notebooks
	rm -rf $(BENCH) _build .pytest_cache .ruff_cache .hypothesis *.egg-info
	find . -name __pycache__ -not -path './$(VENV)/*' -prune -exec rm -rf {} +
