# On a bare machine (Python 3.11, make, a package registry): `make demo` or `make test`.
SHELL       := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
MAKEFLAGS   += --no-print-directory

PYTHON ?= python3.11
VENV   := .venv
BIN    := $(VENV)/bin
PIP    := $(BIN)/python -m pip --disable-pip-version-check --no-input -qq
LOCKS  := requirements/cpu.lock requirements/cpu-nodeps.lock requirements/dev.lock
BUILD  := pyproject.toml setup.py $(wildcard kernels/cpu/*.h kernels/cpu/*.cpp) kernels/cpu/build.py
STAMP  := $(VENV)/.setup-done

# Other versions of SGLang: environments that see what .venv has, but for a few packages.
VERSIONS := $(patsubst requirements/sglang-%.lock,%,$(wildcard requirements/sglang-*.lock))
PURELIB  := import sysconfig; print(sysconfig.get_path("purelib"))

SHORT    := tests/versions tests/sglang/test_hooks.py tests/sglang/test_arguments.py \
            tests/sglang/test_weights.py tests/sglang/test_unknown_version.py \
            tests/sglang/test_compiled_layers.py tests/sglang/test_waiting_chunk.py

TWO    := --numprocesses 2 --dist loadfile

# Debian's packages that some tests run, by the command that they bring. Tests say what they lack.
PROGRAMS := prometheus:prometheus chromium:chromium chromedriver:chromium-driver

.PHONY: help lacking system setup demo test test-fast lint format wheel clean
.DEFAULT_GOAL := help

help:
	@echo 'make demo       serve the demo model with too little KV memory, beside stock SGLang'
	@echo 'make test       all tests that need no GPU: the fast ones, then the slow ones'
	@echo 'make test-fast  only the fast ones'
	@echo 'make test-versions  only the short ones on the other versions of SGLang'
	@echo 'make system     as root on Debian: install what some tests run beside Python'
	@echo 'make lint       ruff and mypy'
	@echo 'make format     let ruff rewrite'
	@echo 'make wheel      build the wheel and the sdist into dist/'
	@echo 'make clean      remove what building and testing left (.venv stays)'

# Those packages that are not there.
lacking:
	@for program in $(PROGRAMS); do \
	    command -v $${program%:*} >/dev/null || printf ' %s' $${program#*:}; \
	done

system:
	@lacking=$$($(MAKE) lacking); \
	[ -z "$$lacking" ] || { echo "system: installing$$lacking"; export DEBIAN_FRONTEND=noninteractive; \
	    apt-get -qq update && apt-get -qq -y --no-install-recommends install $$lacking >/dev/null; }

setup: $(STAMP)

# On all cores; pip takes one. Some packages have files that are no Python.
compile = $(1) -m compileall -qq -j 0 "$$($(1) -c '$(PURELIB)')" || true

$(STAMP): $(LOCKS) $(BUILD)
	@$(BIN)/python -m pip --version >/dev/null 2>&1 || { echo 'setup: creating $(VENV) ($(PYTHON))'; $(PYTHON) -m venv $(VENV); }
	@echo 'setup: installing the pinned packages (some minutes the first time)'
	@$(PIP) install --no-compile --no-deps $(addprefix -r ,$(LOCKS))
	@$(call compile,$(BIN)/python)
	@$(BIN)/python -c 'import torch' 2>/dev/null || { \
	    echo 'setup: this registry has only the CUDA build of torch; installing the CUDA libraries it'; \
	    echo '       needs (several GB; requirements/README.md says how to get the CPU build)'; \
	    $(PIP) install -c requirements/cpu.lock torch; $(BIN)/python -c 'import torch'; }
	@echo 'setup: installing ellm-sgl (editable)'
	@$(PIP) install --no-build-isolation --no-deps -e .
	@touch $@
	@echo 'setup: done'

setup-versions: $(VERSIONS:%=.venv-%/.setup-done)

.venv-%/.setup-done: requirements/sglang-%.lock $(STAMP)
	@echo 'setup: sglang $* beside .venv'
	@rm -rf .venv-$*
	@$(BIN)/python -m venv --without-pip .venv-$*
	@echo "import site; site.addsitedir('$$($(BIN)/python -c '$(PURELIB)')')" > \
	    "$$(.venv-$*/bin/python -c '$(PURELIB)')/zz_shared.pth"
	@.venv-$*/bin/python -m pip --disable-pip-version-check --no-input -qq install --no-compile \
	    --ignore-installed --no-deps -r $<
	@$(call compile,.venv-$*/bin/python)
	@.venv-$*/bin/python -c 'import importlib.metadata as m; assert m.version("sglang") == "$*"'
	@touch $@

demo: setup
	@$(BIN)/ellm-sgl demo

# Tests are of one busy thread each: two files at a time. All stages run even when the first one
# fails. pytest's exit status 5 (nothing selected) is accepted from one stage, not from both.
test: setup setup-versions
	@stage() { \
	    local name=$$1 rc=0 start=$$SECONDS; shift; \
	    echo "== $$name tests"; \
	    $(BIN)/pytest --durations=10 "$$@" || rc=$$?; \
	    case $$rc in 0) result=passed;; 5) result='none found';; *) result="FAILED ($$rc)";; esac; \
	    summary+="  $$name: $$result, $$((SECONDS - start)) s"$$'\n'; codes+=" $$rc"; \
	}; \
	summary= codes=; \
	stage fast -m 'not slow and not gpu' $(TWO); \
	stage slow -m 'slow and not gpu' $(TWO) --no-loadscope-reorder; \
	versions=ok; start=$$SECONDS; $(MAKE) test-versions || versions=FAILED; \
	printf '== summary\n%s  other versions of SGLang: %s, %s s\n' "$$summary" $$versions \
	    $$((SECONDS - start)); \
	case "$$codes $$versions" in ' 0 0 ok'|' 0 5 ok'|' 5 0 ok') ;; *) exit 1;; esac

# All at once, each in its environment; what is recorded of a version, and servers with eLLM.
test-versions: setup-versions
	@for version in $(VERSIONS); do \
	    .venv-$$version/bin/python -m pytest --durations=3 $(SHORT) >.venv-$$version/tests.log 2>&1 & \
	    running+=" $$version:$$!"; \
	done; \
	status=0; for one in $$running; do \
	    wait $${one#*:} || status=1; \
	    echo "== sglang $${one%:*}"; cat .venv-$${one%:*}/tests.log; \
	done; \
	grep -E '^(FAILED|ERROR|E  )' $(VERSIONS:%=.venv-%/tests.log) || true; exit $$status

test-fast: setup
	@$(BIN)/pytest -m 'not slow and not gpu' $(TWO)

lint: setup
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy

format: setup
	@$(BIN)/ruff check --fix .
	@$(BIN)/ruff format .

wheel: setup
	@rm -rf build dist/ellm_sgl-*
	@$(BIN)/python -m build --no-isolation --outdir dist . >/dev/null
	@PATH="$(abspath $(BIN)):$$PATH" $(BIN)/python -m auditwheel repair --wheel-dir dist dist/*-linux_x86_64.whl
	@rm dist/*-linux_x86_64.whl
	@ls dist/*

clean:
	@rm -rf build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	@find ellm_sgl policies kernels eval tests -name __pycache__ -type d -prune -exec rm -rf {} +
