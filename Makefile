# The same lines that .ci/run calls; no logic of its own.
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
INTEROP ?= .venv-interop

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

interop: $(INTEROP)/.ready
	PYTHONPATH=. $(INTEROP)/bin/python -m pytest -q -p no:cacheprovider tests/interop

interop-bench: $(INTEROP)/.ready
	PYTHONPATH=. OMP_NUM_THREADS=1 $(INTEROP)/bin/python bench/torchrec_search.py

# TorchRec names the CUDA build of FBGEMM as its dependency, so its own dependencies are listed here.
$(INTEROP)/.ready: Makefile constraints.txt
	$(PYTHON) -m venv $(INTEROP)
	$(INTEROP)/bin/python -m pip install --quiet --constraint constraints.txt torch==2.13.0 numpy pyyaml pydantic click rich \
		networkx scipy scikit-learn numba joblib pytest hypothesis
	$(INTEROP)/bin/python -m pip install --quiet fbgemm-gpu-cpu==1.8.0
	$(INTEROP)/bin/python -m pip install --quiet --no-deps torchrec==1.8.0
	$(INTEROP)/bin/python -m pip install --quiet --constraint constraints.txt tensordict torchmetrics==1.0.3 tqdm pyre-extensions iopath
	touch $@

$(VENV)/.ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev]'
	touch $@

clean:
	rm -rf $(VENV) build dist
