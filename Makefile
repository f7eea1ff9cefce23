.DEFAULT_GOAL := help
.PHONY: help demo docs test test-flower test-lowest bench check clean broker links lock simulate table1 test-all test-fast test-newest test-slow tests-map wheel
.DELETE_ON_ERROR:

BUILDING := .venv/.installed-build
DEMO := .venv/.installed-demo
DOCS := .venv/.installed-docs
INSTALLED := .venv/.installed
FOLDERS := cloud common deploy device institution

help: ## list the targets
	@sed -n 's/^\([a-z0-9-]*\):.*## /\1: /p' Makefile | while IFS=: read -r target text; do printf '  make %-19s%s\n' "$$target" "$$text"; done

demo: $(DEMO) broker ## run a small experiment with all roles on this machine
	.venv/bin/fedstrata run deploy/experiments/demo.toml

PYTEST := .venv/bin/python -m pytest -q --dist loadfile --no-loadscope-reorder

# Processes of tests: more than cores, as labs wait; few, as each imports torch.
test: $(INSTALLED) broker links ## run the tests
	$(PYTEST) -n 3

SINCE ?= main
test-fast: $(INSTALLED) broker links ## run the quick tests of what has changed since SINCE=COMMIT, main
	.venv/bin/python -m tests.helpers.touched $(SINCE) > .tests-touched
	$(PYTEST) -n 2 @.tests-touched

tests-map: $(INSTALLED) broker links ## record which lines each quick test executes, for test-fast and bench NAME=mutants
	.venv/bin/python -m tests.helpers.executed

test-slow: $(INSTALLED) broker ## run the tests that take minutes, and more examples of the others
	HYPOTHESIS_PROFILE=more $(PYTEST) -n 5 -m '(slow or hypothesis and not gpu) and not flower'

test-all: $(INSTALLED) broker links ## run all tests, with most examples
	HYPOTHESIS_PROFILE=thorough $(PYTEST) -n 4 -m 'not gpu and not flower'

lock: $(INSTALLED) ## write deploy/locked anew for pyproject.toml: the versions that it has, where they are permitted
	.venv/bin/python -m docs.tools.locked

test-newest: $(INSTALLED) ## take the newest version of each package into deploy/locked, and run the tests with them
	.venv/bin/python -m docs.tools.locked --newest
	$(MAKE) test

LOWEST := .venv-lowest
LOWEST_TESTS := cli coordinator csv_tables logs mistakes quorum simulation status view wire
# Each package that fedstrata itself needs in its lowest version, the others as they are; .venv has those of deploy/locked.
test-lowest: $(INSTALLED) broker ## run tests of commands, messages and protocol with the lowest versions of packages
	.venv/bin/python -m venv --clear $(LOWEST)
	.venv/bin/python -m tests.helpers.lowest > $(LOWEST)/lowest.txt
	deploy/locked/install.sh $(LOWEST)/bin/python build
	$(LOWEST)/bin/python -m pip install --quiet -c $(LOWEST)/lowest.txt --no-build-isolation --editable .
	.venv/bin/python -c "import sysconfig; print(sysconfig.get_path('purelib'))" \
	  > $$($(LOWEST)/bin/python -c "import sysconfig; print(sysconfig.get_path('purelib'))")/others.pth
	$(LOWEST)/bin/python -m pytest -q -n 2 $(LOWEST_TESTS:%=tests/test_%.py) \
	  --deselect tests/test_cli.py::test_roles_without_training_are_small_quick_and_free_of_torch

FLOWER := .venv-flower
# flwr needs other versions of some packages than .venv has; what it does not need is that of .venv.
$(FLOWER)/.installed: $(INSTALLED)
	.venv/bin/python -m venv --clear $(FLOWER)
	deploy/locked/install.sh $(FLOWER)/bin/python build
	$(FLOWER)/bin/python -m pip install --quiet --prefer-binary --no-build-isolation \
	  flwr==1.42.0 scikit-learn==1.9.1 --editable .
	.venv/bin/python -c "import sysconfig; print(sysconfig.get_path('purelib'))" \
	  > $$($(FLOWER)/bin/python -c "import sysconfig; print(sysconfig.get_path('purelib'))")/others.pth
	@touch $@

# What the benchmark needs besides: Ray, 70 MB.
$(FLOWER)/.simulation: $(FLOWER)/.installed
	$(FLOWER)/bin/python -m pip install --quiet --prefer-binary 'flwr[simulation]==1.42.0'
	@touch $@

test-flower: $(FLOWER)/.installed broker ## run apps and clients of Flower's with flwr itself
	$(FLOWER)/bin/python -m pytest -q -n 2 -m flower \
	  tests/test_flower_apps.py tests/test_new.py tests/test_odd_trainers.py

# A benchmark is a file of tests/bench whose docstring begins with its command.
bench: $(if $(NAME),$(INSTALLED) broker $(if $(filter kits board,$(NAME)),wheel) $(if $(filter flower,$(NAME)),$(FLOWER)/.simulation)) ## run the benchmark NAME with ARGS; list them without NAME
	@$(if $(NAME),$(if $(filter flower,$(NAME)),$(FLOWER),.venv)/bin/python tests/bench/$(NAME).py $(ARGS),sed -n \
	  's/^"""`make bench NAME=\([a-z_]*\)`: \([^"]*\).*/\1 \2/p' tests/bench/*.py | while read -r name text; do \
	  printf '  make bench NAME=%-12s%s\n' "$$name" "$$text"; done)

table1: $(INSTALLED) broker ## measure Tempo's Table 1 in miniature: time to an accuracy against fixed epochs
	.venv/bin/fedstrata sweep study/table1

# mypy, import-linter and editors find the folders below fedstrata/; Python itself needs no links, and Git has none.
links: ## link the five folders below fedstrata/, for tools that read it without running it
	@ln -sfn $(FOLDERS:%=../%) fedstrata/

check: $(INSTALLED) links ## lint, format, types, import rules, and what `docs` checks
	.venv/bin/ruff check
	.venv/bin/ruff format --check
	.venv/bin/mypy
	.venv/bin/lint-imports
	$(MAKE) docs

# The site's sources are links, so that a link on a page leads to the same file as in the repository.
# Not --quiet: strict counts the warnings that are shown.
PAGES := CHANGELOG.md CONTRIBUTING.md LICENSE README.md SECURITY.md docs $(FOLDERS)
docs: $(DOCS) ## build the pages as a site in site/: links and headings that do not exist are errors
	@mkdir -p .site && ln -sfn $(PAGES:%=../%) .site/
	.venv/bin/mkdocs build

wheel: $(BUILDING) ## build dist/fedstrata-*.whl, which `fedstrata provision` gives to a lab's machines
	.venv/bin/python -m pip wheel --quiet --no-deps --no-build-isolation --wheel-dir dist .

SEEDS ?= 200
FROM ?= 0
simulate: $(INSTALLED) ## play SEEDS=N labs with faults in virtual time, FROM=K on
	.venv/bin/python -m tests.simulation --seeds $(SEEDS) --from $(FROM)

clean: ## remove what the other targets made, except runs/ and data/
	rm -rf $(FOLDERS:%=fedstrata/%) .site site .venv .venv-flower .venv-lowest .mypy_cache .pytest_cache .ruff_cache .hypothesis .import_linter_cache .tests-map .tests-touched .mutants.csv *.egg-info
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

broker:
	@deploy/brokers/ensure-broker.sh

export PIP_DISABLE_PIP_VERSION_CHECK := 1

.venv/bin/python:
	@echo "==> a virtual environment in .venv"
	@for python in python3.13 python3.12 python3.11 python3; do \
	    $$python -c 'import sys, ensurepip, venv; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || continue; \
	    exec $$python -m venv .venv; \
	done; \
	echo 'Python 3.11 or newer with its venv module is needed: apt install python3-venv' >&2; exit 1

# Exact versions, with hashes (deploy/locked); fedstrata itself is built here, by what was installed so.
LOCKED := deploy/locked/install.sh .venv/bin/python
EDITABLE := .venv/bin/python -m pip install --no-deps --no-build-isolation --editable .
SETS := $(wildcard deploy/locked/*)

# What building needs.
$(BUILDING): $(SETS) | .venv/bin/python
	@$(LOCKED) build
	@touch $@

# What the demo and its report need: PyTorch, matplotlib, and the embedded broker where there is no mosquitto.
$(DEMO): pyproject.toml $(SETS) | .venv/bin/python broker
	@echo "==> the packages that fedstrata's demo needs"
	@PATH="$$PATH:/usr/sbin:/usr/local/sbin"; \
	[ "$${FEDSTRATA_BROKER_KIND:-}" != embedded ] && command -v mosquitto >/dev/null || broker=embedded; \
	$(LOCKED) build base learning report $${broker:-}
	@$(EDITABLE)
	@touch $(BUILDING) $@

# What the site needs.
$(DOCS): pyproject.toml $(SETS) | .venv/bin/python
	@$(LOCKED) base docs
	@touch $@

# What tests and checks need besides: all extras, and the tools.
$(INSTALLED): pyproject.toml $(SETS) | .venv/bin/python
	@echo "==> fedstrata, all its extras, and what its tests and checks need: some 140 packages"
	@$(LOCKED) build base learning embedded report methods docs dev
	@$(EDITABLE)
	@touch $(BUILDING) $(DEMO) $(DOCS) $@
