# make demo    the product on a real local cluster: four rollouts under traffic, then a table
# make test    what is checked before each commit: style, types, layers, unit tests, tests on the real cluster
# make long    what takes longer than anybody waits for: rollouts and Jobs killed at each of their steps, long runs, the
#              worker on a simulated device, further scenarios on the cluster. CI runs it after make test
SHELL := /bin/bash
PYTHON ?= $(shell command -v python3.11 || command -v python3.12 || command -v python3.13 || command -v python3)
VENV := .venv
BIN := $(VENV)/bin
JOBS ?= 3
DEVICE := host ladder swap routing front field

.PHONY: help venv test lint unit e2e long night demo demo-down lock docs audit krew clean bench-peers

help:
	@sed -n 's/^# \(make .*\)/\1/p' Makefile tests/cluster/cluster.mk

venv: $(VENV)/.ready

# uv installs exactly what uv.lock says; pip only brings uv.
$(VENV)/.ready: pyproject.toml uv.lock
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || { apt-get update -qq && apt-get install -y -qq --no-install-recommends python3-venv; }
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@test -x $(BIN)/uv || $(BIN)/python -m pip install --quiet --disable-pip-version-check uv
	@UV_PROJECT_ENVIRONMENT=$(CURDIR)/$(VENV) $(BIN)/uv sync --quiet --locked --extra dev
	@touch $@

test: lint unit e2e

lint: venv
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

unit: venv
	$(BIN)/pytest -n $(JOBS) -m "not e2e and not long" --dist worksteal

# The tests on the real cluster share it: one after the other.
e2e: venv cluster-up
	$(BIN)/pytest -m "e2e and not long"

long: venv cluster-up
	$(BIN)/pytest -n $(JOBS) -m "long and not e2e" --dist worksteal
	TRTMODEL_TEST_DEVICE=Simulated $(BIN)/pytest -n $(JOBS) $(addprefix tests/worker/,$(DEVICE)) -m "not e2e and not long" --dist worksteal
	$(BIN)/pytest -m "e2e and long and not night"

# make night   half an hour on the cluster that CI does not take: chaos, faults of the API server, scenarios under load
night: venv cluster-up
	$(BIN)/pytest -m "e2e and night"

demo: venv
	$(BIN)/python examples/magika/demo.py

demo-down: cluster-purge

# make bench-peers   every peer and ours in one interleaved run (ARGS=--quick: below 8 minutes); needs wrk
bench-peers: venv
	@command -v wrk >/dev/null || { apt-get update -qq && apt-get install -y -qq --no-install-recommends wrk; }
	$(BIN)/python bench/peers/run.py $(ARGS)

# make lock    after a change of the dependencies in pyproject.toml or requirements/*.in
COMPILE = $(BIN)/uv pip compile -q --generate-hashes --no-annotate --python-version 3.10 --custom-compile-command "make lock"
lock:
	@test -x $(BIN)/uv || { $(MAKE) venv; }
	$(BIN)/uv lock
	$(BIN)/uv export -q --frozen --no-emit-project --no-header --no-annotate --extra operator -o requirements/operator.txt
	$(BIN)/uv export -q --frozen --no-emit-project --no-header --no-annotate --extra worker --extra builder -o requirements/worker.txt
	$(BIN)/uv export -q --frozen --extra operator --format cyclonedx1.5 \
	  | $(BIN)/python requirements/sbom.py operator > requirements/operator.cdx.json
	$(BIN)/uv export -q --frozen --extra worker --extra builder --format cyclonedx1.5 \
	  | $(BIN)/python requirements/sbom.py worker > requirements/worker.cdx.json
	$(COMPILE) --universal requirements/cuda.in -o requirements/cuda.txt
	$(COMPILE) --python-platform x86_64-manylinux_2_28 requirements/tensorrt-8.6.in -o requirements/tensorrt-8.6.txt

# make docs    the documentation as a site, into site/
docs: venv
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet --site-dir site

# make krew    kubectl trtmodel with its libraries as an archive, and its manifest, into dist/
krew: venv
	$(BIN)/python operator/krew/build.py --out dist

# make audit   known vulnerabilities in what the lock names, asked of osv.dev; REACHABLE=must fails where it is not reached
audit: venv
	@if $(BIN)/python -c "import socket; socket.create_connection(('api.osv.dev', 443), 10)" 2>/dev/null; then \
	  $(BIN)/uv audit --frozen; \
	else echo "api.osv.dev is not reached: known vulnerabilities were not looked up"; test "$(REACHABLE)" != must; fi

clean:
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache

include tests/cluster/cluster.mk
