# Needs python3 with venv and pip, nothing else: everything is installed into .envs/.
PYTHON ?= python3
VLLM ?= 0.16.0
SPECULATORS ?= 0.3.0 0.4.0 0.4.0.1 0.5.0 0.9.0

DEV := .envs/dev/bin/python
ENV := .envs/vllm-$(VLLM)/bin/python
# Tests of code that imports torch run where vLLM is installed; all others, real extraction included, are driven from
# the development environment.
TORCH_TESTS := $(shell grep -lE 'importorskip|^import torch' $(wildcard tests/test_*.py))

.PHONY: env test lint demo clean

env:
	$(PYTHON) tools/environments.py dev
	$(PYTHON) tools/environments.py vllm $(VLLM)
	$(PYTHON) tools/environments.py speculators $(SPECULATORS)

# ARGS="-k order" and the like go to the second pytest.
test: env
	PYTHONPATH=.envs/speculators/0.4.0.1 $(ENV) -m pytest -q $(TORCH_TESTS)
	$(DEV) -m pytest -q $(TORCH_TESTS:%=--ignore=%) $(ARGS)

lint:
	$(PYTHON) tools/environments.py dev
	$(DEV) -m ruff check .
	$(DEV) -m mypy

demo:
	$(PYTHON) tools/environments.py vllm $(VLLM)
	$(PYTHON) tools/environments.py speculators 0.3.0
	PYTHONPATH=.envs/speculators/0.3.0 $(ENV) examples/demo.py

clean:
	rm -rf .envs .demo build dist
