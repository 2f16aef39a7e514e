# make setup | demo | serve | test | lint | audit | clients        all take PYTHON=, serve also PORT= and MODEL=
PYTHON ?= python3
PORT ?= 8000
MODEL ?=
VENV := .venv
RUN := $(VENV)/bin/python
STAMP := $(VENV)/.ready
AUDIT := .cache/audit
CLIENTS := .cache/clients
LINT := $(VENV)/bin/ruff check . && $(VENV)/bin/ruff format --check . && $(VENV)/bin/mypy

# The tests start hundreds of processes, of which each would compile what it imports.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: setup demo serve test lint audit clients

setup: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "error: $(PYTHON) is too old, Gilir needs Python 3.11 or later: make PYTHON=python3.12 …"; exit 1; }
	@echo 'setting up $(VENV), which takes some minutes …'
	test -x $(RUN) || $(PYTHON) -m venv $(VENV)
	$(RUN) -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[dev]'
	touch $@

demo: $(STAMP)
	$(RUN) -m deploy.demo

serve: $(STAMP)
	@exec $(RUN) -m scheduler_svc.cli up --port $(PORT) $(if $(MODEL),--model $(MODEL))

# Linting takes turns with the tests, which wait now and then: hence also one worker more than there are cores.
test: $(STAMP)
	@($(LINT)) > $(VENV)/lint.log 2>&1 & lint=$$!; \
	$(RUN) -m pytest -n $$(($$(nproc) + 1)) --dist loadfile --no-loadscope-reorder; tests=$$?; \
	wait $$lint; linted=$$?; cat $(VENV)/lint.log; exit $$((tests || linted))

lint: $(STAMP)
	$(LINT)

# pip-audit stands in an environment of its own: what it brings along is no part of what it looks at.
audit: $(STAMP) $(AUDIT)/bin/pip-audit
	$(RUN) -m deploy.audit $(AUDIT)/bin/pip-audit

$(AUDIT)/bin/pip-audit:
	$(PYTHON) -m venv $(AUDIT)
	$(AUDIT)/bin/python -m pip install --quiet --disable-pip-version-check pip-audit==2.10.1

# Each client stands in an environment of its own: what it brings along is no part of Gilir, and may conflict with the others'.
clients: $(STAMP) $(patsubst tests/clients/requirements/%.txt,$(CLIENTS)/%/.ready,$(wildcard tests/clients/requirements/*.txt))
	$(RUN) -m pytest -m clients tests/clients

$(CLIENTS)/%/.ready: tests/clients/requirements/%.txt
	$(PYTHON) -m venv $(CLIENTS)/$*
	$(CLIENTS)/$*/bin/python -m pip install --quiet --disable-pip-version-check --requirement $<
	touch $@
