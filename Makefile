PYTHON ?= python3.11
BIN := .venv/bin

.PHONY: quickstart test lint test-emulated test-sglang test-sglang-slice contracts test-gpu bench-gpu

quickstart: .venv/installed  ## make a small model and train it with INT8 rollouts, ACR and TP2
	$(BIN)/qurl train launch/recipes/quickstart.toml

test: .venv/installed  ## run every test that needs no more than this environment
	$(BIN)/python -m pytest -n 2 $(BY_FILE) tests/integration tests/distributed tests/unit

# A file's tests share what it makes, so they stay together; the longest come first.
BY_FILE := --dist loadfile --no-loadscope-reorder

test-sglang: .venv/installed .venv-sglang/installed  ## run the tests on real SGLang servers, 15 minutes
	$(BIN)/python -m pytest tests/sglang

test-sglang-slice: .venv/installed .venv-sglang/installed  ## those of them that CI has time for
	$(BIN)/python -m pytest -m slice tests/sglang

lint: .venv/installed
	$(BIN)/ruff check . && $(BIN)/ruff format --check .

# torch comes first and by itself: the build that suits the machine brings what it needs.
.venv/installed: requirements/cpu.txt setup.py
	$(PYTHON) -m venv .venv
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
