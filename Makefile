# Two commands do everything: `make demo` and `make test`. No root needed.

PYTHON ?= python3
VENV ?= .venv
BIN = $(VENV)/bin
# Twice quiet: errors alone, without the warnings of setuptools about every editable package.
PIP = $(BIN)/python -m pip install --quiet --quiet --disable-pip-version-check

.PHONY: demo install test parity test-arm test-opencl test-rusticl test-cuda lint format bench loc build clean

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
	$(PIP) --editable '.[dev,corpus]'
	@touch $@

# PyTorch takes part in the benchmarks only.
$(VENV)/.bench: $(VENV)/.installed pyproject.toml
	$(PIP) --editable '.[bench]'
	@touch $@

# PyTorch and transformers take part in these comparisons only.
$(VENV)/.parity: $(VENV)/.dev pyproject.toml
	$(PIP) --editable '.[parity]'
	@touch $@

test: install $(VENV)/.dev
	$(BIN)/python -m pytest -n 2

# The same numbers as PyTorch, and the same files as transformers.
parity: install $(VENV)/.parity
	$(BIN)/python -m pytest -m parity tests/parity

# The op table on 64-bit Arm, emulated; wants gcc-aarch64-linux-gnu and qemu-user.
test-arm: install $(VENV)/.dev
	$(BIN)/python -m pytest -m arm tests/test_arm.py

# The whole op table on OpenCL, and with the smallest work-groups; TREADLE_TEST_OPENCL names a device.
test-opencl: install $(VENV)/.dev
	TREADLE_OPENCL_ROWS=all $(BIN)/python -m pytest -n 2 tests/test_ops.py -k opencl
	TREADLE_OPENCL_GROUP=64 TREADLE_OPENCL_LOCAL=32768 TREADLE_OPENCL_VECTOR=1 \
		$(BIN)/python -m pytest -n 2 tests/test_opencl.py -k "not cuda_compiles"

# Some of it on rusticl, the driver of AMD's integrated GPUs, here by its software device.
test-rusticl: install $(VENV)/.dev
	RUSTICL_ENABLE=llvmpipe TREADLE_TEST_OPENCL=opencl:rusticl \
		$(BIN)/python -m pytest -n 2 tests/test_rusticl.py

# The op table and training on an NVIDIA GPU.
test-cuda: install $(VENV)/.cuda
	$(BIN)/python -m pytest -m cuda tests/test_cuda.py

$(VENV)/.cuda: $(VENV)/.dev pyproject.toml
	$(PIP) --editable '.[cuda,parity]'
	@touch $@

lint: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(VENV)/.dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: install $(VENV)/.bench
	$(BIN)/python bench/matmul.py
	$(BIN)/python bench/ops.py
	$(BIN)/python bench/train_cpu.py
	$(BIN)/python bench/sweep.py

# The part that is read, in lines that are neither blank nor comments.
LOC = treadle/graph/*.py treadle/ops/*.py treadle/passes/*.py treadle/models/*.py \
	$(addprefix treadle/train/,trainer.py session.py program.py schedule.py run.py signals.py)

loc:
	@grep -cHv '^ *\(#.*\)\?$$' $(LOC) | tr ':' '\t' | sort -k2n
	@cat $(LOC) | grep -cv '^ *\(#.*\)\?$$'

build: install

clean:
	rm -rf build dist *.egg-info treadle/backends/lib
