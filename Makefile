# `make` alone lists the targets.
.DEFAULT_GOAL := help
.PHONY: help run dry-run up down test mlflow-ui remote clean

PYTHON ?= python3.11
VENV := .venv
INSTALLED := $(VENV)/.installed

# Stages call `python`: the environment's comes first.
export PATH := $(CURDIR)/$(VENV)/bin:$(PATH)
# Local use: no telemetry, no downloads, no window (tasks/env.py has the list). A variable of yours wins.
LOCAL = env $$(python -m tasks.env)

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-10s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

run: $(INSTALLED) ## run the pipeline; stages that are up to date are skipped
	@$(LOCAL) python -m flows.pipeline

dry-run: $(INSTALLED) ## say what `make run` would do
	@$(LOCAL) python -m flows.pipeline --dry-run

up: $(INSTALLED) ## start servers and a worker on this machine and deploy the schedules
	@$(LOCAL) python -m tasks.services up

down: $(INSTALLED) ## stop what `make up` has started
	@$(LOCAL) python -m tasks.services down

test: $(INSTALLED) ## lint, types and tests
	ruff check .
	ruff format --check .
	mypy
	$(LOCAL) OMP_NUM_THREADS=1 python -m pytest

mlflow-ui: $(INSTALLED) ## open the records of all runs at http://127.0.0.1:5000
	@$(LOCAL) MLFLOW_SERVER_ENABLE_JOB_EXECUTION=false mlflow ui \
		--backend-store-uri "$${MLFLOW_TRACKING_URI:-sqlite:///$(CURDIR)/mlflow.db}"

remote: ## share data and models: make remote URL=s3://bucket/path, or a folder; then dvc push
	@[ -n "$(URL)" ] || { echo "error: name the place: make remote URL=s3://bucket/path (or a folder)" >&2; exit 1; }
	@python -m dvc remote add --default --force storage "$(URL)"
	@echo "wrote .dvc/config; commit it. Next: dvc push; others: dvc pull"

clean: ## remove logs, unfinished checkpoints and the caches of test tools; keeps data, models and records
	rm -rf outputs/logs outputs/.checkpoints .mypy_cache .pytest_cache .ruff_cache .hypothesis

# The environment. The stamp makes a second call cost nothing; an interrupted install is resumed.
$(INSTALLED): pyproject.toml constraints.txt
	@command -v $(PYTHON) >/dev/null || { \
		echo "error: $(PYTHON) not found; install Python 3.11, or name it: make PYTHON=/path/to/python3.11" >&2; exit 1; }
	@[ -x $(VENV)/bin/python ] || $(PYTHON) -m venv $(VENV)
	@echo "installing into $(VENV) (about three minutes)"
	@$(VENV)/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev,team]'
	@touch $@
