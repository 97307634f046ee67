# Every target sets up what it needs in .venv; a second call is quick.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/pip --disable-pip-version-check -q
NATIVE := CMakeLists.txt pyproject.toml $(wildcard native/src/*.?pp native/src/*/*.?pp native/src/*/*.inl)
# The CPU build of torch is the correctness reference of the tests; nothing else needs it.
TORCH ?= torch==2.13.0

.PHONY: demo test test-long sanitize lint format docs bench clean

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

# The documentation as a site in build/site; a link that leads nowhere ends it.
docs: $(VENV)/.docs
	$(BIN)/mkdocs build --strict --quiet --site-dir build/site

# The kernels' and the engine's tests with address and undefined-behaviour sanitizers in the extension.
SANITIZED := build/sanitize
sanitize: $(VENV)/.dev
	$(BIN)/cmake -S . -B $(SANITIZED) -G Ninja -DCMAKE_MAKE_PROGRAM=$(abspath $(BIN))/ninja \
	  -DPython_EXECUTABLE=$(abspath $(BIN))/python -DSLIPSTREAM_SANITIZE=ON > /dev/null
	$(BIN)/cmake --build $(SANITIZED) > $(SANITIZED)/log || (tail -30 $(SANITIZED)/log; exit 1)
	rm -rf $(SANITIZED)/src && cp -r src $(SANITIZED)/src
	rm -f $(SANITIZED)/src/slipstream/kernels/native/*.so
	cp $(SANITIZED)/_native*.so $(SANITIZED)/src/slipstream/kernels/native/
	LD_PRELOAD="$$($(CXX) -print-file-name=libasan.so) $$($(CXX) -print-file-name=libubsan.so)" \
	  ASAN_OPTIONS=detect_leaks=0 $(BIN)/python native/sanitized_tests.py $(SANITIZED)/src \
	  tests/kernels tests/engine tests/weights/test_dequantize.py tests/speculation/test_layouts.py \
	  tests/speculation/test_state.py tests/speculation/test_suffix.py \
	  -k "not torch and not forced and not device" -p no:cacheprovider

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

$(VENV)/.docs: $(VENV)/.base
	$(PIP) install --no-build-isolation -e ".[docs]"
	touch $@

clean:
	rm -rf $(VENV) build dist src/slipstream/kernels/native/*.so
