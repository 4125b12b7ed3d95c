# The targets of Headrace. `make train` and `make test` need Python 3.10, 3.11 or 3.12 with pip.
#
# PYTHON=...  the interpreter for the environment (default: the first suitable one found)
# VENV=...    where the environment is made (default: .venv)
# TORCH_INDEX=... where torch for CPUs comes from, which tests and benchmarks compare with
# WORKERS=... how many processes `make test` runs tests in (default: 2)

PYTHON ?= python3
VENV ?= .venv
WORKERS ?= 2
CONFIG ?= tiny-moe

BIN := $(VENV)/bin
DISTRIBUTED := $(if $(filter-out 1,$(WORKERS)),-n $(WORKERS) --dist loadfile --no-loadscope-reorder)
STAMP := $(VENV)/.headrace-setup
PEERS_STAMP := $(VENV)/.headrace-peers
TORCH_INDEX ?= https://download.pytorch.org/whl/cpu
# These take long or much disk: they have targets of their own.
BENCHMARKS := $(filter-out bench_step bench_parallel bench_checkpoint bench_export,$(basename $(notdir $(sort $(wildcard benchmarks/bench_*.py)))))

SUITABLE := import sys; sys.exit(not (3, 10) <= sys.version_info[:2] <= (3, 12))

.PHONY: help setup train test test-long test-kill test-parallel test-32 checks bench bench-store bench-step bench-parallel bench-checkpoint clean

help:
	@echo "make train   train the shipped model (about 3 minutes after installation)"
	@echo "make test    run the tests (about 12 minutes on two cores)"
	@echo "make test-long  the long versions of tests, but those of the next three"
	@echo "make test-kill  200 kills -9 in named phases of a run, 100 of saves on 4 ranks, each resumed"
	@echo "make test-parallel  every mesh of 2, 4 and 8 ranks beside one rank (an hour on two cores)"
	@echo "make test-32  32 ranks train a small model (10 minutes on two cores, 16 GiB of memory)"
	@echo "make setup   make the environment $(VENV) alone"
	@echo "make checks  formatting, lint, types, architecture"
	@echo "make bench   measure beside peers; prints JSON lines"
	@echo "make bench-store  the NVMe store beside fio; prints JSON lines"
	@echo "make bench-step   an offloaded step beside its bound (20 minutes, 20 GiB of disk)"
	@echo "make bench-parallel  steps on 1, 2 and 4 ranks; prints JSON lines"
	@echo "make bench-checkpoint  what a save costs, how fast commits are read and exported (20 GiB)"
	@echo "make clean   remove the environment and caches"

setup: $(STAMP)

# The environment may be made without ensurepip (Debian packages it apart); pip then comes
# from the pip that the interpreter already has.
$(STAMP): pyproject.toml
	@set -e; \
	if ! { "$(BIN)/python" -c "$(SUITABLE)" && "$(BIN)/python" -m pip --version; } >/dev/null 2>&1; then \
	    found=""; \
	    for candidate in "$(PYTHON)" python3.12 python3.11 python3.10 python; do \
	        if "$$candidate" -c "$(SUITABLE)" 2>/dev/null; then found="$$candidate"; break; fi; \
	    done; \
	    if [ -z "$$found" ]; then \
	        echo "Headrace needs Python 3.10, 3.11 or 3.12, and none was found:" \
	             "install one, or name it: make $(MAKECMDGOALS) PYTHON=/path/to/python3.11" >&2; \
	        exit 2; \
	    fi; \
	    echo "making $(VENV) with $$("$$found" --version)"; \
	    "$$found" -m venv --clear "$(VENV)" 2>/dev/null || { \
	        "$$found" -m venv --clear --without-pip "$(VENV)"; \
	        "$$found" -m pip --python "$(BIN)/python" install pip; }; \
	fi; \
	"$(BIN)/python" -m pip install --disable-pip-version-check -e ".[dev,mpi]"; \
	touch "$@"

train: setup
	$(BIN)/headrace train $(CONFIG)

# Others who compute the same: references of tests, peers of benchmarks. Without them there are fewer.
$(PEERS_STAMP): $(STAMP)
	@"$(BIN)/python" -m pip install --disable-pip-version-check --retries 1 \
	    --extra-index-url "$(TORCH_INDEX)" -e ".[peers]" >&2 \
	    || echo "torch and transformers could not be installed: going on without them" >&2
	@touch "$@"

# A worker takes whole files, in their order: their tests share what is slow to make.
test: $(PEERS_STAMP)
	$(BIN)/python -m pytest tests -m "not long" $(DISTRIBUTED)

KILL_TESTS := tests/offload/test_engine_kill.py tests/offload/test_rank_kill.py \
              tests/launch/test_kill_and_resume.py
PARALLEL_TESTS := tests/launch/test_meshes.py tests/launch/test_mesh_cases.py \
                  tests/moe/test_pipeline_ranks.py tests/moe/test_parallel_experts.py
TEST_32 := tests/launch/test_32_ranks.py

test-long: $(PEERS_STAMP)
	$(BIN)/python -m pytest tests -m long \
	    $(addprefix --ignore=,$(KILL_TESTS) $(PARALLEL_TESTS) $(TEST_32))

test-kill: setup
	$(BIN)/python -m pytest $(KILL_TESTS) -m long

test-parallel: setup
	$(BIN)/python -m pytest $(PARALLEL_TESTS)

test-32: setup
	$(BIN)/python -m pytest $(TEST_32)

checks: setup
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/python -m pytest tests/architecture

bench: $(PEERS_STAMP)
	@set -e; for name in $(BENCHMARKS); do $(BIN)/python -m benchmarks.$$name; done

bench-step: setup
	@$(BIN)/python -m benchmarks.bench_step

bench-parallel: setup
	@$(BIN)/python -m benchmarks.bench_parallel

bench-checkpoint: setup
	@$(BIN)/python -m benchmarks.bench_checkpoint
	@$(BIN)/python -m benchmarks.bench_export
	@$(BIN)/python -m benchmarks.bench_export --weights

bench-store: setup
	@$(BIN)/python -m benchmarks.bench_nvme --require-fio

clean:
	rm -rf $(VENV) build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
