# make train    installs the package and what it needs into .venv and trains with the ring
# make test     installs the checkers too and runs every check

PYTHON ?= python3
VENV := .venv/bin

.PHONY: train test clean

train: .venv/installed
	$(VENV)/python train.py --strategy ring_all_reduce

test: .venv/installed-dev
	$(VENV)/ruff check .
	$(VENV)/ruff format --check .
	$(VENV)/mypy
	$(VENV)/python -m pytest -n 3 --dist worksteal -m "not alone" --durations=20
	$(VENV)/python -m pytest -m alone

.venv/installed: requirements.txt pyproject.toml
	@$(PYTHON) -c "import sys; sys.exit(sys.version_info < (3, 11))" || \
		{ echo "Python 3.11 or newer is needed: make PYTHON=python3.12 ..."; exit 1; }
	$(VENV)/python -m pip --version > /dev/null 2>&1 || $(PYTHON) -m venv --clear .venv
	$(VENV)/python -m pip install -q -e ".[notebooks]"
	touch $@

.venv/installed-dev: .venv/installed
	$(VENV)/python -m pip install -q -e ".[dev]"
	touch $@

clean:
	rm -rf .venv
