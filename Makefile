# Two commands do everything: `make demo` and `make test`. No root needed.

PYTHON ?= python3
VENV ?= .venv
BIN = $(VENV)/bin
PIP = $(BIN)/python -m pip install --quiet --disable-pip-version-check

.PHONY: demo install test lint format bench loc build clean

demo: install
	$(BIN)/treadle demo

# The virtual environment with Treadle in it, kernels built; quick when nothing changed.
install: $(VENV)/.installed
	@$(BIN)/python -m treadle.backends.build

$(VENV)/.installed: pyproject.toml setup.py
	$(PYTHON) -m venv $(VENV)
	$(PIP) --upgrade pip
	$(PIP) --editable .
	@touch $@

$(VENV)/.dev: $(VENV)/.installed pyproject.toml
	$(PIP) --editable '.[dev]'
	@touch $@

test: install $(VENV)/.dev
	$(BIN)/python -m pytest -n 2

lint: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(VENV)/.dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: install
	$(BIN)/python bench/matmul.py
	$(BIN)/python bench/ops.py
	$(BIN)/python bench/train_cpu.py

# The part that is read: graph, ops, passes, models, trainer.
loc:
	@wc -l treadle/graph/*.py treadle/ops/*.py treadle/passes/*.py treadle/models/*.py \
		treadle/train/trainer.py treadle/train/session.py treadle/train/program.py \
		treadle/train/schedule.py

build: install

clean:
	rm -rf build dist *.egg-info treadle/backends/lib
