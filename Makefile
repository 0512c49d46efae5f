# Every target makes .venv by itself; nothing here needs a compiler.
#   make demo | test | lint | docs | bench | soak | mutants | clean       PYTHON=python3.12 make test       PYTEST_ARGS='-k netlab' make test
#   SOAK_SECONDS=3600 SOAK_SEED=7 make soak             SOAK='--kind elastic' make soak
#   BENCH='step --quick' make bench      BENCH= make bench    (hours)                 MUTANTS='--group codecs --sample 40' make mutants

PYTHON ?= python3
VENV   := .venv
STAMP  := $(VENV)/.installed
BIN    := $(VENV)/bin
BENCH  ?= allreduce startup step topk

.PHONY: demo test lint docs bench soak mutants clean
.DELETE_ON_ERROR:

demo: $(STAMP)
	$(BIN)/fusionrun -np 2 $(BIN)/python examples/digits.py

test: $(STAMP)
	$(BIN)/python -m pytest -n 4 --dist loadgroup $(PYTEST_ARGS)

lint: $(STAMP)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/python -m pytest -q tests/docs/test_prose.py

docs: $(STAMP)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

bench: $(STAMP)
	$(BIN)/python -m benchmarks $(BENCH)
	$(BIN)/python -m benchmarks.report

$(STAMP): setup.cfg pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev,docs,examples,bench]'
	touch $@

soak: $(STAMP)
	$(BIN)/python -m tests.faults.soak $(SOAK)

mutants: $(VENV)/.mutants
	$(BIN)/python -m tests.mutants $(MUTANTS)

$(VENV)/.mutants: $(STAMP)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[mutants]'
	touch $@

clean:
	rm -rf $(VENV) build dist *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
