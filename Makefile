# make demo: install, then the main job end to end.   make test: install, then the tests.
VENV ?= .venv
# What the environment is made with: 3.11 or newer, on a Mac for arm64.
PYTHON ?= python3
PY := $(VENV)/bin/python
# Test modules that run at once; each stack of the end-to-end tests takes about 2 GB.
JOBS ?= 3
# Modules in the order of their names, not by size: the few long tests of whole stacks come early.
PYTEST := $(PY) -m pytest -n $(JOBS) --dist loadfile --no-loadscope-reorder
STAMP := $(VENV)/.tandem-installed

.PHONY: demo test soak check clean

$(STAMP): pyproject.toml constraints.txt store/codec/scatter.c
	@test -x $(PY) || $(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "Tandem needs Python 3.11 or newer, and $(PYTHON) is `$(PYTHON) --version 2>&1`:" \
	    "name another one: make demo PYTHON=python3.13"; exit 1; }
	test -x $(PY) || $(PYTHON) -m venv $(VENV)
	@echo "installing into $(VENV): some minutes, and 2 GB of disk"
	$(PY) -m pip install --quiet --upgrade pip
	@# Without a compiler none is built, and one of before would stay.
	rm -f store/codec/_scatter*.so
	@# setuptools warns that folders may shadow a flat layout; tests/test_package.py watches that.
	PYTHONWARNINGS=ignore $(PY) -m pip install --quiet -c constraints.txt -e '.[dev]'
	touch $@

demo: $(STAMP)
	$(VENV)/bin/tandem demo

test: $(STAMP)
	$(PYTEST)

soak: $(STAMP)
	TANDEM_SOAK=1 $(PYTEST)

check: $(STAMP)
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy

clean:
	rm -rf $(VENV) build *.egg-info store/codec/*.so
