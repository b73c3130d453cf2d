# Everything runs in .venv, which the first target that needs it creates; nothing is installed outside of it.
#   make unit     set up, then the tests of what takes less than a second
#   make test     those, and the slow ones: processes, launchers, kills
#   make test-all   those, and all combinations and repetitions, and the tests of benchmarks
#   make test-benchmarks   the tests of the programs in benchmarks/
#   make mutations   bring back faults that were mended, and see that tests find each
#   make test-recipes   the small form of each recipe, plain and under its budget; PEFT and bitsandbytes, in a folder
#       of their own. What pages print of cards that are not here takes minutes more: pytest tests/recipes -k as_printed
#   make test-kernels   the tests that need triton, which a folder of its own gets (Linux; 285 MB once)
#   make test-low-bit   the tests that need torchao, which a folder of its own gets (26 MB once)
#   make test-torch RELEASE=2.11.0   the unit tests with another release of torch, in an environment of its own (5 GB
#       where its wheel brings CUDA)
#   make test-deepspeed   real DeepSpeed on CPUs, in an environment of its own
#   make test-frameworks   the tests with PEFT, TRL, timm, Lightning, sentence-transformers, diffusers and W&B, in an
#       environment of their own (600 MB once)
#   make test-phantom   the tests marked `gpu` and those of the phantom CUDA device, for which `make phantom` makes an
#       environment (the CUDA build of torch, 5 GB once; phantom/README.md)
#   make races   memwall's stream code on the phantom device: 500 random orders of work, and faults that have to be found
#   make gpu-day   all that needs a GPU, in 40 minutes: forecasts, kernels, live runs, link, phantom; one file, one page
#   make gpu-day-phantom   a little of that on the phantom device, simulated, in two minutes: it shows that nothing breaks
#   make fuzz FUZZ_SECONDS=60   look for files that a reader does not refuse in one clear error, by atheris (30 MB once);
#       READERS="trace plan" takes those alone, and without FUZZ_SECONDS each takes five minutes
#   make site     the pages as a site, by Sphinx, which a folder of its own gets: .venv/site/html/docs/site/index.html
#   make first-walk   as a newcomer: a new environment, the page docs/start.md, a script of one's own; three minutes
#   make faults   harm to training runs: failing allocations, signals, disks, clocks; forty minutes (benchmarks/faults.py)
#   make soak MINUTES=10   train for so long (two hours without it): memory, handles, threads and disk stay flat; with
#       ARGUMENTS=--scratch no results are written, as in .ci/run, where it has what the rest leaves of the cores
#   make reference   write docs/reference.md anew, from the code
#   make demo     set up, then a small GPT trained plain and under half of its memory

PYTHON ?= python3
TORCH ?= torch==2.13.0
# Where pip also looks for torch. On Linux the wheel of PyPI brings CUDA along; for the small CPU build say
#   make venv TORCH_INDEX=https://download.pytorch.org/whl/cpu
TORCH_INDEX ?=

BIN := .venv/bin
# Two processes of one thread each, which take whole files in the order of tests/conftest.py: it is made for two cores.
ON_TWO_CORES = --numprocesses 2 --dist loadfile --no-loadscope-reorder --max-worker-restart 0
PYTEST = OMP_NUM_THREADS=1 $(BIN)/python -m pytest $(ON_TWO_CORES)
STAMP := .venv/.installed
# Beside the other packages, not among them: torch imports triton wherever it finds one, and `make test` stays without.
TRITON := 3.9.0
TRITON_FOLDER := .venv/triton-$(TRITON)
# Beside them, too: transformers imports torchao wherever it finds one.
ATHERIS := 3.0.0
ATHERIS_FOLDER := .venv/atheris-$(ATHERIS)
FUZZ_FOLDER := .venv/fuzz
FUZZ_SECONDS := 300
READERS ?=
TORCHAO := 0.18.0
PEFT := 0.21.2
BITSANDBYTES := 0.50.2
PEFT_FOLDER := .venv/peft-$(PEFT)-$(BITSANDBYTES)
SPHINX := sphinx==9.0.4 myst-parser==5.2.0 furo==2025.12.19
SITE := .venv/site
FRAMEWORKS := .venv/frameworks
FRAMEWORK_PACKAGES := peft==0.21.2 bitsandbytes==0.50.2 trl==1.16.0 timm==1.0.31 lightning==2.6.6 sentence-transformers==6.2.0 diffusers==0.42.1 torch-geometric==2.8.1 wandb==0.31.0
FRAMEWORK_TESTS := $(addprefix tests/integrations/,$(addprefix test_,frameworks.py lightning.py hf_lora.py diffusers_spec.py) trainer/test_reports.py)
TORCHAO_FOLDER := .venv/torchao-$(TORCHAO)
LOW_BIT_TESTS := $(wildcard tests/apply/optimizer_state/test_low_bit*.py)
KERNEL_TESTS := tests/kernels/test_interpreter.py tests/kernels/test_ahead_of_time.py
# An environment on top of .venv: among its packages, DeepSpeed would be imported by every test of Accelerate's.
DEEPSPEED := .venv/deepspeed
DEEPSPEED_ENV := DS_ACCELERATOR=cpu TORCH_EXTENSIONS_DIR=$(CURDIR)/$(DEEPSPEED)/extensions PATH="$(CURDIR)/$(DEEPSPEED)/bin:$$PATH"
DEEPSPEED_OPS := AsyncIOBuilder CPUAdamBuilder ShareMemCommBuilder
# A CUDA build of torch over stub libraries, on top of .venv. Where an environment has that build and nvidia-cuda-crt
# already, `make phantom PHANTOM_BASE=ENVIRONMENT` takes it from there.
PHANTOM := .venv/phantom
PHANTOM_BASE ?=
PHANTOM_PYTEST = OMP_NUM_THREADS=1 PHANTOM_ENV=$(PHANTOM) phantom/run python -m pytest $(ON_TWO_CORES)
# A release of torch beside that of .venv: `make test-torch RELEASE=2.14.1`.
RELEASE ?= 2.11.0
MINUTES ?= 120
RELEASE_FOLDER = .venv/torch-$(RELEASE)
UNIT_TESTS = -m "not slow and not exhaustive and not benchmark and not gpu and not phantom and not cgroup and not deepspeed"
export PYTHONNOUSERSITE := 1
export PIP_DISABLE_PIP_VERSION_CHECK := 1
# Without files of bytecode each process that a test starts compiles memwall, and each run of pytest all tests.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: venv test-recipes fuzz faults soak site first-walk reference phantom test-phantom races test test-all test-benchmarks test-torch test-low-bit test-frameworks test-deepspeed deepspeed-arm test-kernels $(KERNEL_TESTS) unit lint types layers wheel demo compat bench-knobs bench-cap bench-low-bit bench-heap bench-recording bench-planner bench-prediction bench-allocator allocator-oracle gpu-kernels gpu-truth gpu-day gpu-day-phantom smallest-cap frontier against-deepspeed clean

venv: $(STAMP)

$(STAMP): pyproject.toml setup.py constraints.txt $(wildcard memwall/native/*.[ch] memwall/rows/native/*.c)
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	    { echo "make: $$($(PYTHON) --version) is too old; memwall needs 3.11 or newer: make venv PYTHON=python3.12" >&2; exit 1; }
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --constraint constraints.txt $(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX)) '$(TORCH)'
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev,hf,report]'
	touch $(STAMP)

test: $(STAMP)
	$(PYTEST) -m "not deepspeed and not exhaustive and not benchmark"

test-all: $(STAMP)
	$(PYTEST) -m "not deepspeed"

test-benchmarks: $(STAMP)
	$(PYTEST) -m "benchmark and not exhaustive" tests/benchmarks tests/kernels/test_gpu_benchmark.py

# Faults that the project has had are brought back one after the other; each has to be found.
mutations: $(STAMP)
	$(BIN)/python tests/mutations

# An environment on top of .venv, as DeepSpeed's. Of triton, which comes with torch's wheel, the unit tests stay without.
$(RELEASE_FOLDER)/.installed: | $(STAMP)
	$(BIN)/python -m venv $(RELEASE_FOLDER)
	$(RELEASE_FOLDER)/bin/python -m pip install --quiet $(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX)) torch==$(RELEASE)
	$(RELEASE_FOLDER)/bin/python -m pip uninstall --quiet --yes triton
	echo "import site; site.addsitedir('$$($(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')')" \
	    > "$$($(RELEASE_FOLDER)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/venv.pth"
	touch $@

test-torch: $(RELEASE_FOLDER)/.installed
	OMP_NUM_THREADS=1 $(RELEASE_FOLDER)/bin/python -m pytest $(ON_TWO_CORES) $(UNIT_TESTS)

# Compiles three operators once, which takes g++, the headers of Python and libaio, and about three minutes.
$(DEEPSPEED)/.installed: $(STAMP)
	$(BIN)/python -m venv $(DEEPSPEED)
	echo "import site; site.addsitedir('$$($(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')')" \
	    > "$$($(DEEPSPEED)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/venv.pth"
	$(DEEPSPEED)/bin/python -m pip install --quiet --constraint constraints.txt deepspeed ninja
	@# DeepSpeed asks for debug information, which is half of the compiler's time.
	printf '#!/bin/sh\nexec %s "$$@" -g0\n' "$$(command -v c++)" > $(DEEPSPEED)/bin/c++ && chmod +x $(DEEPSPEED)/bin/c++
	$(DEEPSPEED_ENV) $(DEEPSPEED)/bin/python -c 'from deepspeed.accelerator import get_accelerator as cpu; \
	    [cpu().create_op_builder(name).load(verbose=False) for name in "$(DEEPSPEED_OPS)".split()]'
	touch $@

test-deepspeed: $(DEEPSPEED)/.installed
	$(DEEPSPEED_ENV) $(DEEPSPEED)/bin/python -m pytest -m deepspeed tests/integrations/test_deepspeed_runs.py

# An environment on top of .venv, as DeepSpeed's: transformers imports several of them wherever it finds them.
$(FRAMEWORKS)/.installed: $(STAMP)
	$(BIN)/python -m venv $(FRAMEWORKS)
	echo "import site; site.addsitedir('$$($(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')')" \
	    > "$$($(FRAMEWORKS)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/venv.pth"
	$(FRAMEWORKS)/bin/python -m pip install --quiet --constraint constraints.txt $(FRAMEWORK_PACKAGES)
	@# PyPI's torchvision is for the build of torch with CUDA, and breaks transformers beside another one.
	$(FRAMEWORKS)/bin/python -c 'import torchvision' 2>/dev/null || $(FRAMEWORKS)/bin/python -m pip uninstall --quiet --yes torchvision
	touch $@

test-frameworks: $(FRAMEWORKS)/.installed
	OMP_NUM_THREADS=1 $(FRAMEWORKS)/bin/python -m pytest $(ON_TWO_CORES) -rs $(FRAMEWORK_TESTS)

phantom: $(PHANTOM)/.installed

$(PHANTOM)/.installed: $(wildcard phantom/*.py phantom/src/*) memwall/data/hardware.toml | $(STAMP)
	$(BIN)/python phantom/environment.py $(PHANTOM) --torch '$(TORCH)' $(if $(PHANTOM_BASE),--base $(PHANTOM_BASE))
	touch $@

# Status 77: the CUDA build cannot be had here, and a line has said why.
test-phantom: $(TORCHAO_FOLDER)/.installed | $(STAMP)
	@$(BIN)/python phantom/environment.py $(PHANTOM) --torch '$(TORCH)' $(if $(PHANTOM_BASE),--base $(PHANTOM_BASE)); \
	    status=$$?; [ $$status -ne 77 ] || exit 0; [ $$status -eq 0 ] || exit $$status; \
	    $(PHANTOM_PYTEST) -m "(gpu or phantom) and not exhaustive" tests && \
	    PYTHONPATH=$(CURDIR)/$(TORCHAO_FOLDER) $(PHANTOM_PYTEST) -m "gpu or phantom" $(LOW_BIT_TESTS)

# Stream code in random orders of work, and with faults brought back, on the phantom device.
races: $(PHANTOM)/.installed
	PHANTOM_ENV=$(PHANTOM) PHANTOM_NUMBERS=1 PHANTOM_ORDER=random OMP_NUM_THREADS=1 \
	    phantom/run python tests/phantom/race_finder.py $(ARGUMENTS)

deepspeed-arm: $(DEEPSPEED)/.installed
	$(DEEPSPEED_ENV) $(DEEPSPEED)/bin/python benchmarks/deepspeed_arm.py $(ARM)

# Coverage-guided; FUZZ_SECONDS for each reader, what fails lies in $(FUZZ_FOLDER)/crashes.
fuzz: $(ATHERIS_FOLDER)/.installed
	PYTHONPATH=$(CURDIR)/$(ATHERIS_FOLDER) $(BIN)/python benchmarks/fuzzing.py $(READERS) --seconds $(FUZZ_SECONDS) \
	    --folder $(FUZZ_FOLDER)

$(ATHERIS_FOLDER)/.installed: | $(STAMP)
	$(BIN)/python -m pip install --quiet --no-deps --upgrade --target $(ATHERIS_FOLDER) atheris==$(ATHERIS)
	touch $@

test-kernels: $(TRITON_FOLDER)/.installed
	$(MAKE) --no-print-directory --jobs=2 --output-sync $(KERNEL_TESTS)

$(KERNEL_TESTS): $(TRITON_FOLDER)/.installed
	PYTHONPATH=$(CURDIR)/$(TRITON_FOLDER) $(BIN)/python -m pytest $@

$(TRITON_FOLDER)/.installed: | $(STAMP)
	$(BIN)/python -m pip install --quiet --no-deps --upgrade --target $(TRITON_FOLDER) triton==$(TRITON)
	touch $@

test-low-bit: $(TORCHAO_FOLDER)/.installed
	OMP_NUM_THREADS=1 PYTHONPATH=$(CURDIR)/$(TORCHAO_FOLDER) $(BIN)/python -m pytest $(LOW_BIT_TESTS)

$(TORCHAO_FOLDER)/.installed: | $(STAMP)
	$(BIN)/python -m pip install --quiet --no-deps --upgrade --target $(TORCHAO_FOLDER) torchao==$(TORCHAO)
	touch $@

# transformers imports these wherever it finds them, so only these tests do. All are of one file: each worker takes the
# next test instead.
test-recipes: $(PEFT_FOLDER)/.installed
	PYTHONPATH=$(CURDIR)/$(PEFT_FOLDER) $(PYTEST) --dist load tests/recipes -k 'not as_printed'

$(PEFT_FOLDER)/.installed: | $(STAMP)
	$(BIN)/python -m pip install --quiet --no-deps --upgrade --target $(PEFT_FOLDER) peft==$(PEFT) bitsandbytes==$(BITSANDBYTES)
	touch $@

unit: $(STAMP)
	$(PYTEST) $(UNIT_TESTS)

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(STAMP)
	$(BIN)/mypy

layers: $(STAMP)
	$(BIN)/lint-imports

# A link that leads nowhere, or a page that no list names, ends it.
site: $(SITE)/.installed
	rm -rf $(SITE)/html
	PYTHONPATH=$(CURDIR)/$(SITE)/tools $(BIN)/python -m sphinx --quiet --nitpicky --fail-on-warning --keep-going \
	    --doctree-dir $(SITE)/doctrees --conf-dir docs/site . $(SITE)/html

$(SITE)/.installed: Makefile | $(STAMP)
	$(BIN)/python -m pip install --quiet --upgrade --target $(SITE)/tools $(SPHINX)
	touch $@

first-walk: $(STAMP)
	TORCH='$(TORCH)' TORCH_INDEX='$(TORCH_INDEX)' $(BIN)/python -m pytest tests/test_first_walk.py

faults: $(STAMP)
	OMP_NUM_THREADS=1 $(BIN)/python benchmarks/faults.py allocations signals file-systems clocks resumes fits

soak: $(STAMP)
	OMP_NUM_THREADS=1 $(BIN)/python benchmarks/faults.py soak --minutes $(MINUTES) $(ARGUMENTS)

reference: $(STAMP)
	$(BIN)/python .ci/reference.py

# The source distribution and the wheels for Linux. Beside them, too: nobody but this needs a compiler for other machines.
ZIGLANG := 0.17.1
AUDITWHEEL := 6.8.2
RELEASE_FOLDER := .venv/release-$(ZIGLANG)-$(AUDITWHEEL)
$(RELEASE_FOLDER)/.installed: $(STAMP)
	$(BIN)/python -m pip install --quiet --target $(RELEASE_FOLDER) ziglang==$(ZIGLANG) auditwheel==$(AUDITWHEEL)
	touch $@

wheel: $(RELEASE_FOLDER)/.installed
	rm -rf build dist
	$(BIN)/python .ci/wheels.py $(RELEASE_FOLDER) dist

demo: $(STAMP)
	$(BIN)/memwall demo

# Scripts of every kind, free, at 70 % of that and at the smallest budget that they are told; half an hour.
compat: $(STAMP)
	$(BIN)/python benchmarks/compat.py

bench-knobs: $(STAMP)
	$(BIN)/python benchmarks/knobs.py

bench-cap: $(STAMP)
	$(BIN)/python benchmarks/cap.py

# The least memory under which cases of the zoo finish; needs the right to make a memory control group.
smallest-cap: $(STAMP)
	$(BIN)/python benchmarks/smallest_cap.py

bench-low-bit: $(TORCHAO_FOLDER)/.installed
	PYTHONPATH=$(CURDIR)/$(TORCHAO_FOLDER) $(BIN)/python benchmarks/low_bit_state.py

# The largest model under a cap, and the same model beside DeepSpeed; the right to make a memory control group, as
# above, root for the arm with swap, and for ARM="--disk DIR" a disk with room: benchmarks/README.md says how much.
frontier: $(DEEPSPEED)/.installed
	$(BIN)/python benchmarks/frontier.py $(ARM)

against-deepspeed: $(DEEPSPEED)/.installed
	$(BIN)/python benchmarks/against_deepspeed.py $(ARM)

bench-heap: $(STAMP)
	$(BIN)/python benchmarks/heap.py

bench-recording: $(STAMP)
	$(BIN)/python benchmarks/recording_cost.py

bench-planner: $(STAMP)
	$(BIN)/python benchmarks/planner.py

bench-prediction: $(STAMP)
	$(BIN)/python benchmarks/prediction.py --part cpu

bench-allocator: $(STAMP)
	$(BIN)/python benchmarks/allocator_speed.py

# torch's own CUDA allocator over a stub of the runtime, against the simulator; needs g++ and, once, the package index.
allocator-oracle: $(STAMP)
	$(BIN)/python -m benchmarks.allocator_oracle --torch 2.13.0 --check

# These need a CUDA device; elsewhere they say so and write nothing.
gpu-kernels: $(STAMP)
	$(BIN)/python benchmarks/gpu_kernels.py

gpu-truth: $(STAMP)
	$(BIN)/python benchmarks/gpu_truth.py

# Says what failed and goes on; a second call does what failed or was not reached.
gpu-day: $(STAMP)
	$(BIN)/python benchmarks/gpu_day.py $(ARGUMENTS)

gpu-day-phantom: $(PHANTOM)/.installed
	PHANTOM_ENV=$(PHANTOM) PHANTOM_ORDER=timed OMP_NUM_THREADS=1 \
	    phantom/run python benchmarks/gpu_day.py --tiny --again --output out/gpu-day $(ARGUMENTS)

clean:
	rm -f memwall/native/*.so memwall/rows/native/*.so
	rm -rf .venv build dist out *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
