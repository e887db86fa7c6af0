# `make test` and `make demo` need nothing but Python 3.10 or newer; they set up .venv themselves.

PYTHON ?= python3
# Left to other machines and commands.
ELSEWHERE := not gpu and not framework and not campaign
# Many tests wait for disks and processes, so there are more than cores.
WORKERS ?= 3
# For which `make wheel` proves the wheel.
PYTHONS ?= $(PYTHON)
BARE_PYTHONS ?=
# Where figures go; those that the documents show: RESULTS=docs/results, then `python -m benches.report`.
RESULTS ?= results

# Tests and benches start thousands of processes: without it each compiles all of lowdiff anew.
unexport PYTHONDONTWRITEBYTECODE

BIN := .venv/bin
FOLDERS := $(wildcard lowdiff compressors persistence recovery tuner benches docs examples tests)
INSTALL := $(BIN)/python -m pip install --disable-pip-version-check -qq -c constraints.txt
# A stamp is older than these once what must be installed has changed.
REQUIREMENTS := setup.cfg pyproject.toml constraints.txt

.PHONY: test test-all test-integrations test-versions coverage soak wheel demo bench bench-peers gpu gpu-wheels \
  check lint format clean

# Threads that wait for work leave the cores to other tests; the default is to spin.
test test-all test-integrations test-versions coverage soak: export OMP_WAIT_POLICY := passive

# Five minutes. make passes a signal on to what it has started: in place of the shell, the tests.
test: check
	exec $(BIN)/pytest -q -m "not slow and $(ELSEWHERE)" -n $(WORKERS) --dist worksteal

# Half an hour in all: what takes longer, and of random examples many. All but campaigns (`soak`).
test-all: test
	exec $(BIN)/pytest -q -m "(slow or hypothesis) and $(ELSEWHERE)" --hypothesis-profile thorough -n $(WORKERS) --dist worksteal

# Trainings of frameworks that are killed and go on; the frameworks are large, and so no part of `make test`.
test-integrations: .venv/installed-dev .venv/installed-integrations
	$(BIN)/pytest -q -m framework -n 2 --dist worksteal tests/integrations tests/examples

# Environments of their own, one at a time, each with 3 GB of downloads: an hour or two. Needs the Pythons that
# tests/versions/__main__.py names.
test-versions: .venv/installed-plot .venv/installed-dev
	$(BIN)/python -m tests.versions --out $(RESULTS)

# Fails where less than nine tenths are reached. Left out is a test that nobody else's modules are
# loaded, as those of the measurement would be.
coverage: .venv/installed-dev
	$(BIN)/pytest -q -m "$(ELSEWHERE)" -n $(WORKERS) --dist worksteal --cov --cov-report=term \
	  --deselect tests/unit/persistence/writer/test_writer.py::test_it_loads_neither_torch_nor_the_users_modules_and_stays_small

# Hours; `make soak SOAK_MINUTES=5` does less, and leaves out what pytest runs.
soak: .venv/installed-dev
	$(BIN)/python -m tests.faults.soak --out $(RESULTS) $(if $(SOAK_MINUTES),--minutes $(SOAK_MINUTES))
	$(BIN)/python -m tests.faults.peers --out $(RESULTS)
	$(BIN)/python -m benches.bench_failures --out $(RESULTS)
	$(if $(SOAK_MINUTES),,$(BIN)/pytest -q -m campaign -n 2 --dist worksteal)
	$(BIN)/python -m tests.loops --count $(if $(SOAK_MINUTES),20,300)
	$(BIN)/python -m tests.chaos --out $(RESULTS) $(if $(SOAK_MINUTES),--points 4)

# dist/*.whl, proven in an empty environment of each of PYTHONS. Those of BARE_PYTHONS, for which torch
# cannot be had, get all other requirements, and the command line alone is tried.
wheel: .venv/installed-dev
	$(BIN)/python -m tests.packaging --out dist --python $(PYTHONS) --without-torch $(BARE_PYTHONS)

demo: .venv/installed-plot
	$(BIN)/lowdiff demo

# A first look, in ten minutes on two cores: less of everything than the tables take. Both go on where
# they stopped.
bench: .venv/installed-plot
	$(BIN)/python -m benches.bench_peers --out $(RESULTS) --block-steps 6 --rounds 4 --kills 2 --last-kill 6 --history 10

# Hours: every system, each in an environment of its own under .venv-peers.
bench-peers: .venv/installed-plot
	$(BIN)/python -m benches.bench_peers --out $(RESULTS) --systems all --models 10M,60M --ranks 1,2
	$(BIN)/python -m benches.bench_peers --out $(RESULTS) --systems all --models 10M,60M --ranks 8

# Four and a half minutes on a machine with one GPU, which needs no network: the torch of PYTHON, and for what else
# that lacks the wheels that `make gpu-wheels` fetched on another machine. ONLY=rotation runs one part.
gpu: $(if $(wildcard .gpu-wheels),.gpu-packages)
	@PYTHONPATH=$(CURDIR)$(if $(wildcard .gpu-wheels),:$(CURDIR)/.gpu-packages) \
	  $(PYTHON) -m benches.gpu --out $(RESULTS) $(if $(ONLY),--only $(ONLY))

.gpu-packages: .gpu-wheels
	@$(PYTHON) -m pip install -qq --disable-pip-version-check --no-index --no-deps --target $@ --upgrade .gpu-wheels/*.whl

# For the Python and the system that machines are rented with; all but torch and what it brings along.
GPU_PYTHON ?= 3.12
gpu-wheels:
	$(PYTHON) -m pip download -q --disable-pip-version-check -d .gpu-wheels --only-binary :all: --no-deps \
	  --python-version $(GPU_PYTHON) --platform manylinux_2_28_x86_64 --platform manylinux2014_x86_64 \
	  -r benches/gpu/requirements.txt -c constraints.txt

check: lint
	$(BIN)/mypy

lint: .venv/installed-dev
	$(BIN)/ruff check $(FOLDERS)
	$(BIN)/ruff format --check $(FOLDERS)
	$(BIN)/lint-imports

format: .venv/installed-dev
	$(BIN)/ruff check --fix $(FOLDERS)
	$(BIN)/ruff format $(FOLDERS)

clean:
	rm -rf .venv .venv-peers build dist *.egg-info .hypothesis .*_cache

.venv/installed-%: $(REQUIREMENTS) | $(BIN)/python
	@echo "Installing lowdiff and its requirements into .venv (minutes at first: PyTorch is large) ..."
	@$(INSTALL) -e '.[$*]'
	@touch $@

# A half-made environment is removed, else the next run would take it for a whole one.
$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || { \
	  echo "lowdiff needs Python 3.10 or newer, but $(PYTHON) is: $$($(PYTHON) --version 2>&1)." \
	    "Name another one: make PYTHON=python3.12 $(MAKECMDGOALS)" >&2; exit 1; }
	@$(PYTHON) -m venv .venv || { rm -rf .venv; exit 1; }
