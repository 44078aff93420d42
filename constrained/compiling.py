"""The compiled walks of grammars, made by a process of their own where they are not on disk yet.

numba holds Python's lock while it compiles, half a minute in all: in an engine's process every step would wait for it.
Two processes would not be quicker: the walks call the same functions, and each would compile them.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys

from ..cpu_isa import CpuIsa, choose, tell_numba
from .machine import are_on_disk

NICER = 10  # steps come first
# Together they run what answers of usual schemas run.
_SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 20},
        "code": {"type": "string", "pattern": "^[A-Z]{2}-[0-9]{3}$"},
        "day": {"type": "string", "format": "date"},
        "tags": {"type": "array", "items": {"enum": ["red", "green", "blue"]}, "maxItems": 3},
        "size": {"type": "integer", "minimum": 0, "maximum": 120},
        "price": {"type": "number"},
        "note": {"anyOf": [{"type": "null"}, {"type": "string"}]},
    },
    "required": ["name", "code", "day", "tags", "size", "price", "note"],
    "additionalProperties": False,
}
_TEXT = (
    '{"name": "Ada \\u00e9 \\n", "code": "AB-123", "day": "2024-02-29", "tags": ["red", "blue"], "size": 12, '
    '"price": 1.5e3, "note": "so"}'
)


def begin(cpu_isa: CpuIsa) -> subprocess.Popen[bytes] | None:
    """A process that compiles them; None where they are on disk. The caller ends it or waits for it."""
    if are_on_disk():
        return None
    path = [os.path.abspath(entry) for entry in sys.path]
    late = "from phloem.late_import import import_late; import_late()"
    code = f"import sys; sys.path[:] = {path!r}; {late}; from {__name__} import run; run({cpu_isa!r})"
    quiet = subprocess.DEVNULL
    return subprocess.Popen([sys.executable, "-P", "-c", code], stdin=quiet, stdout=quiet, stderr=quiet)


def run(cpu_isa: CpuIsa) -> None:
    """The main function of the process."""
    if sys.platform != "win32":
        os.nice(NICER)
    choose(cpu_isa)
    tell_numba()
    from .checker import byte_vocabulary
    from .compiler import Compiler
    from .spec import GrammarSpec

    compiler = Compiler(byte_vocabulary())
    specs = (GrammarSpec("json_schema", json.dumps(_SCHEMA)), GrammarSpec("regex", "[a-z]{3,9} [0-9]+(, [a-z]+)*"))
    for spec, text in zip(specs, (_TEXT, "abc 12, de"), strict=True):
        grammar = compiler.compile(spec)
        for limit in (None, len(text) + 20):  # also near a limit of tokens, where endings are looked for
            matcher = grammar.matcher()
            if limit is not None and grammar.least_tokens is not None:
                matcher.limit_rest(max(limit, grammar.least_tokens))
            for byte in text.encode():
                matcher.mask()
                matcher.forced_tokens()
                if not matcher.accept(byte):
                    break
