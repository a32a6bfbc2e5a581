# `make demo` and `make test` need only python3 >= 3.11; both set up .venv by themselves.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed
WORKERS ?= 2
CHROMIUM ?= $(shell command -v chromium || command -v chromium-browser)
EVERY  = -o addopts='-q --strict-markers --import-mode=importlib'
BROWSE = OMP_NUM_THREADS=1 $(BIN)/python -m pytest tests/browser -n $(WORKERS) --dist loadgroup $(EVERY)

.PHONY: help setup demo test test-slow test-browser test-oldest lint format audit clean docs docs-outputs

help:            ## what can be made
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*##/\t/'

$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "everybert needs Python 3.11 or newer; '$(PYTHON)' is older. Try: make PYTHON=python3.12 test"; exit 2; }
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt torch
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	touch $(STAMP)

setup: $(STAMP)  ## a local virtual environment with everything, pinned

demo: $(STAMP)   ## the main job, start to end, on this machine's CPU
	$(BIN)/everybert quickstart

test: $(STAMP)   ## style, types and the fast tests (what CI runs), in Chromium too where there is one
	$(BIN)/ruff check src tests benchmarks contrib docs recipes
	$(BIN)/ruff format --check src tests benchmarks contrib docs recipes
	$(BIN)/mypy
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(WORKERS)
	@if [ -n "$(CHROMIUM)" ]; then $(BROWSE) -m 'browser and not slow'; else \
	  echo "Left out: the playground's browser tests, for want of Chromium (Debian: apt-get install chromium; then: make test-browser)"; fi

test-slow: $(STAMP)  ## soak and big tests too
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m 'slow and not gpu and not browser' $(EVERY)

test-browser:    ## the playground in headless Chromium, every test; pictures in build/screenshots
	@test -x $(BIN)/python || { echo "test-browser: there is no $(VENV) yet; run: make setup"; exit 2; }
	@$(BIN)/python -c 'import playwright' 2>/dev/null || \
	  { echo "test-browser needs playwright: $(BIN)/pip install -c constraints.txt playwright"; exit 2; }
	@test -n "$(CHROMIUM)" || \
	  { echo "test-browser needs Chromium (Debian: apt-get install chromium), or CHROMIUM=/path/to/it make test-browser"; exit 2; }
	$(BROWSE)

docs: $(STAMP)   ## the documentation's site, into build/site
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet
	@echo "build/site/index.html"

docs-outputs: $(STAMP)  ## run the documentation's code and write what it prints beneath it (PAGES= some pages alone)
	OMP_NUM_THREADS=1 PYTHONPATH=tests/docs $(BIN)/python tests/docs/doc_pages.py $(PAGES)

OLDEST := model/test_config.py model/test_ragged.py text/test_readers.py text/test_windows.py test_files.py store/test_hub.py \
  store/test_card.py corpus/test_shards.py corpus/test_packs.py training/test_recipe.py \
  training/test_plan.py training/test_logs.py cli/test_use.py cli/test_pretrain.py

test-oldest:     ## what needs no transformers, with the oldest dependencies (constraints-oldest.txt), in build/oldest
	test -x build/oldest/bin/python || $(PYTHON) -m venv build/oldest
	build/oldest/bin/python -m pip install --quiet --disable-pip-version-check -c constraints-oldest.txt torch
	build/oldest/bin/python -m pip install --quiet --disable-pip-version-check -c constraints-oldest.txt \
	  -e '.[train,serve,viz,sentencepiece]' pytest pytest-xdist pytest-timeout hypothesis httpx pyyaml scikit-learn pandas
	OMP_NUM_THREADS=1 build/oldest/bin/python -m pytest -p no:cacheprovider -n $(WORKERS) $(addprefix tests/,$(OLDEST))

lint: $(STAMP)   ## style and types only
	$(BIN)/ruff check src tests benchmarks contrib docs recipes
	$(BIN)/ruff format --check src tests benchmarks contrib docs recipes
	$(BIN)/mypy

format: $(STAMP) ## rewrite to the house style
	$(BIN)/ruff check --fix src tests benchmarks contrib docs recipes
	$(BIN)/ruff format src tests benchmarks contrib docs recipes

audit: $(STAMP)  ## the pinned dependencies against the databases of known faults (asks PyPI); what cannot be looked up fails
	test -x $(BIN)/pip-audit || $(BIN)/python -m pip install --quiet --disable-pip-version-check pip-audit
	$(BIN)/pip-audit --strict --disable-pip --no-deps --progress-spinner off -r constraints.txt

clean:           ## remove the environment and caches
	rm -rf $(VENV) build dist .pytest_cache .mypy_cache .ruff_cache
