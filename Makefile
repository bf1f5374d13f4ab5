# One environment in .venv, everything else through it. `make help` lists what there is.
#
# PYTHON       the Python to build the environment from (3.11 or newer; default: the first of 3.11 to 3.13 on the PATH)
# TORCH        the torch to install; 2.11 to 2.13 are supported, for example TORCH=torch==2.12.1
# TORCH_FLAGS  extra flags for pip when it installs torch. The default index serves a CUDA build of some gigabytes;
#              for the small CPU build add the index that pytorch.org names for it: TORCH_FLAGS="--extra-index-url ADDRESS"
# PYTEST_FLAGS extra flags for pytest, for example PYTEST_FLAGS="-x -k router"
# OLDEST_TESTS what `make test-oldest` runs (default: every test but the slow ones)
# TEST_PROCESSES  how many processes run tests side by side (default: 3; tests wait much, so two cores have room for them)

PYTHON ?=
TORCH ?= torch==2.13.0
TORCH_FLAGS ?=
PYTEST_FLAGS ?=
TEST_PROCESSES ?= 3
OLDEST_TESTS ?= tests

ifneq ($(words $(TORCH)) $(words $(filter $(foreach v,2.11 2.12 2.13,torch==$v torch==$v.%),$(TORCH))),1 1)
$(error TORCH is '$(TORCH)': write torch==VERSION with a version from 2.11 to 2.13, for example TORCH=torch==2.12.1)
endif

VENV := .venv
OLDEST := .venv-oldest
PY := $(VENV)/bin/python
PIP := $(PY) -m pip --disable-pip-version-check
SOURCES := antiphon tests benchmarks examples scripts
NATIVE_SOURCES := $(shell find csrc -type f 2>/dev/null)
# Tests of one module run in one process, because they share its fixtures.
PYTEST := $(PY) -m pytest --cache-clear --ignore=tests/test_imports.py --numprocesses=$(TEST_PROCESSES) --dist=loadscope --durations=10
# Tests beside each other can starve one. Those that failed run once more, alone; the output shows both runs.
AGAIN = || { [ $$? -eq 1 ] && echo "== failed tests again, alone" && \
	$(PY) -m pytest --ignore=tests/test_imports.py --last-failed --last-failed-no-failures=none $(1); }
LOCKED := from importlib.metadata import requires; \
	own = ('torch==', 'triton==') if any(r.startswith('triton') for r in requires('torch')) else ('torch==',); \
	print(*(line for line in open('requirements.lock') if not line.startswith(own)), sep='', end='')
YARDSTICK := out/yardstick-tiny

# Stamps live inside the environment, so that removing it removes what is known about it.
PYTHON_STAMP := $(VENV)/.python.stamp
TORCH_STAMP := $(VENV)/.$(subst =,-,$(TORCH)).stamp
PACKAGES_STAMP := $(VENV)/.packages.stamp
LIBFABRIC_STAMP := $(VENV)/.libfabric.stamp
NATIVE_STAMP := $(VENV)/.native.stamp
OLDEST_STAMP := $(OLDEST)/.packages.stamp

export PYTHONUNBUFFERED := 1

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help setup demo serve test test-all test-oldest lint format bench gpu-check ray-check clients-check peer-suite engines-check peers yardstick lock clean distclean

help:  ## list the commands
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## /\1\t/' | expand -t 14

setup: $(NATIVE_STAMP)  ## build the environment in .venv (packages and native code); a second time does nothing

demo: setup  ## serve the shipped model with attention and experts apart, ask it something, stop
	$(PY) examples/demo.py

serve: setup  ## the same server, left running
	$(VENV)/bin/antiphon serve examples/demo-moe --layout disaggregated

test: lint  ## lint, then every test but the slow ones
	@echo "== tests"
	$(PYTEST) -m "not slow" $(PYTEST_FLAGS) $(call AGAIN,-m "not slow" $(PYTEST_FLAGS))

test-all: test  ## test, then the slow ones: sanitizers, fuzzing, long chaos, whole matrices
	@echo "== slow tests"
	$(PYTEST) -m slow $(PYTEST_FLAGS) $(call AGAIN,-m slow $(PYTEST_FLAGS))

test-oldest: setup $(OLDEST_STAMP)  ## the tests with the oldest packages that pyproject.toml allows (in .venv-oldest; torch is .venv's)
	@echo "== tests with the oldest packages"
	$(subst $(PY),$(OLDEST)/bin/python,$(PYTEST) -m "not slow" $(PYTEST_FLAGS) $(OLDEST_TESTS) \
		$(call AGAIN,-m "not slow" $(PYTEST_FLAGS) $(OLDEST_TESTS)))

lint: setup  ## style, types, import order, file sizes
	@echo "== style"
	$(VENV)/bin/ruff check $(SOURCES)
	$(VENV)/bin/ruff check --preview --select PLW1514 $(filter-out tests,$(SOURCES))  # text files name their encoding
	$(VENV)/bin/ruff format --check $(SOURCES)
	@echo "== types"
	$(VENV)/bin/mypy --strict -p antiphon
	@echo "== import order"
	$(PY) -m pytest tests/test_imports.py
	@echo "== file sizes"
	$(PY) scripts/line_counts.py

format: setup  ## rewrite the sources in the project's style
	$(VENV)/bin/ruff check --fix $(SOURCES)
	$(VENV)/bin/ruff format $(SOURCES)

bench: setup $(YARDSTICK)/model.safetensors.index.json  ## time serving on a tiny random model
	$(VENV)/bin/antiphon bench serve $(YARDSTICK)

gpu-check: setup  ## check, then time, what needs a GPU, in parts; without one each part says why it skips
	$(PY) benchmarks/gpu_check.py

ray-check: setup  ## install Ray (79 MB) into .venv, then test serving on a cluster of two Ray nodes, and training
	$(PIP) install --quiet "ray[train]>=2.60"
	$(PY) -m pytest $(PYTEST_FLAGS) tests/serve/test_ray.py tests/train/test_launchers.py

clients-check: setup  ## run guidellm, vllm bench, lm-eval, LangChain, openai, anthropic, LiteLLM, Pydantic AI and Instructor against a server of ours (installs 7 GB)
	TORCH_FLAGS="$(TORCH_FLAGS)" $(PY) benchmarks/clients_check.py

engines-check: setup  ## give every command of plan --emit to the parsers of vLLM and SGLang (downloads 170 MB, installs nothing)
	$(PY) benchmarks/engines_check.py

peer-suite: setup  ## run the API tests of vLLM's source package (47 MB, fetched) against servers of ours
	$(PY) scripts/peer_suite.py

peers: setup  ## install the engines we compare with, each in its own environment under .peers
	bash benchmarks/peers.sh

yardstick: $(YARDSTICK)/model.safetensors.index.json  ## write the tiny random model that bench uses

lock: $(PACKAGES_STAMP)  ## resolve requirements.lock anew
	$(PIP) install --quiet uv
	bash scripts/lock.sh $(VENV)/bin/uv

clean:  ## remove build output and caches, keep .venv
	rm -rf build dist out .mypy_cache .ruff_cache .pytest_cache .hypothesis $(NATIVE_STAMP) antiphon/_native*.so
	find antiphon tests benchmarks examples scripts -name __pycache__ -type d -prune -exec rm -rf {} +

distclean: clean  ## clean, and remove .venv too
	rm -rf $(VENV) $(OLDEST)

# --- what the commands above need ---

$(PYTHON_STAMP): scripts/create_venv.sh
	@echo "== environment in $(VENV)"
	@bash scripts/create_venv.sh "$(PYTHON)" $(VENV)
	@touch $@

# torch first and alone: which build of it (CPU or CUDA) is the machine's choice, its dependencies follow the lock.
$(TORCH_STAMP): $(PYTHON_STAMP)
	@echo "== $(TORCH)"
	@grep -vE '^(torch|triton)==' requirements.lock > $(VENV)/requirements-without-torch.txt
	$(PIP) install $(TORCH_FLAGS) --constraint $(VENV)/requirements-without-torch.txt "$(TORCH)"
	@rm -f $(VENV)/.torch-*.stamp
	@touch $@

# A CUDA build of torch brings the Triton it was made with, which stays.
$(PACKAGES_STAMP): $(TORCH_STAMP) requirements.lock
	@echo "== packages"
	@$(PY) -c "$(LOCKED)" > $(VENV)/requirements-without-torch.txt
	$(PIP) install --no-deps --requirement $(VENV)/requirements-without-torch.txt
	@touch $@

# libfabric is optional: without it (exit 3, with one line that says why) only that back-end of the M2N library is missing.
$(LIBFABRIC_STAMP): $(PYTHON_STAMP) scripts/fetch_libfabric.sh
	@bash scripts/fetch_libfabric.sh $(VENV)/libfabric || [ $$? -eq 3 ]
	@touch $@

$(NATIVE_STAMP): $(PACKAGES_STAMP) $(LIBFABRIC_STAMP) CMakeLists.txt pyproject.toml $(NATIVE_SOURCES)
	@echo "== native code"
	@bash scripts/build_native.sh $(PY)
	@touch $@

$(OLDEST_STAMP): $(PACKAGES_STAMP) pyproject.toml scripts/oldest_packages.sh
	@echo "== the oldest packages in $(OLDEST)"
	$(PIP) install --quiet uv
	@bash scripts/oldest_packages.sh $(PY) $(OLDEST)
	@touch $@

$(YARDSTICK)/model.safetensors.index.json: benchmarks/make_model.py | $(NATIVE_STAMP)
	$(PY) benchmarks/make_model.py tiny $(YARDSTICK)
	@touch $@
