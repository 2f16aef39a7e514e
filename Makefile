# make setup | demo | serve | test | lint        serve takes PORT= and MODEL=
PYTHON ?= python3
PORT ?= 8000
MODEL ?=
VENV := .venv
RUN := $(VENV)/bin/python
STAMP := $(VENV)/.ready

.PHONY: setup demo serve test lint

setup: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	test -x $(RUN) || $(PYTHON) -m venv $(VENV)
	$(RUN) -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[dev]'
	touch $@

demo: $(STAMP)
	$(RUN) -m deploy.demo

serve: $(STAMP)
	@exec $(RUN) -m deploy.serve --port $(PORT) $(if $(MODEL),--model $(MODEL))

test: $(STAMP) lint
	$(RUN) -m pytest -n auto --dist loadfile --no-loadscope-reorder

lint: $(STAMP)
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy
