# Every target sets up what it needs in .venv; a second call is quick.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/pip --disable-pip-version-check -q
NATIVE := CMakeLists.txt pyproject.toml $(wildcard native/src/*.?pp native/src/*/*.?pp native/src/*/*.inl)
# The CPU build of torch is the correctness reference of the tests; nothing else needs it.
TORCH ?= torch==2.13.0

.PHONY: demo test test-long lint format bench clean

demo: $(VENV)/.base
	$(BIN)/slipstream generate smollm2-135m --chat --seed 7 -p "Explain in three sentences why the sky is blue."

test: $(VENV)/.dev
	$(BIN)/python -m pytest

test-long: $(VENV)/.dev
	$(BIN)/python -m pytest -m long --durations=10

lint: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: $(VENV)/.dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(VENV)/.base
	$(BIN)/slipstream bench decode smollm2-135m
	$(BIN)/slipstream bench prefill smollm2-135m

$(VENV)/.tools:
	$(PYTHON) -m venv $(VENV)
	$(PIP) install "scikit-build-core>=0.11" "nanobind>=2.4" "cmake>=3.18" ninja
	touch $@

$(VENV)/.base: $(VENV)/.tools $(NATIVE)
	$(PIP) install --no-build-isolation -e .
	touch $@

$(VENV)/.dev: $(VENV)/.base
	$(PIP) install $(TORCH)
	$(PIP) install --no-build-isolation -e ".[dev]"
	touch $@

clean:
	rm -rf $(VENV) build dist src/slipstream/kernels/native/*.so
