"""What this machine can run, as text, for reports that something is slow or missing."""

from __future__ import annotations

import importlib.metadata
import platform
import sys
from collections.abc import Mapping

from . import cpu_isa, processor
from .runtime.weights.aliases import ALIASES
from .runtime.weights.home import default_home
from .runtime.weights.pull import is_pulled

_PACKAGES = ("phloem", "torch", "triton", "numba", "numpy", "tokenizers", "pyzmq", "msgspec")
_CPU_FLAGS = (
    *("avx2", "avx_vnni", "avx512f", "avx512_bf16", "avx512_vnni", "amx_bf16", "amx_int8"),
    *("asimd", "asimddp", "i8mm", "bf16", "sve"),
)


def report() -> dict[str, Mapping[str, str]]:
    """Sections of name and value."""
    return {
        "machine": _machine(),
        "packages": {name: _version(name) for name in _PACKAGES},
        "kernels": _kernels(),
        "models": _models(),
    }


def _machine() -> dict[str, str]:
    return {
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "python": sys.version.split()[0],
        "Python bytecode": _bytecode(),
        "cpu": processor.name(),
        "cores for this process": str(processor.num_cores()),
        "cpu features": " ".join(_cpu_features()) or "none of note",
        "memory": f"{memory / 1e9:.1f} GB" if (memory := processor.memory_bytes()) else "unknown",
    }


def _bytecode() -> str:
    if not sys.dont_write_bytecode:
        return "kept in __pycache__"
    return "not kept (PYTHONDONTWRITEBYTECODE): modules that were never compiled are compiled at every start"


def _cpu_features() -> list[str]:
    flags = set((processor.field("flags") or processor.field("Features")).split())
    return [flag for flag in _CPU_FLAGS if flag in flags]


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def _kernels() -> dict[str, str]:
    try:
        import torch
    except ImportError as error:
        return {"torch": f"cannot be imported: {error}"}
    return {
        "CPU kernels": _isas(),
        "torch's CPU level": torch.backends.cpu.get_cpu_capability(),
        "torch threads": str(torch.get_num_threads()),
        "4-bit CPU linears": _yes(hasattr(torch.ops.aten, "_weight_int4pack_mm_for_cpu")),
        "bfloat16 in hardware": _yes(bool({"avx512_bf16", "amx_bf16", "bf16"} & set(_cpu_features()))),
        "numba": _numba(),
        "CUDA": _cuda(),
    }


def _isas() -> str:
    best, *others = cpu_isa.available()
    also = f"; --cpu-isa also takes {', '.join(one.name for one in others)}" if others else ""
    return f"{best.name} ({best.about}){also}"


def _numba() -> str:
    try:
        import numba
    except ImportError as error:
        return f"cannot be imported: {error}"
    return f"{numba.__version__}, {numba.get_num_threads()} threads"


def _cuda() -> str:
    import torch

    if not torch.cuda.is_available():
        return "no device"
    names = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    return f"{', '.join(names)} (triton {_version('triton')})"


def _models() -> dict[str, str]:
    home = default_home()
    found = {"folder": str(home)}
    for alias in ALIASES.values():
        size = f"{alias.size_bytes / 1e6:,.0f} MB"
        state = f"pulled, {size}" if is_pulled(alias, home) else f"not pulled, {size}: phloem pull {alias.name}"
        found[alias.name] = f"{alias.about} ({state})"
    return found


def _yes(holds: bool) -> str:
    return "yes" if holds else "no"
