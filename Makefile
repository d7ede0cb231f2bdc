# make train    installs what is needed into .venv and trains with the ring
# make test     the same, then runs every check

PYTHON ?= python3
VENV := .venv/bin

.PHONY: train test clean

train: .venv/installed
	$(VENV)/python train.py --strategy ring_all_reduce

test: .venv/installed-dev
	$(VENV)/ruff check .
	$(VENV)/ruff format --check .
	$(VENV)/mypy
	$(VENV)/python -m pytest

.venv/installed: requirements.txt
	test -x $(VENV)/python || $(PYTHON) -m venv .venv
	$(VENV)/python -m pip install -q -r requirements.txt
	touch $@

.venv/installed-dev: .venv/installed pyproject.toml
	$(VENV)/python -m pip install -q -e ".[dev]"
	touch $@

clean:
	rm -rf .venv
