PYTHON ?= python3.11
# Another Python, and the megatron-core that is newest for it, stay apart: .venv-python3.12.
OTHER := $(addprefix -,$(filter-out python3.11,$(notdir $(PYTHON))))
VENV := .venv$(OTHER)
TRITON := .triton$(OTHER)
BIN := $(VENV)/bin

# Where it is set, each of a run's processes compiles the package anew.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: quickstart test test-emulated test-nodes test-image test-slurm test-slurm-slice
.PHONY: test-triton test-sglang test-sglang-slice contracts test-gpu gpu-hour unchanged pictures lint

quickstart: $(VENV)/installed  ## make a small model and train it with INT8 rollouts, ACR and TP2
	$(BIN)/qurl train launch/recipes/quickstart.toml
	@echo "From here: source $(BIN)/activate, so that the shell finds qurl (or call $(BIN)/qurl); docs/your_own.md goes on"

# A file's tests share what it makes, so they stay together; the longest come first.
BY_FILE := --dist loadfile --no-loadscope-reorder

test: $(VENV)/installed  ## run every test that needs no more than this environment
	$(BIN)/python -m pytest -n 2 $(BY_FILE) tests/integration tests/distributed tests/unit

# Tiers that need more; docs/gpu.md says what each shows.

GPUS := env PYTHONPATH=$(CURDIR)/tests/emulated_cuda EMULATED_CUDA_DEVICES=4 EMULATED_CUDA_POISON=1

test-emulated: $(VENV)/installed  ## the CUDA and NCCL paths on emulated GPUs, 10 minutes; needs g++
	@if $(BIN)/python tests/emulated_cuda/emulated_cuda/build.py; then set -ex; \
	  $(GPUS) OMP_NUM_THREADS=1 $(BIN)/python -m pytest tests/emulated_cuda/checks; \
	  $(GPUS) OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 -k nccl tests/distributed; \
	  $(BIN)/python -m pytest -n 2 $(BY_FILE) tests/emulated; \
	else [ $$? -eq 2 ]; fi  # it has said why there are none

# Triton lies beside .venv and not in it: nothing else is to find it on a machine without GPUs. The
# options make its interpreter round as GPUs do, and take tests of the CPU's path along.
test-triton: $(VENV)/installed $(TRITON)/installed  ## the GPU kernels in Triton's interpreter, and compiled, 1 minute
	env PYTHONPATH=$(CURDIR):$(CURDIR)/$(TRITON) TRITON_INTERPRET=1 OMP_NUM_THREADS=1 \
	  $(BIN)/python -m pytest -n 2 -p tests.triton.interpreter -m "not gpu" tests/triton \
	  tests/unit/test_algo_log_probs.py tests/distributed/test_token_log_probs.py

$(TRITON)/installed: requirements/triton.txt | $(VENV)/installed
	rm -rf $(TRITON)
	$(BIN)/pip install --quiet --disable-pip-version-check --no-deps --target $(TRITON) -r $<
	touch $@

test-nodes: $(VENV)/installed  ## several nodes as network namespaces; needs root, iproute2
	$(BIN)/python -m pytest tests/nodes

# IMAGE_BIND names what pip needs of this machine, as outside[:inside], such as /etc/pip.conf.
test-image: $(VENV)/installed  ## the image's script on a bare Debian, an hour, 25 GB; needs root, debootstrap
	env IMAGE_ROOT=$(or $(IMAGE_ROOT),$(CURDIR)/.image-root) $(BIN)/python -m pytest -s tests/image

test-slurm: $(VENV)/installed  ## jobs on a real Slurm of four nodes on this machine, 10 minutes; needs root
	$(BIN)/python -m tests.slurm.install
	$(BIN)/python -m pytest -n 2 --maxschedchunk=1 tests/slurm  # each process has a Slurm of its own

test-slurm-slice: $(VENV)/installed  ## those of them that CI has time for; where there is no Slurm, none
	-$(BIN)/python -m tests.slurm.install
	$(BIN)/python -m pytest -m slice tests/slurm

test-sglang: $(VENV)/installed .venv-sglang/installed  ## real SGLang servers without a GPU, 15 minutes
	$(BIN)/python -m pytest tests/sglang

test-sglang-slice: $(VENV)/installed .venv-sglang/installed  ## those of them that CI has time for
	$(BIN)/python -m pytest -m slice tests/sglang

contracts: $(VENV)/installed  ## look up in released packages whatever this one relies on
	$(BIN)/python -m tests.contracts.wheels
	$(BIN)/python -m pytest tests/contracts

TRAINER := .gpu-trainer$(OTHER)
ENGINES := .gpu-sglang$(OTHER)

.PHONY: test-gpu-env
test-gpu-env: $(TRAINER)/installed $(ENGINES)/installed  ## both environments for GPUs, where there is no GPU; 20 GB
	$(TRAINER)/bin/python -m pytest tests/gpu_env/test_trainer.py tests/gpu_env/test_contracts.py
	$(ENGINES)/bin/python -m pytest tests/gpu_env/test_engines.py tests/gpu_env/test_contracts.py

# By the commands of docs/gpu.md, those of the block that begins with the name of the file.
.gpu-%$(OTHER)/installed: requirements/gpu-%.txt
	$(PYTHON) -m venv $(@D)
	. $(@D)/bin/activate && sed -n '/^# requirements\/gpu-$*.txt/,/^```/{/^```/!p}' docs/gpu.md | sh -ex
	$(@D)/bin/pip install pytest pytest-timeout
	touch $@

# On a node with GPUs, in an environment made from requirements/gpu-trainer.txt; SGLANG_PYTHON names
# the Python of one made from requirements/gpu-sglang.txt.
GPU_PYTHON ?= python

test-gpu:  ## what only GPUs can tell, 15 minutes on 8 of them
	$(GPU_PYTHON) -m pytest -m gpu tests/unit
	$(GPU_PYTHON) -m pytest -k nccl tests/distributed tests/unit
	$(GPU_PYTHON) -m pytest -m gpu tests/triton
	$(GPU_PYTHON) -m pytest tests/gpu

# In pieces: started again, it goes on where it was; without a GPU it is a rehearsal on an emulated one.
gpu-hour:  ## what one GPU can tell in 25 minutes, the most worth knowing first
	$(GPU_PYTHON) -m benchmarks.gpu_hour $(if $(SGLANG_PYTHON),--sglang-python $(SGLANG_PYTHON)) \
	  $(if $(MINUTES),--minutes $(MINUTES)) $(if $(PARTS),--only $(PARTS))

unchanged: $(VENV)/installed  ## does this checkout compute what COMMIT does? 10 minutes
	$(BIN)/python -m tests.unchanged $(COMMIT)

pictures: $(VENV)/installed  ## draw docs/images anew, 2 minutes; needs Chromium
	$(BIN)/python docs/images/draw.py

lint: $(VENV)/installed  ## style, format and types; a minute, and seconds when it is run again
	$(BIN)/ruff check . && $(BIN)/ruff format --check . && $(BIN)/mypy

# torch comes first and by itself: the build that suits the machine brings what it needs.
# The last line also builds the embedded engine's decode step where there is a C++ compiler.
$(VENV)/installed: requirements/cpu.txt setup.py qurl_megatron/engines/embedded/decode.cpp
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check $$(grep '^torch==' requirements/cpu.txt)
	$(BIN)/pip install --quiet --disable-pip-version-check --no-deps -r requirements/cpu.txt
	$(BIN)/pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation -e .
	touch $@

# SGLang for machines without a GPU, apart from the trainer. pip leaves bytecode out where the
# environment forbids writing any, and without it every start of a server takes minutes. Some files
# of the packages are templates, not Python, hence the "|| true".
.PHONY: sglang
sglang: .venv-sglang/installed  ## install SGLang for engines on a machine without a GPU

SGLANG := .venv-sglang/bin/python
.venv-sglang/installed: requirements/sglang-cpu.txt setup.py
	$(PYTHON) -m venv .venv-sglang
	$(SGLANG) -m pip install --quiet --disable-pip-version-check $$(grep '^torch==' requirements/sglang-cpu.txt)
	$(SGLANG) -m pip install --quiet --disable-pip-version-check --no-deps -r requirements/sglang-cpu.txt
	$(SGLANG) -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation -e .
	env -u PYTHONDONTWRITEBYTECODE $(SGLANG) -m compileall -q -j 0 .venv-sglang/lib || true
	touch $@
