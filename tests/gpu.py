"""Whether tests run compiled kernels on a GPU (``PHLOEM_TEST_GPU=1``, see ``make test-gpu``) or interpreted ones."""

import importlib
import os
from dataclasses import replace
from functools import cache
from importlib.util import find_spec
from types import SimpleNamespace

ON_A_GPU = os.environ.get("PHLOEM_TEST_GPU") == "1"


def choose_kernels() -> None:
    """Call it before a kernel is imported: Triton decides then."""
    if ON_A_GPU:
        os.environ.pop("TRITON_INTERPRET", None)
    else:
        os.environ["TRITON_INTERPRET"] = "1"
        interpret_without_waste()


@cache
def interpret_without_waste() -> None:
    """Before a kernel runs: take out of Triton's interpreter what needs half of its time and changes no result.

    It computes each sum of integers again in 64 bits, and compares it with the limits of its type, for an assertion
    that only its debug mode makes. And at each call of a function it looks through the whole language for what it has
    to replace, though the language stays replaced after the first call of a function inside a kernel.
    """
    if find_spec("triton") is None:
        return
    interpreter = importlib.import_module("triton.runtime.interpreter")
    builder = interpreter.interpreter_builder
    if not builder.options.debug:
        builder.options = replace(builder.options, sanitize_overflow=False)
    language = importlib.import_module("triton.language")
    both = SimpleNamespace(__globals__={"tl": language, "core": language.core})
    names = vars(interpreter)
    replace_language = names.get("_patch_lang")
    if replace_language is None:  # another version of Triton
        return
    once = cache(lambda: replace_language(both))

    def replace_once(function: object) -> SimpleNamespace:
        once()
        return SimpleNamespace(restore=lambda: None)

    names["_patch_lang"] = replace_once
