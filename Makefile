# make demo      set up, run the main job on the shipped model and data, show answers and summary
# make compare   set up, simulate two jobs on an A10 and an A40, write out/compare.html (no GPU needed)
# make test      set up, run all checks (style, types, architecture, tests)
# make docstrings describe Python functions with a small chat model, which it fetches; MODEL=DIR takes one that is there
# make reproduce run the experiments of the papers and write docs/reproduction.md; DATA=DIR has the traces
# make coverage run the tests and print which lines of vasuki none of them reaches
# make wheel     write dist/: the wheel, and constraints.txt with what was tested together
# make test-kill kill 300 runs and 20 replicas at random moments, trouble 450 by their machine and 300 by changed, removed
#                copied and broken files, and compare answers and words
# make test-airflow run the DAG by Airflow, in an environment of its own, and kill the run in its midst
# make test-plans  plan 2,000 random small jobs, and simulate simpler schedulers beside each
# make test-hostile  run jobs with 300 spoiled files, 1,000 made up, and one of 100,000 steps
# make test-ray  run jobs on a Ray cluster of this machine, in an environment of its own, and kill 20 of its parts
# make test-versions run golden tests and the main job with the lowest versions that pyproject.toml promises (5 GB)
# make test-s3   run jobs over an S3 server process that freezes, goes away and loses connections
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
BASE := $(VENV)/.base
SETUP := $(VENV)/.installed

# a small chat model (Apache-2.0), 270 MB
MODEL ?= HuggingFaceTB/SmolLM2-135M-Instruct

.PHONY: demo compare docstrings reproduce wheel coverage test test-sweeps test-kill test-plans test-hostile test-s3 test-ray test-airflow test-versions check lint types architecture pytest docs clean

demo: $(BASE)
	$(BIN)/vasuki run jobs/quickstart.yaml
	$(BIN)/python scripts/demo/show_demo.py out/dates

compare: $(SETUP)
	$(BIN)/vasuki simulate jobs/compare/summarise.yaml --gpu a10 --gpu a40 --set output.path=out/compare/summarise
	$(BIN)/vasuki simulate jobs/compare/translate.yaml --gpu a10 --gpu a40 --set output.path=out/compare/translate
	$(BIN)/vasuki report out/compare --html out/compare.html

docstrings: $(SETUP)
	$(BIN)/python scripts/demo/make_functions.py out/functions.jsonl --rows 60
	$(BIN)/vasuki plan jobs/docstrings.yaml --set model.path=$(MODEL) --gpu a10 --gpu a40
	$(BIN)/vasuki run jobs/docstrings.yaml --set model.path=$(MODEL)
	$(BIN)/python scripts/demo/show_docstrings.py out/docstrings
	$(BIN)/vasuki report out/docstrings

reproduce: $(SETUP)
	$(BIN)/python scripts/reproduce/reproduce.py all --data $(DATA) --write

wheel: $(SETUP)
	rm -rf dist
	$(BIN)/python -m pip wheel --quiet --disable-pip-version-check --no-deps -w dist .
	cp constraints.txt dist/

test: check

check: lint types architecture docs pytest

$(BASE): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e .
	touch $@

$(SETUP): $(BASE)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[test,docs]'
	touch $@

lint: $(SETUP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(SETUP)
	$(BIN)/mypy

architecture: $(SETUP)
	$(BIN)/lint-imports

# of the sweeps, those of the day of the week
SWEEPS ?= $(shell date +%u)

pytest: $(SETUP)
	VASUKI_SWEEPS=$(SWEEPS) $(BIN)/python -m pytest -n 2 --dist worksteal

test-sweeps: $(SETUP)
	VASUKI_SWEEPS=all $(BIN)/python -m pytest -n 2 --dist worksteal -m sweep

coverage: $(SETUP)
	$(BIN)/python -m pytest -n 2 --dist worksteal --cov=vasuki --cov=vasuki_solvers --cov-report=term:skip-covered

test-kill: $(SETUP)
	VASUKI_KILLS=200 $(BIN)/python -m pytest -n 0 --timeout 3600 tests/runs/test_killed_runs.py tests/runs/test_troubled_runs.py \
		tests/runs/test_hands.py tests/runs/workers/test_replicas.py

test-plans: $(SETUP)
	VASUKI_PLANS=2000 $(BIN)/python -m pytest -n 2 --timeout 3600 tests/planner/test_never_behind.py

test-hostile: $(SETUP)
	VASUKI_HOSTILE=300 VASUKI_FUZZED=500 VASUKI_ROWS=25000 $(BIN)/python -m pytest -n 0 --timeout 3600 \
		tests/runs/test_hostile_files.py tests/io/test_every_type.py tests/scripts/test_many_rows.py

test-s3: $(SETUP) .venvs/s3/.installed
	VASUKI_MOTO=.venvs/s3/bin/moto_server $(BIN)/python -m pytest -n 0 --timeout 3600 tests/io/test_object_store.py

.venvs/s3/.installed:
	$(PYTHON) -m venv .venvs/s3
	.venvs/s3/bin/pip install --quiet --disable-pip-version-check 'moto[server]==5.2.5'
	touch $@

test-ray: .venvs/ray/.installed
	VASUKI_RAY_KILLS=20 .venvs/ray/bin/python -m pytest -n 0 --timeout 3600 tests/runs/workers/on_ray/test_ray_*.py

.venvs/ray/.installed: pyproject.toml constraints.txt
	test -x .venvs/ray/bin/python || $(PYTHON) -m venv .venvs/ray
	.venvs/ray/bin/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[ray,test]' 'ray[default]'
	touch $@

test-airflow: $(SETUP) .venvs/airflow/.installed
	VASUKI_AIRFLOW=$(CURDIR)/.venvs/airflow/bin/airflow $(BIN)/python -m pytest -n 0 --timeout 3600 tests/jobs/test_airflow.py

.venvs/airflow/.installed: jobs/airflow/constraints.txt
	$(PYTHON) -m venv .venvs/airflow
	.venvs/airflow/bin/pip install --quiet --disable-pip-version-check -c jobs/airflow/constraints.txt \
		apache-airflow-core apache-airflow-providers-standard
	touch $@

# Not those that transformers 5.17 hinders: RemBERT, whose rows nobody may pad, and Phi 3 on a GPU, which its angles wait for.
test-versions: $(SETUP) .venvs/lowest/.installed
	.venvs/lowest/bin/python -m pytest -n 2 --dist worksteal -k 'not rembert and not (fake_cuda and phi3)' \
		tests/hf tests/io tests/solvers tests/scripts/test_gpu_check.py
	$(BIN)/python -m pytest -n 0 tests/docs/test_lowest_versions.py

.venvs/lowest/.installed: pyproject.toml constraints-lowest.txt
	test -x .venvs/lowest/bin/python || $(PYTHON) -m venv .venvs/lowest
	.venvs/lowest/bin/pip install --quiet --disable-pip-version-check -c constraints-lowest.txt -e . \
		pytest pytest-xdist pytest-timeout hypothesis psutil pandas duckdb highspy
	touch $@

docs: $(SETUP)
	$(BIN)/python scripts/docs/job_reference.py --check
	$(BIN)/mkdocs build --strict --quiet

clean:
	rm -rf $(VENV) .venvs out site build dist
