# The same lines that .ci/run calls; no logic of its own.
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin

.PHONY: predict test check fmt bench accuracy schemas docs clean

predict: $(VENV)/.ready
	$(BIN)/perfmodel predict --model dlrm.yaml --topo dgx.yaml

test: $(VENV)/.ready
	$(BIN)/python -m pytest -q -n 2 --dist worksteal

check: $(VENV)/.ready
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/perfmodel db check
	$(BIN)/python -m pytest -q tests/contract

fmt: $(VENV)/.ready
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

bench: $(VENV)/.ready
	$(BIN)/python -m pytest -q -m bench bench

accuracy: $(VENV)/.ready
	$(BIN)/python -m pytest -q -m slow

schemas: $(VENV)/.ready
	$(BIN)/python -c 'from perfmodel.config.schema import write_schemas; write_schemas()'

docs: $(VENV)/.docs
	$(BIN)/mkdocs build --strict --site-dir build/site

$(VENV)/.docs: $(VENV)/.ready
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[docs]'
	touch $@

$(VENV)/.ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev]'
	touch $@

clean:
	rm -rf $(VENV) build dist
