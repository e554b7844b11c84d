# Two commands are all a newcomer needs: `make demo` and `make test`. Every other target is what CI or a bench calls.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
KEEP ?=

.DEFAULT_GOAL := help
.PHONY: help demo test test-net test-net-full test-js test-vllm test-full fuzz lint format reference bench-first bench-gossip bench-mesh bench-registry sim-registry clean

help: ## list the targets
	@sed -n 's/^\([a-z-]*\):.*## /\1\t/p' Makefile | expand -t 14

# A stamp a set of extras: install again only when the project's dependencies change.
$(VENV)/.demo: pyproject.toml requirements/constraints.txt scripts/setup.sh
	@PYTHON="$(PYTHON)" sh scripts/setup.sh $(VENV) demo

$(VENV)/.demo,dev: pyproject.toml requirements/constraints.txt scripts/setup.sh
	@PYTHON="$(PYTHON)" sh scripts/setup.sh $(VENV) demo,dev

demo: $(VENV)/.demo ## a mesh of real processes answers a real OpenAI request, loses a worker and goes on (KEEP=1 leaves it up)
	@$(BIN)/python -m scripts.demo.demo $(if $(KEEP),--keep)

test: $(VENV)/.demo,dev ## unit, property, simulation and end-to-end tests with the real small model (minutes: 8)
	@$(BIN)/python -m pytest --ignore=tests/vllm --ignore=tests/netlab --ignore=tests/interop

test-net: $(VENV)/.demo,dev ## real nodes in network namespaces: NAT, proxies, cuts, loss; needs root (minutes: 4)
	@$(BIN)/python -m pytest -o faulthandler_timeout=150 tests/netlab

test-net-full: $(VENV)/.demo,dev ## the same with 64 nodes on one hub and a stream of 3 minutes over a relay (minutes: 12)
	@TELA_NODES=64 TELA_STREAM_S=180 $(BIN)/python -m pytest -o faulthandler_timeout=400 tests/netlab

test-js: $(VENV)/.demo,dev ## our mesh and js-libp2p, each way round; needs node and npm (minutes: 1)
	@$(BIN)/python -m scripts.lab.js_modules
	@$(BIN)/python -m pytest tests/interop

test-vllm: $(VENV)/.demo,dev ## real vLLM on CPU in a venv of its own (minutes: 6 once that venv is built)
	@$(BIN)/python scripts/lab/vllm_venv.py
	@$(BIN)/python -m pytest -o faulthandler_timeout=240 tests/vllm

test-full: test test-net-full test-js test-vllm bench-first bench-gossip bench-mesh bench-registry sim-registry ## everything, run by hand; results go to docs/reference/benchmarks.md

lint: $(VENV)/.demo,dev ## ruff, mypy strict, import contracts
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy
	@$(BIN)/lint-imports

format: $(VENV)/.demo,dev ## rewrite the sources as ruff wants them
	@$(BIN)/ruff format .
	@$(BIN)/ruff check --fix .

reference: $(VENV)/.demo,dev ## write the generated pages of docs/reference
	@$(BIN)/python scripts/generate_reference.py

$(VENV)/.demo,dev,fuzz: pyproject.toml requirements/constraints.txt scripts/setup.sh
	@PYTHON="$(PYTHON)" sh scripts/setup.sh $(VENV) demo,dev,fuzz

fuzz: $(VENV)/.demo,dev,fuzz ## parsers of foreign bytes under a coverage-guided fuzzer (FUZZ_S=300)
	@$(BIN)/python -m tests.fuzz -max_total_time=$(or $(FUZZ_S),300)

bench-first: $(VENV)/.demo,dev ## figures of the main job; the last line is JSON
	@$(BIN)/python -m tests.bench.first

bench-gossip: $(VENV)/.demo,dev ## convergence and idle traffic of the gossip cores, simulated; the last line is JSON
	@$(BIN)/python -m tests.bench.gossip

bench-mesh: $(VENV)/.demo,dev ## one mesh hop beside stock py-libp2p and TLS (minutes: 2); the last line is JSON
	@$(BIN)/python -m tests.bench.mesh

bench-registry: $(VENV)/.demo,dev ## the registry between 32 nodes in real processes (minutes: 4); the last line is JSON
	@$(BIN)/python -m tests.bench.registry

sim-registry: $(VENV)/.demo,dev ## the gossip cores of up to 128 nodes, simulated (minutes: 3); the last line is JSON
	@$(BIN)/python -m tests.bench.registry_sim

clean: ## remove the venv and caches; downloads in the user's cache folder stay
	rm -rf $(VENV) .mypy_cache .ruff_cache .hypothesis .import_linter_cache
