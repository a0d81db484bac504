# Every target makes the environment that it needs, once: `.venv`, from requirements.lock.
# Where packages come from is pip's configuration; nothing is named here.

VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
CORPUS ?=
PEERS := .venv-peers
PEERS_STAMP := $(PEERS)/.installed
QUICK ?=
ONLY ?=
MINUTES ?= 30
SEED ?= 0
NUMBER ?= 330
SEEDS ?= 0 100
FAULTS ?= none
WORKERS ?= 5
# A file stays with one worker, for its fixtures; tests/conftest.py puts slow files first.
# Compiled modules are kept: else each of hundreds of processes compiles what it imports.
PYTEST = PYTHONDONTWRITEBYTECODE= OMP_NUM_THREADS=1 $(BIN)/python -m pytest \
	-n $(WORKERS) --dist loadfile --no-loadscope-reorder

# The first interpreter that runs, is recent enough and can make an environment. A name
# on the path is not enough: version managers leave names of interpreters that are absent.
PYTHON ?= $(shell for name in python3.11 python3; do \
	$$name -c 'import ensurepip, sys, venv; sys.exit(sys.version_info < (3, 11))' \
	2>/dev/null && echo $$name && break; done)

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help demo test test-core matrix mutants programs lint ci bench soak notebooks peers clean

help: ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## /{printf "make %-10s%s\n", $$1, $$2}' Makefile

demo: $(STAMP) ## from audio to word error rate; CORPUS=path/to/tree for your own speech
ifeq ($(strip $(CORPUS)),)
	$(BIN)/python -m recipes.demo --out runs/demo
else
	$(BIN)/python -m recipes.demo --corpus "$(CORPUS)" \
		--out "runs/demo-$$(basename "$(CORPUS)")"
endif

test: $(STAMP) ## all tests, in WORKERS=5 processes, which wait half of the time
	$(PYTEST)

test-core: $(STAMP) ## all tests but those of speech and of its recipes
	$(PYTEST) --ignore tests/asr --ignore tests/recipes

matrix: $(STAMP) ## a part of the tests with other versions; ONLY="floor newest" for some
	$(BIN)/python -m tests.matrix $(ONLY)

mutants: $(STAMP) ## do tests notice changes of the code? NUMBER=330 SEED=0; up to an hour
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.mutants --number $(NUMBER) --seed $(SEED)

programs: $(STAMP) ## random Lightning programs; SEEDS="0 100" FAULTS=none, raise or kill
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.programs --seeds $(SEEDS) --faults $(FAULTS)

lint: $(STAMP) ## formatting, rules, types
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/pyright

ci: lint test ## what continuous integration runs

bench: $(STAMP) ## measurements, each beside its limit: benchmarks/results; QUICK=1 for few
	$(BIN)/python -m benchmarks $(if $(strip $(QUICK)),--quick)

soak: $(STAMP) ## random faults of 8 super-learners, links, disks; MINUTES=30 SEED=0
	$(BIN)/python -m benchmarks.soak --minutes $(MINUTES) --seed $(SEED)

notebooks: $(STAMP) ## runs all notebooks and writes their outputs; ONLY="00 05" for some
	OMP_NUM_THREADS=1 $(BIN)/python -m notebooks.run $(ONLY)

.PHONY: docs
docs: $(STAMP) ## the documentation site, into site/; needs no network
	@NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict
	@echo "written: site/index.html"

peers: $(PEERS_STAMP) ## other libraries to compare with, in an environment of their own

clean: ## caches and logs; keeps .venv and runs/
	rm -rf build dist *.egg-info .pytest_cache .ruff_cache .hypothesis lightning_logs site
	find . -name __pycache__ -type d -not -path './.venv/*' -prune -exec rm -rf {} +

# It sees the packages of .venv, so that both sides run on the same torch.
$(PEERS_STAMP): $(STAMP) benchmarks/peers/requirements.txt
	@rm -f $@
	@$(PYTHON) -m venv $(PEERS)
	@$(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))' > \
		"$$($(PEERS)/bin/python -c 'import sysconfig; \
		print(sysconfig.get_path("purelib"))')/base.pth"
	@$(PEERS)/bin/python -m pip install -qq --disable-pip-version-check --no-deps \
		-r benchmarks/peers/requirements.txt
	@touch $@

# The stamp is the last thing written, so an interrupted installation is taken up again.
# Python compiles a file when it is first imported: all 14,000 at once take 40 s.
$(STAMP): requirements.lock pyproject.toml
	@test -n "$(PYTHON)" || { echo "error: Python 3.11 or later with venv is needed;" \
		"install it, or name one: make PYTHON=/path/to/python3.11" >&2; exit 1; }
	@echo "installing into $(VENV) what requirements.lock lists:" \
		"about 5 GB, nearly all of it torch and its libraries"
	@rm -f $@
	@$(PYTHON) -m venv $(VENV)
	@$(BIN)/python -m pip install -qq --disable-pip-version-check --no-compile \
		-r requirements.lock
	@$(BIN)/python -m pip install -qq --disable-pip-version-check \
		--no-deps --no-build-isolation -e .
	@touch $@
