# `make train` and `make test` need Python 3.11 or newer and a package index; `.venv` is made once.
PYTHON ?= python3
VENV := .venv
RUN := $(VENV)/bin/python
SIDE_BY_SIDE := --numprocesses auto --maxprocesses 4 --dist loadfile

.PHONY: train test smoke slow lint clean

train: $(VENV)/.plot
	$(RUN) -m nnxtrain.train configs/quickstart.yml

test: $(VENV)/.test
	$(RUN) -m pytest $(SIDE_BY_SIDE)

smoke: $(VENV)/.test $(VENV)/.tpu
	$(RUN) -m pytest -m tpu_smoke

slow: $(VENV)/.test
	$(RUN) -m pytest -m slow $(SIDE_BY_SIDE)

lint: $(VENV)/.dev
	$(RUN) -m ruff format --check .
	$(RUN) -m ruff check .
	$(RUN) -m mypy
	$(RUN) tools/check_floors.py

clean:
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache

$(VENV)/bin/python:
	$(PYTHON) -m venv $(VENV)

# a stamp for each extra, renewed when the dependencies change
$(VENV)/.%: pyproject.toml | $(VENV)/bin/python
	$(RUN) -m pip install --quiet --disable-pip-version-check --editable '.[$*]'
	@touch $@
