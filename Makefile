# Installs into .venv, then runs the demo or the tests. Needs Python 3.11+ (with venv), a C++ compiler and make.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP_INSTALL := $(BIN)/python -m pip install --constraint constraints.txt

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help install demo cluster-demo test test-slow test-all chaos lint bench results docs browser-test screenshots clean

help:
	@echo "make demo    a small kNN-LM from text to nearest neighbours; resumes when run again"
	@echo "make cluster-demo   the demo's datastore spread over three Ray nodes of this machine, one of them killed"
	@echo "make test    linter, type checker and tests"
	@echo "make test-slow   the docs, the recipes at small size, all of the chaos, and the page in a browser if there is one"
	@echo "make test-all    make test and make test-slow"
	@echo "make chaos   kills, faults, damage and bad input, in all; writes docs/reliability.md"
	@echo "make lint    linter and type checker only"
	@echo "make bench   speed beside the published method and stock fairseq (BENCH='--data ... --path ... --work ...')"
	@echo "make install  only installs"
	@echo "make results  docs/results.md, its pages and plots from the saved JSON"
	@echo "make docs    the documentation as a site, in build/site"
	@echo "make browser-test   the inspector's page in a real browser (Debian: chromium, chromium-driver)"
	@echo "make screenshots    docs/inspector-*.png from the demo's model, docs/site-*.png from the docs"
	@echo "make clean   remove demo/ and caches; keeps $(VENV)"
	@echo
	@echo "All but clean install everything into $(VENV) if that is missing or older than setup.py or"
	@echo "constraints.txt. Another Python: make PYTHON=python3.12 ..."

install: $(VENV)/ready

demo: $(VENV)/ready
	@PATH="$(CURDIR)/$(BIN):$$PATH" examples/demo/run.sh

cluster-demo: demo
	$(BIN)/python examples/cluster/demo.py --demo demo

test: lint
	$(BIN)/python -m pytest -m "not slow"

test-slow: $(VENV)/ready
	$(MAKE) docs
	$(BIN)/python -m pytest -m slow
	$(BIN)/python tests/chaos
	@if test -x /usr/bin/chromedriver; then $(MAKE) browser-test; \
		else echo "left out: the page in a real browser, for there is no /usr/bin/chromedriver"; fi

test-all:
	$(MAKE) test
	$(MAKE) test-slow

chaos: $(VENV)/ready
	$(BIN)/python tests/chaos --page docs/reliability.md

lint: $(VENV)/ready
	$(BIN)/ruff check .
	$(BIN)/mypy

bench: $(VENV)/ready
	@PATH="$(CURDIR)/$(BIN):$$PATH" python -m benchmarks $(BENCH)

results: $(VENV)/ready
	$(BIN)/python -m benchmarks.results --report

$(VENV)/docs-ready: $(VENV)/ready
	$(PIP_INSTALL) --quiet --no-build-isolation --editable '.[docs]'
	@touch $@

# The variable keeps the theme from advertising its successor.
docs: $(VENV)/docs-ready
	$(BIN)/python tools/reference.py --check
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet
	$(BIN)/python tools/check_site.py build/site
	@echo "the site is in build/site; open build/site/index.html, or serve it (then the search works, too):"
	@echo "$(BIN)/python -m http.server --bind 127.0.0.1 --directory build/site"

$(VENV)/browser-ready: $(VENV)/ready
	@test -x /usr/bin/chromedriver || { echo "install chromium and chromium-driver first (Debian's packages)"; exit 1; }
	$(PIP_INSTALL) --quiet selenium
	@touch $@

browser-test: $(VENV)/browser-ready
	@mkdir -p build
	$(BIN)/python tests/browser.py build

screenshots: demo $(VENV)/browser-ready
	$(BIN)/knnlm inspect --path demo/checkpoints/checkpoint_best.pt --data demo/bin --datastore demo/datastore \
		$$(grep -m 1 '^--knn-' demo/logs/tune-knn.log) --knn-k all --split test --from 0 --tokens 400 \
		-o demo/inspect.html
	$(MAKE) docs
	$(BIN)/python tests/browser.py --screenshots demo/inspect.html build/site docs

clean:
	rm -rf demo build dist *.egg-info .pytest_cache .ruff_cache
	find . -path ./$(VENV) -prune -o -type d -name __pycache__ -exec rm -rf {} +

# torch comes first and fairseq is built with it: in an isolated build environment pip would download a second torch,
# several GB of it, and build against that.
$(VENV)/ready: setup.py constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "Python 3.11 or newer is needed, this is $$($(PYTHON) --version); try: make PYTHON=python3.12"; exit 1; }
	@echo "Installing into $(VENV): torch, fairseq (compiled here, takes some minutes), faiss and fairseq-knnlm"
	test -x $(BIN)/pip || $(PYTHON) -m venv $(VENV)
	$(PIP_INSTALL) torch==2.13.0 numpy cython setuptools wheel
	$(PIP_INSTALL) --no-build-isolation fairseq-fixed
	$(PIP_INSTALL) --no-build-isolation --editable '.[cpu,plots,dev,ray,hf]'
	@touch $@
