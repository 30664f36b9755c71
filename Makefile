# The two commands are `make serve` and `make test`; `make help` lists the rest.
SHELL := /bin/bash
.DEFAULT_GOAL := help
BIN := .venv/bin
CONFIG ?= deploy/demo.yaml
# All tests in tests/e2e have an engine, and their imports take seconds of each worker. `make test` runs the
# quick ones in what the others leave idle, which is a sixth of two cores.
QUICK := -q --dist worksteal --ignore tests/e2e -m "not vllm and not slow"
# 0: in one process, without the messages of a worker, which are a sixth of their time.
QUICK_WORKERS := $(shell echo $$(($$(nproc) < 4 ? 0 : $$(nproc) < 8 ? $$(nproc) / 2 : 4)))
# The slow tests wait as often as they compute. Not at the same time as real engines: with both some tests
# that count chunks or refused requests fail on two cores (tests/scheduling.py).
SLOW := -q -n $(shell echo $$(($$(nproc) < 6 ? $$(nproc) + 2 : 8))) --dist loadgroup --ignore tests/e2e -m "slow and not vllm"
# Each engine is bound to a core, and takes 2.7 GiB.
VLLM := -q -n $(shell echo $$(($$(nproc) < 4 ? $$(nproc) : 4))) --dist loadgroup -m vllm
# If it is set, each vLLM process compiles its thousands of modules again: 7 s at every start.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help
help: ## list the targets
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## (.*)/  make \1\t\2/' | expand -t 20

.PHONY: serve
serve: setup ## set everything up, then serve the demo model on port 8000
	@$(BIN)/vllm-gateway demo-model var/demo-model
	@exec $(BIN)/vllm-gateway serve --config $(CONFIG) --key-file var/demo-key

.PHONY: setup
setup: ## only create .venv/ with vllm-gateway and vLLM
	@deploy/setup.sh

.PHONY: setup-ray
setup-ray: ## create .venv/ with Ray, too, for engines of kind: ray
	@deploy/setup.sh ray

.PHONY: setup-dev
setup-dev: ## create .venv/ with the packages of the tests, too
	@deploy/setup.sh dev

.PHONY: test
test: setup-dev ## run all tests: with real vLLM, then the slow ones; next to both, the checks and the quick ones
	@$(BIN)/vllm-gateway demo-model var/demo-model
	@tests/install-services.sh
	@status=0; trap "exit 130" INT; \
		nice -n 19 make --no-print-directory check >var/check.log 2>&1 & check=$$!; \
		nice -n 19 $(BIN)/python -m pytest -n $(QUICK_WORKERS) $(QUICK) >var/quick-tests.log 2>&1 & quick=$$!; \
		trap "kill $$check $$quick 2>/dev/null" EXIT; \
		$(BIN)/python -m pytest $(VLLM) || status=1; \
		wait $$check || status=1; check=; cat var/check.log; \
		$(BIN)/python -m pytest $(SLOW) || status=1; \
		wait $$quick || status=1; cat var/quick-tests.log; exit $$status

.PHONY: test-unit
test-unit: setup-dev ## run the quick tests: no engine, none over a quarter of a second
	@tests/install-services.sh
	@$(BIN)/python -m pytest -n auto --maxprocesses 4 $(QUICK)

.PHONY: check
check: setup-dev ## check formatting, lint, types and import rules
	@$(BIN)/ruff format --check .
	@$(BIN)/ruff check .
	@$(BIN)/mypy
	@$(BIN)/lint-imports

.PHONY: bench
bench: setup-dev ## run the benchmarks, peers included; writes bench/RESULTS.md
	@$(BIN)/python -m bench

.PHONY: soak
soak: setup-dev ## ten minutes of mixed and faulty load; reports leaks and memory
	@$(BIN)/python -m bench.soak

.PHONY: chaos
chaos: setup-dev ## ten minutes of SIGKILL and SIGSTOP under load, on real vLLM; reports leaks
	@$(BIN)/python -m bench.chaos

.PHONY: continuation
continuation: setup-dev ## kill and replace engines under streams, on real vLLM; compares each answer, 30 minutes each
	@for scenario in "two engines" "one engine" reload eviction; do \
		$(BIN)/python -m bench.continuation --scenario "$$scenario" || exit 1; \
	done

.PHONY: clients
clients: setup-dev ## test LangChain, Open WebUI, Codex, Claude Code and others on real vLLM; installs 8 GB once
	@$(BIN)/python -m tests.clients $(CLIENTS)

.PHONY: compat
compat: setup-dev ## test versions of vLLM: VERSIONS="0.28.0 0.32.0"; writes docs/versions.md
	@$(BIN)/vllm-gateway demo-model var/demo-model --train
	@$(BIN)/python -m tests.compat $(VERSIONS)

.PHONY: lock
lock: ## pin the requirements again; UPGRADE=--upgrade takes the newest versions
	@UV=$$(deploy/setup.sh uv) UPGRADE=$(UPGRADE) requirements/lock.sh

.PHONY: schema
schema: setup-dev ## write the generated files: JSON Schema, .env.example, the pages of settings, commands and API
	@$(BIN)/python -m tests.docs.reference

.PHONY: texts
texts: setup-dev ## collect the texts of the console for its translations
	@$(BIN)/python -m tests.app.console.texts

.PHONY: screenshots
screenshots: setup-dev ## take the screenshots of the console, on the demo model: docs/images/*.png; ALL=yes: each page at both widths, light and dark
	@tests/install-services.sh fonts-inter
	@$(BIN)/python -m tests.console.screenshots $(if $(ALL),--all)

.PHONY: dashboards
dashboards: setup-dev ## write Grafana's dashboards from deploy/grafana/generate
	@$(BIN)/python -m deploy.grafana.generate
