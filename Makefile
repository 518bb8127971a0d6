# Everything runs in .venv, which the first target to need it makes from this project's own files.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

# Some hosts advertise AMX without allowing it; oneDNN's bf16 kernels then die with SIGILL.
export ONEDNN_MAX_CPU_ISA ?= AVX512_CORE_BF16

.PHONY: demo test test-slow test-gpu lint setup clean

demo: setup
	$(BIN)/oscarkv demo --output oscarkv-demo.html

test: setup lint
	$(BIN)/pytest -q -m "not slow" --cov --cov-report=term

test-slow: setup
	$(BIN)/pytest -q -m slow --durations=10

# Every test that needs an NVIDIA GPU; without one they are skipped.
test-gpu: setup
	$(BIN)/pytest -q -m gpu --durations=10

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

setup: $(VENV)/.ready

$(VENV)/.ready: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "oscarkv needs Python 3.11 or newer; name one with: make PYTHON=python3.12 ..."; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[dev]"
	@touch $@

clean:
	rm -rf $(VENV) .coverage .pytest_cache .mypy_cache .ruff_cache oscarkv-demo.html
