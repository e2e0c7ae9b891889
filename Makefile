# Two commands for a newcomer: `make demo` and `make test`. Both set up everything first, once.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
# tests start many interpreters: compile the sources once, wherever that is switched off
export PYTHONDONTWRITEBYTECODE :=

.PHONY: demo test check check-models chaos rehearse check-native native docs setup clean
.DEFAULT_GOAL := help

help:
	@echo "make demo   train the digits example on 2 workers, test it, verify it against one worker"
	@echo "make test   the tests"
	@echo "make check  ruff, mypy --strict, and all tests: whole products, all ranks, more examples"
	@echo "make check-models  real models of transformers, timm, diffusers and others under six strategies, Ray"
	@echo "make chaos  kills, stops, floods, hostile frames and damaged files: minutes"
	@echo "make rehearse  thousands of small runs in virtual time, with faults of all kinds: an hour"
	@echo "make docs   the documentation site, in build/site/; a dead link is an error"
	@echo "make native        build the native part for use from this folder"
	@echo "make check-native  the native part under the address and thread sanitizers"
	@echo "make clean  remove the virtual environment and caches"

$(READY): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet -c constraints.txt torch
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[dev]'
	touch $@

setup: $(READY)

demo: setup
	$(BIN)/shoal train -n 2 -s ddp --out runs/digits digits
	$(BIN)/shoal eval runs/digits
	$(BIN)/shoal verify -n 2 -s ddp --steps 20 digits

# one more than there are cores: tests wait for processes that they have started
PROCESSES := $(shell expr $$(nproc 2>/dev/null || echo 1) + 1)
test: setup
	$(BIN)/python -m pytest -n $(PROCESSES) --dist worksteal

check: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python -m pytest -n $(PROCESSES) --dist worksteal --whole

check-models: setup
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[models,frameworks,ray]'
	$(BIN)/python -m pytest -n 0 --whole tests/comm/test_frameworks.py tests/launch/test_ray.py tests/launch/test_ray_losses.py
	$(BIN)/python -m tests.models

chaos: setup
	$(BIN)/python -m tests.chaos

SEEDS ?= 0:10000
rehearse: setup
	$(BIN)/python -m tests.rehearse.faults --seeds $(SEEDS)

docs: setup
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[docs]'
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict

native: setup
	$(BIN)/python setup.py --quiet build_ext --inplace

# ranks as threads and as processes, one of which dies; over TCP also a peer that writes wrong frames
TCP := tests/comm/transport/tcp_driver.c $(filter-out %/_tcp.c,$(wildcard shoal/comm/transport/tcp/*.c))
SANITIZED := -g -O1 -std=gnu11 -fwrapv -fno-strict-aliasing -fno-omit-frame-pointer -Wall -pthread
check-native:
	mkdir -p build
	$(CC) $(SANITIZED) -fsanitize=address,undefined -fno-sanitize-recover=all \
		tests/comm/transport/shm_driver.c -o build/shm-address
	$(CC) $(SANITIZED) -Wno-tsan -fsanitize=thread tests/comm/transport/shm_driver.c -o build/shm-thread
	$(CC) $(SANITIZED) -fsanitize=address,undefined -fno-sanitize-recover=all $(TCP) -o build/tcp-address
	$(CC) $(SANITIZED) -Wno-tsan -fsanitize=thread $(TCP) -o build/tcp-thread
	$(CC) $(SANITIZED) -fsanitize=address,undefined -fno-sanitize-recover=all \
		tests/server/embedding/rows_driver.c -o build/rows-address
	build/shm-address
	build/shm-thread
	build/tcp-address
	build/tcp-thread
	build/rows-address

clean:
	rm -rf $(VENV) build *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
