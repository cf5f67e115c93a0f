# Every target sets up .venv by itself when pyproject.toml or the pinned packages changed. `make help` lists them.
# Another Python: make setup PYTHON=/path/to/python3.12

.DEFAULT_GOAL := help
SHELL := /bin/sh

ifdef PYTHON
CANDIDATES := $(PYTHON)
else
CANDIDATES := python3 python3.13 python3.12 python3.11 python3.10
endif

VENV := .venv
PY := $(VENV)/bin/python
SUM := $(shell cat pyproject.toml constraints.txt requirements.lock requirements-train.lock | cksum | tr ' \t' '--')
STAMP := $(VENV)/.setup-$(SUM)
TRAINS := $(VENV)/.trains-$(SUM)
TORCH := $(shell sed -n '/^torch==/p' constraints.txt)
PIP := $(PY) -m pip install --disable-pip-version-check
PYTORCH := $(PIP) --no-compile -c constraints.txt
# Without an NVIDIA card: the build without CUDA, from the usual index where that is a mirror of both, or PyTorch's own.
CPU_INDEX := https://download.pytorch.org/whl/cpu
TORCH_NEEDS := filelock fsspec jinja2 networkx setuptools sympy typing-extensions
INDEX := https://pypi.org/simple
TOO_OLD := import sys; sys.exit(sys.version_info < (3, 10))

.PHONY: help setup demo wizard test test-fast conformance site lint format lock lab lab-test bench clean

help: ## this list
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/make \1|\2/p' Makefile | awk -F'|' '{printf "%-16s %s\n", $$1, $$2}'

setup: $(STAMP) ## make .venv and install everything (quick when it is there)
	@$(if $(filter setup,$(MAKECMDGOALS)),echo "Done. Next: $(VENV)/bin/muster opens the guided set-up",:)

# Python compiles what it imports: all of it beforehand would take pip another half a minute.
define install
	@found=; if [ ! -x $(PY) ]; then \
	    for python in $(CANDIDATES); do \
	        if "$$python" -c '$(TOO_OLD)' 2>/dev/null; then found=$$python; break; fi; \
	    done; \
	    if [ -z "$$found" ]; then \
	        echo "No Python 3.10 or newer among: $(CANDIDATES). Install one, or: make setup PYTHON=/path/to/python3" >&2; exit 2; \
	    fi; \
	    echo "Making $(VENV) with $$found"; \
	    "$$found" -m venv $(VENV) || { rm -rf $(VENV); \
	        echo "Python has no working venv module (Debian, Ubuntu: apt install python3-venv)." >&2; exit 2; }; \
	fi
	@echo "Installing the pinned packages, checked by their hashes. pip says nothing for a minute or more"
	@$(PIP) --quiet --no-compile --no-deps --require-hashes --only-binary :all: -r $(1)
	@echo "Now PyTorch (the first time takes some minutes)"
	@if [ "$$(uname)" != Linux ] || command -v nvidia-smi >/dev/null; then \
	    $(PYTORCH) '$(TORCH)'; \
	else \
	    $(PYTORCH) --quiet '$(TORCH)+cpu' 2>/dev/null || $(PYTORCH) --index-url $(CPU_INDEX) '$(TORCH)' || \
	    { echo "Taking the build for NVIDIA cards instead, 4 GB more"; $(PYTORCH) '$(TORCH)'; }; \
	fi
	@$(PIP) --quiet --no-deps --no-build-isolation -e .
endef

$(STAMP):
	$(call install,requirements.lock)
	@rm -f $(VENV)/.setup-* $(VENV)/.trains-* && touch $(STAMP) $(TRAINS)

$(TRAINS):
	$(call install,requirements-train.lock)
	@rm -f $(VENV)/.setup-* $(VENV)/.trains-* && touch $(TRAINS)

demo: $(TRAINS) ## the main job on this machine as two workers: training, WER before and after, the model
	@$(VENV)/bin/muster train demo --local 2 --strategy diloco

wizard: setup ## guided set-up
	@$(VENV)/bin/muster wizard

test: setup ## all tests side by side; those that measure on the lab's network one by one
	$(PY) -m pytest -n auto --dist worksteal -m "not alone"
	$(PY) -m pytest -m alone

test-fast: setup ## the tests that take seconds
	$(PY) -m pytest -n auto -m "not slow and not lab"

conformance: setup ## PyTorch's own suite for process groups, over the mesh
	$(PY) -m pytest -q tests/exchange/conformance.py

site: setup ## the documents as a site, into build/site
	@$(PIP) --quiet -c constraints.txt --no-build-isolation -e '.[site]'
	@mkdir -p build && $(VENV)/bin/zensical build --clean --strict >build/site.log 2>&1 && ! grep -q griffe build/site.log || \
	    { cat build/site.log; exit 1; }

lint: setup ## style, formatting, types, import directions
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy
	$(VENV)/bin/lint-imports

format: setup ## put the code into the house style
	$(VENV)/bin/ruff check --fix .
	$(VENV)/bin/ruff format .

define compile
	sed -n '/^# /p' $(1) >.lock.new/lock && .lock.new/bin/uv pip compile --quiet --universal --python-version 3.10 \
	    --no-annotate --no-header --generate-hashes --default-index $(INDEX) --excludes .lock.new/excluded \
	    -c constraints.txt --extra train $(2) pyproject.toml .lock.new/besides >>.lock.new/lock && mv .lock.new/lock $(1)
endef

lock: setup ## write both requirements locks anew, after a change of constraints.txt (needs internet)
	@rm -rf .lock.new && mkdir .lock.new && echo torch >.lock.new/excluded && printf '%s\n' $(TORCH_NEEDS) >.lock.new/besides
	@$(PIP) --quiet --target .lock.new --no-deps --require-hashes -r distributed/preparation/uv.txt
	@{ $(call compile,requirements.lock,--extra dev) && $(call compile,requirements-train.lock); }; \
	    status=$$?; rm -rf .lock.new; exit $$status

lab: setup ## a network of three real hosts to try things by hand (Linux, root)
	$(PY) -m tests.lab up a b c

lab-test: setup ## tests on a network of real hosts (Linux, root)
	$(PY) -m pytest -n auto --dist worksteal -m "lab and not alone"
	$(PY) -m pytest -m alone

bench: setup ## all benchmarks; the results are in docs/inside/performance.md
	@for script in $$(grep -l __main__ benchmarks/*.py); do echo "== $$script"; $(PY) $$script || exit 1; done

clean: ## remove .venv, caches and build leftovers (runs under output/ stay)
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache .grimp_cache build dist *.egg-info
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
