# The two commands are `make serve` and `make test`; `make help` lists the rest.
SHELL := /bin/bash
.DEFAULT_GOAL := help
BIN := .venv/bin
CONFIG ?= deploy/demo.yaml
# What runs no vLLM shares the cores, the quick tests first; real engines run alone, for they take all
# of them. Nothing in tests/e2e is without one, and the SDKs that it imports take a second of each
# process.
QUICK := not vllm and not slow
PARALLEL := -q -n auto --maxprocesses 4 --dist worksteal --ignore tests/e2e
# Where it is set, each process of vLLM compiles its thousands of modules again: 7 s at every start.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help
help: ## list the targets
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## (.*)/  make \1\t\2/' | expand -t 20

.PHONY: serve
serve: setup ## set everything up, then serve the demo model on port 8000
	@$(BIN)/vllm-gateway demo-model var/demo-model
	@exec $(BIN)/vllm-gateway serve --config $(CONFIG) --key-file var/demo-key

.PHONY: setup
setup: ## the environment alone: .venv/ with vllm-gateway and vLLM
	@deploy/setup.sh

.PHONY: setup-dev
setup-dev: ## the environment with what the tests need
	@deploy/setup.sh dev

.PHONY: test
test: setup-dev check ## all tests: the quick ones, then what takes long, then real vLLM
	@tests/install-services.sh
	@$(BIN)/vllm-gateway demo-model var/demo-model
	@status=0; for which in "$(QUICK)" "not vllm and slow"; do \
		$(BIN)/python -m pytest $(PARALLEL) -m "$$which" || status=1; done; \
		$(BIN)/python -m pytest -m vllm || status=1; exit $$status

.PHONY: test-unit
test-unit: setup-dev ## the quick tests: no engine, nothing over a quarter of a second
	@tests/install-services.sh
	@$(BIN)/python -m pytest $(PARALLEL) -m "$(QUICK)"

.PHONY: check
check: setup-dev ## formatting, lint, types, import rules
	@$(BIN)/ruff format --check .
	@$(BIN)/ruff check .
	@$(BIN)/mypy
	@$(BIN)/lint-imports

.PHONY: bench
bench: setup-dev ## the benchmarks, peers beside us; writes bench/RESULTS.md
	@$(BIN)/python -m bench

.PHONY: soak
soak: setup-dev ## ten minutes of mixed and faulty load; what is left open, and the memory
	@$(BIN)/python -m bench.soak

.PHONY: chaos
chaos: setup-dev ## ten minutes of SIGKILL and SIGSTOP under load, on real vLLM; what is left
	@$(BIN)/python -m bench.chaos

.PHONY: clients
clients: setup-dev ## LangChain, Gradio, Open WebUI and others against real vLLM; installs 8 GB at first
	@$(BIN)/python -m tests.clients $(CLIENTS)

.PHONY: lock
lock: ## pin the requirements again; UPGRADE=--upgrade for the newest
	@UV=$$(deploy/setup.sh uv) UPGRADE=$(UPGRADE) requirements/lock.sh

.PHONY: schema
schema: setup-dev ## write the generated files: JSON Schema, .env.example, the pages of settings, commands and API
	@$(BIN)/python -m tests.docs.reference

.PHONY: dashboards
dashboards: setup-dev ## write Grafana's dashboards from deploy/grafana/generate
	@$(BIN)/python -m deploy.grafana.generate
