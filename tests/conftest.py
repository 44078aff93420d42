"""Fixtures that many folders' tests share, and the threads that tests may use."""

import gc
import os
import signal
import ssl
import sys
from collections.abc import Generator, Iterator
from pathlib import Path

import hypothesis
import pytest

# No deadline: on a busy machine an example may take long. The examples are the same in every run, so a change fails
# by its own fault; ``PHLOEM_RANDOM_EXAMPLES`` draws that many new ones for each test.
_num_random = int(os.environ.get("PHLOEM_RANDOM_EXAMPLES", "0"))
hypothesis.settings.register_profile(
    "suite",
    deadline=None,
    suppress_health_check=[hypothesis.HealthCheck.too_slow],
    max_examples=_num_random or 100,
    derandomize=not _num_random,
)
hypothesis.settings.load_profile("suite")

# ``python -m pytest`` puts the root on the path, where its folders would be packages of their own: transformers, for
# one, looks for a package called ``kernels``.
_ROOT = Path(__file__).resolve().parents[1]
sys.path[:] = [entry for entry in sys.path if Path(entry or ".").resolve() != _ROOT]

# Each worker and the processes that it starts have their own share of the cores, which "one thread per core" counts.
# If two workers had threads on one core, each would spin while it waits for the other's.
if "PYTEST_XDIST_WORKER" in os.environ and hasattr(os, "sched_setaffinity"):
    _cores = sorted(os.sched_getaffinity(0))
    _worker = int(os.environ["PYTEST_XDIST_WORKER"].removeprefix("gw"))
    _share = _cores[_worker :: int(os.environ["PYTEST_XDIST_WORKER_COUNT"])]
    os.sched_setaffinity(0, _share or [_cores[_worker % len(_cores)]])

# Before torch and numba are loaded.
_num_threads = 1 if "PYTEST_XDIST_WORKER" in os.environ else min(2, os.cpu_count() or 1)
for _name in ("OMP_NUM_THREADS", "NUMBA_NUM_THREADS"):
    os.environ.setdefault(_name, str(_num_threads))
# A shell's background job ignores Ctrl-C, and the programs that tests start and interrupt would ignore it too.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("HF_HUB_OFFLINE", "1")  # the reference implementation looks names up on the hub
# An HTTP client reads every certificate of a file when it is made, which takes 20 ms, but those of a folder when it
# needs them. Tests and the processes that they start make many.
if _certificates := ssl.get_default_verify_paths().capath:
    os.environ.pop("SSL_CERT_FILE", None)
    os.environ["SSL_CERT_DIR"] = _certificates


# The files that take longest, longest first: a worker that began one of them last would leave the other without work.
_LONGEST = [
    "test_gang.py",
    "test_serve.py",
    "test_real_model.py",
    "test_smollm2.py",
    "test_examples.py",
    "test_engine.py",
    "test_nodes.py",
    "test_windows.py",
    "test_wheel.py",
    "test_families.py",
    "test_triton.py",
    "test_vectorised_decode.py",
    "test_overlap.py",
    "test_docs.py",
    "test_interpreted.py",
    "test_gpu.py",
    "test_arrays.py",
    "test_mask_thread.py",
    "test_closing.py",
    "test_model.py",
    "test_bad_grammars.py",
    "test_embeddings.py",
    "test_soak.py",
    "test_connection.py",
    "test_autoscale.py",
    "test_soak_http.py",
    "test_step_graphs.py",
    "test_layers.py",
    "test_generate.py",
    "test_preemption.py",
    "test_scheduler_sim.py",
    "test_app.py",
    "test_every_field.py",
    "test_scalars.py",
    "test_model_drafter.py",
    "test_page.py",
    "test_chat.py",
    "test_migrate.py",
    "test_client.py",
    "test_workloads.py",
    "test_long_requests.py",
    "test_distribution.py",
    "test_combinations.py",
    "test_engines.py",
    "test_products.py",
    "test_reuse.py",
]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The longest files first, all others in the order that they have."""
    ranks = {name: rank for rank, name in enumerate(_LONGEST)}
    items.sort(key=lambda item: ranks.get(item.path.name, len(ranks)))


def pytest_sessionstart() -> None:
    """Compile the code of grammars' masks before any worker starts, where it is not on disk: else many engines would
    wait for it, each with a process that compiles it.
    """
    if "PYTEST_XDIST_WORKER" not in os.environ:
        from phloem.constrained import compiling

        process = compiling.begin("auto")
        if process is not None:
            assert process.wait() == 0


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Collect no garbage while modules are loaded, and exclude them from later collections: they live until the end."""
    gc.disable()
    result = yield
    gc.collect()
    gc.freeze()
    gc.enable()
    return result


@pytest.fixture(scope="module", autouse=True)
def _old_objects_are_frozen() -> None:
    """Exclude what outlives a module from garbage collections. An engine's end thaws it: it unfreezes all objects."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session")
def tiny_model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a tiny random Llama and a byte tokenizer with ChatML (see tests/runtime/models/tiny.py)."""
    from phloem.tests.runtime.models.tiny import make_tiny_model

    return make_tiny_model(tmp_path_factory.mktemp("tiny"), seed=0)


@pytest.fixture(scope="session")
def smollm2_path() -> Path:
    """SmolLM2-135M-Instruct as GGUF, where ``phloem pull`` keeps it; fetched if it is not there. Mark: ``model``."""
    from phloem.runtime.weights.resolve import resolve_model

    return resolve_model("smollm2")


@pytest.fixture
def every_core() -> Iterator[None]:
    """The test's thread, and those that it starts, may run on every core, not on the worker's alone."""
    if not hasattr(os, "sched_setaffinity"):
        yield
        return
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, range(os.cpu_count() or 1))
    yield
    os.sched_setaffinity(0, before)
