"""Whether tests run compiled kernels on a GPU (``PHLOEM_TEST_GPU=1``, see ``make test-gpu``) or interpreted ones."""

import os

ON_A_GPU = os.environ.get("PHLOEM_TEST_GPU") == "1"


def choose_kernels() -> None:
    """Call it before a kernel is imported: Triton decides then."""
    if ON_A_GPU:
        os.environ.pop("TRITON_INTERPRET", None)
    else:
        os.environ["TRITON_INTERPRET"] = "1"
