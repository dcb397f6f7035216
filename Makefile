PYTHON ?= python3
VENV ?= .venv
BIN = $(VENV)/bin

.DEFAULT_GOAL := help
.PHONY: help demo test lint format typecheck bench bench-peers clean

help: ## this list
	@sed -n 's/^\([a-z-]*\):[^#]*## \(.*\)/  make \1\t\2/p' $(MAKEFILE_LIST) | expand -t 20

demo: $(VENV)/demo.stamp ## stream text from a small model through an embedded broker
	@$(BIN)/plait demo

test: $(VENV)/dev.stamp ## all tests (they need Java 17 and Maven, for a real Kafka)
	@$(BIN)/python -m pytest -n 2 --dist loadfile

lint: $(VENV)/dev.stamp ## style
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .

format: $(VENV)/dev.stamp ## put the code into style
	@$(BIN)/ruff check --fix .
	@$(BIN)/ruff format .

# The rooms lie at the top level, and mypy finds packages by folder: a tree of links shows them as plait.*.
typecheck: $(VENV)/dev.stamp ## types of schemas/ and service/, strictly
	@mkdir -p build/link/plait
	@for room in schemas engine kernels service; do ln -sfn ../../../$$room build/link/plait/$$room; done
	@MYPYPATH=build/link $(BIN)/mypy -p plait.schemas -p plait.service

bench: $(VENV)/dev.stamp ## tokens per second, beside static batching and the machine's limit
	@$(BIN)/python -m benchmarks.bench

bench-peers: $(VENV)/bench.stamp ## the same beside OpenVINO GenAI, vLLM, llama.cpp and transformers, one at a time
	@$(BIN)/python -m benchmarks.peers

clean: ## remove what was built, the environment included
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "plait needs Python 3.11 or newer: make PYTHON=python3.12")'
	@$(PYTHON) -m venv $(VENV) || { rm -rf $(VENV); exit 1; }

$(VENV)/demo.stamp: pyproject.toml | $(BIN)/python
	@echo "Installing plait into $(VENV), once. PyTorch is large; this takes some minutes."
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[engine,embedded]'
	@touch $@

$(VENV)/dev.stamp: pyproject.toml | $(BIN)/python
	@echo "Installing plait and its tools into $(VENV), once. PyTorch is large; this takes some minutes."
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[dev]'
	@touch $@ $(VENV)/demo.stamp

$(VENV)/bench.stamp: pyproject.toml | $(VENV)/dev.stamp
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[dev,bench]'
	@touch $@ $(VENV)/demo.stamp $(VENV)/dev.stamp
