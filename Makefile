# The README's commands. Everything they need is installed into .venv; `make SYSTEM_TORCH=1 ...` uses the machine's torch.
PYTHON ?= python3
VENV ?= .venv
OUT ?= outputs/demo
SEED ?= 0
BIN := $(VENV)/bin
TORCH := $(shell sed -n 's/^torch==/torch==/p' constraints.txt)
GL_PACKAGES := libegl1 libegl-mesa0 libgl1-mesa-dri libgl1 libglib2.0-0

.PHONY: demo test test-slow lint setup libero gl clean

demo: setup
	PATH="$(CURDIR)/$(BIN):$$PATH" bash recipes/demo.sh $(OUT) $(SEED)

# One thread a test process: two pools on two cores would wait for each other.
test: export OMP_NUM_THREADS = 1
# Without LIBERO its tests fail instead of being skipped.
test test-slow: export SOMA_REQUIRE_LIBERO = 1
test: setup libero
	$(BIN)/python -m pytest tests -m "not gpu and not slow" -n 2 --dist loadgroup -q

test-slow: setup libero
	$(BIN)/python -m pytest tests -m "slow and not gpu" -q --durations=10

lint: $(VENV)/.stamp-dev
	$(BIN)/ruff check . && $(BIN)/ruff format --check . && $(BIN)/mypy

setup: $(VENV)/.stamp gl

# The benchmark with its meshes: 1.8 GB, which the demo does not need. Its OpenCV needs libGL and glib, too.
libero: $(VENV)/.stamp-libero
	@$(BIN)/python -c 'import cv2' || { [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null && \
	  apt-get update -qq && apt-get install -y -qq $(GL_PACKAGES) && $(BIN)/python -c 'import cv2'; }

# torch goes first and by itself: asked for together with the rest, pip may take a CUDA build of several gigabytes.
$(VENV)/.stamp: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "Python 3.11 or newer is needed; set PYTHON=/path/to/python3.11"; exit 1; }
	@$(PYTHON) -c 'import ensurepip' || { echo "the venv module is missing: apt-get install python3-venv"; exit 1; }
	$(PYTHON) -m venv $(if $(SYSTEM_TORCH),--system-site-packages) $(VENV)
ifdef SYSTEM_TORCH
	grep -v '^torch==\|^triton==' constraints.txt > $(VENV)/constraints.txt
else
	cp constraints.txt $(VENV)/constraints.txt
	$(BIN)/pip install -q "$(TORCH)"
endif
	$(BIN)/pip install -q -c $(VENV)/constraints.txt -e ".[test]"
	$(BIN)/pip install -q --no-deps -c $(VENV)/constraints.txt openpi-client # asks for NumPy 1; its client runs with 2
	touch $@

$(VENV)/.stamp-libero: $(VENV)/.stamp
	$(BIN)/pip install -q -c $(VENV)/constraints.txt -e ".[libero]"
	touch $@

$(VENV)/.stamp-dev: $(VENV)/.stamp
	$(BIN)/pip install -q -c $(VENV)/constraints.txt -e ".[dev]"
	touch $@

# Off-screen rendering: as root the libraries are installed, otherwise the command prints the line to run.
gl: $(VENV)/.stamp
	@$(BIN)/python -m soma_lightning.envs.rendering || { [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null && \
	  apt-get update -qq && apt-get install -y -qq $(GL_PACKAGES) && $(BIN)/python -m soma_lightning.envs.rendering; }

clean:
	rm -rf $(VENV) outputs build dist *.egg-info
