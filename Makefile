# Everything runs in .venv, which the first target that needs it creates; nothing is installed outside of it.
#   make test     set up, then the whole test suite
#   make demo     set up, then a small GPT trained plain and under half of its memory

PYTHON ?= python3
TORCH ?= torch==2.13.0
# Where pip also looks for torch. On Linux the wheel of PyPI brings CUDA along; for the small CPU build say
#   make venv TORCH_INDEX=https://download.pytorch.org/whl/cpu
TORCH_INDEX ?=

BIN := .venv/bin
STAMP := .venv/.installed
export PYTHONNOUSERSITE := 1
export PIP_DISABLE_PIP_VERSION_CHECK := 1

.PHONY: venv test unit lint types layers wheel demo bench-knobs bench-cap bench-heap bench-recording bench-planner bench-prediction allocator-oracle gpu-kernels gpu-truth clean

venv: $(STAMP)

$(STAMP): pyproject.toml setup.py constraints.txt $(wildcard memwall/native/*.[ch])
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	    { echo "make: $$($(PYTHON) --version) is too old; memwall needs 3.11 or newer: make venv PYTHON=python3.12" >&2; exit 1; }
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --constraint constraints.txt $(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX)) '$(TORCH)'
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev,hf,report]'
	touch $(STAMP)

test: $(STAMP)
	$(BIN)/python -m pytest

unit: $(STAMP)
	$(BIN)/python -m pytest -m "not slow and not gpu and not cgroup"

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(STAMP)
	$(BIN)/mypy

layers: $(STAMP)
	$(BIN)/lint-imports

wheel: $(STAMP)
	rm -rf build dist
	$(BIN)/python -m build --wheel --outdir dist
	$(BIN)/python .ci/check_wheel.py dist/*.whl

demo: $(STAMP)
	$(BIN)/memwall demo

bench-knobs: $(STAMP)
	$(BIN)/python benchmarks/knobs.py

bench-cap: $(STAMP)
	$(BIN)/python benchmarks/cap.py

bench-heap: $(STAMP)
	$(BIN)/python benchmarks/heap.py

bench-recording: $(STAMP)
	$(BIN)/python benchmarks/recording_cost.py

bench-planner: $(STAMP)
	$(BIN)/python benchmarks/planner.py

bench-prediction: $(STAMP)
	$(BIN)/python benchmarks/prediction.py --part cpu

# torch's own CUDA allocator over a stub of the runtime, against the simulator; needs g++ and, once, the package index.
allocator-oracle: $(STAMP)
	$(BIN)/python -m benchmarks.allocator_oracle --torch 2.13.0 --check

# These need a CUDA device; elsewhere they say so and write nothing.
gpu-kernels: $(STAMP)
	$(BIN)/python benchmarks/gpu_kernels.py

gpu-truth: $(STAMP)
	$(BIN)/python benchmarks/gpu_truth.py

clean:
	rm -f memwall/native/*.so
	rm -rf .venv build dist out *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
