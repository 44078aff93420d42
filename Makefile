# Every target sets itself up: a virtual environment in .venv, made with python3 -m venv and pip.
# --no-compile: Python compiles the few modules that are used when they are; all of them at once takes a minute.
PYTHON ?= python3
VENV := .venv
PY := $(VENV)/bin/python
MODEL ?= smollm2
# Three for two cores: tests wait for processes, sockets and clocks a third of their time.
JOBS ?= 3
RUN_STAMP := $(VENV)/.installed
DEV_STAMP := $(VENV)/.installed-dev
INTEROP := $(abspath $(VENV)/interop)
AXE := $(VENV)/axe/node_modules/axe-core/axe.min.js

# The tests and the demo start many processes, each of which would compile torch's Python again.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo test test-interop test-openapi test-otel test-ray test-s3 test-arm test-arm-kernels test-isas test-gpu soak soak-ranks soak-fleet soak-http soak-files soak-examples oracle check serve bench clean test-browser

$(RUN_STAMP): pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Phloem needs Python 3.11 or newer; this is %s: make PYTHON=python3.11 ..." % sys.version.split()[0])'
	@test -x $(PY) || $(PYTHON) -m venv $(VENV)
	$(PY) -m pip install --quiet --upgrade 'pip>=25.1'
	PYTHONWARNINGS=ignore $(PY) -m pip install --quiet --no-compile --editable .
	@touch $@

$(DEV_STAMP): $(RUN_STAMP)
	$(PY) -m pip install --quiet --no-compile --group dev
	@touch $@

demo: $(RUN_STAMP)
	$(PY) -m phloem pull $(MODEL)
	$(PY) examples/quickstart.py --model $(MODEL)

test: $(DEV_STAMP)
	$(PY) -m phloem pull smollm2
	$(VENV)/bin/pytest -n $(JOBS) --dist loadfile --no-loadscope-reorder

# Clients of the HTTP API, in a folder of their own, because some want another openai. The server's packages stay the same. Some
# clients leave sockets and event loops open.
SERVERS := fastapi|h11|httpx|huggingface_hub|msgspec|numba|numpy|pydantic|pytest|starlette|tokenizers|torch|uvicorn

$(INTEROP)/.installed: $(DEV_STAMP)
	@mkdir -p $(INTEROP)
	$(PY) -m pip freeze --exclude-editable | grep -E '^($(SERVERS))==' > $(INTEROP)/constraints.txt
	$(PY) -m pip install --quiet --no-compile --upgrade --target $(INTEROP) --constraint $(INTEROP)/constraints.txt --group interop
	@touch $@

test-interop: $(INTEROP)/.installed
	$(PY) -m phloem pull smollm2
	PYTHONPATH=$(INTEROP) $(VENV)/bin/pytest -m interop -W ignore::pytest.PytestUnraisableExceptionWarning tests/interop tests/lang/test_interop.py

# Requests made from /openapi.json. A folder of its own, because schemathesis brings another pytest plugin.
OPENAPI := $(abspath $(VENV)/openapi)

$(OPENAPI)/.installed: $(DEV_STAMP)
	@mkdir -p $(OPENAPI)
	$(PY) -m pip freeze --exclude-editable | grep -E '^($(SERVERS))==' > $(OPENAPI)/constraints.txt
	$(PY) -m pip install --quiet --no-compile --upgrade --target $(OPENAPI) --constraint $(OPENAPI)/constraints.txt --group openapi
	@touch $@

test-openapi: $(OPENAPI)/.installed
	PYTHONPATH=$(OPENAPI) $(VENV)/bin/pytest -m openapi tests/openapi

# The page in Chromium: Debian's chromium, chromium-driver and npm (for axe-core, which looks for what is not accessible).
test-browser: $(DEV_STAMP)
	$(PY) -m pip install --quiet --no-compile --group browser
	@test -f $(AXE) || npm install --silent --no-audit --no-fund --prefix $(VENV)/axe axe-core
	PHLOEM_AXE=$(AXE) $(VENV)/bin/pytest -m browser tests/browser

# Spans, with OpenTelemetry's SDK.
test-otel: $(DEV_STAMP)
	$(PY) -m pip install --quiet --no-compile --group otel
	$(VENV)/bin/pytest -m otel tests/runtime/server/test_tracing.py

# Ray Serve on loopback, in a folder of its own: half a gigabyte. The server's packages stay the same. Its absolute path, since
# tests start programs in other folders.
RAY := $(abspath $(VENV)/ray)

$(RAY)/.installed: $(DEV_STAMP)
	@mkdir -p $(RAY)
	$(PY) -m pip freeze --exclude-editable | grep -E '^($(SERVERS))==' > $(RAY)/constraints.txt
	$(PY) -m pip install --quiet --no-compile --upgrade --target $(RAY) --constraint $(RAY)/constraints.txt --group ray
	@touch $@

test-ray: $(RAY)/.installed
	PYTHONPATH=$(RAY) $(VENV)/bin/pytest -m ray tests/cluster/ray

# A bucket of a real server on loopback, in a folder of its own. The server's packages stay the same.
S3 := $(abspath $(VENV)/s3)

$(S3)/.installed: $(DEV_STAMP)
	@mkdir -p $(S3)
	$(PY) -m pip freeze --exclude-editable | grep -E '^($(SERVERS))==' > $(S3)/constraints.txt
	$(PY) -m pip install --quiet --no-compile --upgrade --target $(S3) --constraint $(S3)/constraints.txt --group s3
	@touch $@

test-s3: $(S3)/.installed
	PYTHONPATH=$(S3) $(VENV)/bin/pytest -m s3 tests/runtime/engine/test_shared_cache.py

# 100,000 programs with aborts in a cache a tenth of their need: a quarter of an hour, with a line a round.
soak: $(DEV_STAMP)
	PHLOEM_SOAK_REQUESTS=100000 $(VENV)/bin/pytest tests/runtime/engine/test_soak.py -o log_cli=true -o log_cli_level=INFO

# 2,000 programs on a model that two processes share out: three to fifteen minutes, with a line a round. Then 20 greedy texts of SmolLM2
# on seven meshes of virtual ranks and of processes, compared with one rank's: three minutes of CPU.
soak-ranks: $(DEV_STAMP)
	$(PY) -m phloem pull smollm2
	PHLOEM_SOAK_RANKS=2000 $(VENV)/bin/pytest tests/runtime/parallel/test_soak_ranks.py tests/runtime/parallel/test_smollm2.py -o log_cli=true -o log_cli_level=INFO

# Engine processes are killed 200 times under 40 programs: eight to ten minutes on two cores, with a line each tenth kill.
# Then 200 programs are moved from one engine to the other, and engines are killed during hand-offs.
soak-fleet: $(DEV_STAMP)
	PHLOEM_SOAK_KILLS=200 PHLOEM_SOAK_MOVES=200 $(VENV)/bin/pytest tests/cluster/test_soak.py tests/cluster/test_migrate.py tests/cluster/test_roles.py -o log_cli=true -o log_cli_level=INFO

# 256 streams at once over HTTP, a tenth leaving, beside 200 connections that dribble or never read: an hour, with a line a round.
soak-http: $(DEV_STAMP)
	PHLOEM_SOAK_HTTP_MINUTES=$${PHLOEM_SOAK_HTTP_MINUTES:-60} $(VENV)/bin/pytest tests/runtime/server/test_soak_http.py -o log_cli=true -o log_cli_level=INFO

# 10,000 damaged files of each kind (GGUF, safetensors, ONNX, config.json, tokenizer.json), 2,000 of each kind of quantized folder:
# each is loaded or refused in one line. The graphs take nine minutes of CPU, all of them more than an hour.
soak-files: $(DEV_STAMP)
	PHLOEM_DAMAGED_FILES=10000 $(VENV)/bin/pytest tests/runtime/weights/test_damaged_files.py tests/runtime/weights/test_onnx.py -k "file_s or folder or graphs"

# 3,000 new random examples for each property test; ``make test`` has the same 100 each time. Two minutes.
soak-examples: $(DEV_STAMP)
	PHLOEM_RANDOM_EXAMPLES=3000 $(VENV)/bin/pytest $(shell grep -rlE "^from hypothesis import" tests --include="test_*.py" | grep -v schemathesis)

# 100,000 random walks through random grammars, every token tried at every state: some minutes.
oracle: $(DEV_STAMP)
	$(PY) -m phloem.tests.constrained.oracle --walks 100000

# Arm's integer products on another machine: Debian's qemu-user and gcc-aarch64-linux-gnu.
test-arm: $(DEV_STAMP)
	$(VENV)/bin/pytest tests/kernels/test_arm.py -m arm

# The kernels' tests and an engine in an Arm Python that qemu's user mode runs: Debian's qemu-user and debootstrap, as root. The
# first time it fetches Debian's Python 3.11 and 230 MB of wheels: 1.2 GB in $(VENV)/arm. The tests take half an hour to an hour.
# torch 2.9.1 is the newest with a CPU build for Arm in the index.
ARM := $(VENV)/arm
ARM_WHEELS := --only-binary=:all: --no-deps --python-version 3.11 --implementation cp --abi cp311 --abi abi3 --abi none \
	$(foreach glibc,_2_31 _2_28 _2_27 _2_26 2014 _2_17,--platform manylinux$(glibc)_aarch64)
NOT_ON_ARM := torch|triton|mypy|ruff|ast_serialize|librt|openai|pip|phloem

$(ARM)/.installed: $(DEV_STAMP)
	rm -rf $(ARM) && mkdir -p $(ARM)
	debootstrap --arch=arm64 --foreign --variant=minbase --include=python3.11,libgomp1,libstdc++6 bookworm "$(CURDIR)/$(ARM)/root"
	for package in $(ARM)/root/var/cache/apt/archives/*.deb; do dpkg-deb -x $$package $(ARM)/root; done
	rm -rf $(ARM)/root/proc $(ARM)/root/var/cache
	mkdir $(ARM)/root/proc
	$(PY) -m pip freeze --exclude-editable | grep -viE '^($(NOT_ON_ARM))(==| @)' > $(ARM)/packages.txt
	$(PY) -m pip install --quiet --no-compile --target $(ARM)/site $(ARM_WHEELS) -r $(ARM)/packages.txt torch==2.9.1
	ln -sfn "$(CURDIR)" $(ARM)/site/phloem
	@touch $@

test-arm-kernels: $(DEV_STAMP) $(if $(shell command -v qemu-aarch64),$(ARM)/.installed)
	PHLOEM_ARM="$(CURDIR)/$(ARM)" $(VENV)/bin/pytest -m arm tests/kernels/test_arm_kernels.py -rs -o log_cli=true -o log_cli_level=INFO

# Greedy texts under every instruction set that this machine can run: two minutes the first time.
test-isas: $(DEV_STAMP)
	PHLOEM_TEST_ISAS=1 $(VENV)/bin/pytest tests/runtime/engine/test_isas.py

# The compiled kernels and engines on a GPU: the kernels' tests, which are interpreted elsewhere, and those marked gpu.
test-gpu: $(DEV_STAMP)
	PHLOEM_TEST_GPU=1 $(VENV)/bin/pytest tests/kernels/triton
	PHLOEM_TEST_GPU=1 $(VENV)/bin/pytest -m gpu tests/runtime

# mypy wants a package in a folder of its own name; the link gives it one, whatever the checkout is called.
check: $(DEV_STAMP)
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	@mkdir -p $(VENV)/check && ln -sfn "$(CURDIR)" $(VENV)/check/phloem
	MYPYPATH=$(VENV)/check $(PY) -m mypy -p phloem

serve: $(RUN_STAMP)
	$(PY) -m phloem serve $(MODEL) --port 8000

bench: $(DEV_STAMP)
	$(PY) -m phloem pull smollm2
	$(PY) -m benchmarks.serving

clean:
	rm -rf $(VENV) build *.egg-info .pytest_cache .mypy_cache .ruff_cache
