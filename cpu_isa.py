"""The instruction sets that the CPU kernels are written for, and the one that this process uses.

An instruction set is chosen once for a process: the best that the CPU and the operating system allow, or the one that
``choose`` names. ``choose`` also restricts numba's code and torch's, so that a fast machine shows what a slower one
would do. This module imports neither before it is asked.
"""

from __future__ import annotations

import ctypes
import os
import platform
import sys
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal, get_args

from .processor import arm_features

CpuIsa = Literal["auto", "amx", "avx512_vnni", "avx_vnni", "avx2", "neon_i8mm", "neon_dotprod", "portable"]
ByteProducts = Literal["vpdpbusd", "pmaddubsw", "usdot", "sdot", "none"]

_WIDE = ("avx512", "avx10", "amx")  # the beginnings of LLVM's names of what the narrower sets leave out
_NEWER = (*_WIDE, "avxvnni", "avxifma", "avxneconvert")
_AVX = (*_NEWER, "avx", "fma", "f16c", "vaes", "vpclmulqdq", "xop", "gfni")
_X86, _ARM = ("x86_64", "AMD64"), ("aarch64", "arm64")


@dataclass(frozen=True, slots=True)
class Isa:
    """One instruction set, as the emitters of kernels read it.

    ``features`` are LLVM's names of what the CPU must have; ``left_out`` the beginnings of those that code forced to
    this set does not use. ``byte_products``: the instruction that multiplies bytes and adds neighbours.
    """

    name: CpuIsa
    about: str
    machines: tuple[str, ...]
    features: frozenset[str]
    left_out: tuple[str, ...]
    lanes: int  # float32 of a vector register
    num_registers: int
    byte_products: ByteProducts
    torch: tuple[str, str]  # ATEN_CPU_CAPABILITY and ONEDNN_MAX_CPU_ISA that restrict torch likewise

    @property
    def tile_rows(self) -> tuple[int, ...]:
        """For how many rows of 16 outputs there are tiles whose sums fit in registers."""
        return (1, 2, 4, 8) if self.lanes * self.num_registers >= 512 else (1, 2, 4)

    @property
    def has_tiles(self) -> bool:
        """Whether there are products of whole tiles of bfloat16 (``kernels/cpu/amx.py``)."""
        return "amx-bf16" in self.features


def _isa(
    name: CpuIsa,
    about: str,
    machines: tuple[str, ...],
    features: str,
    left_out: tuple[str, ...],
    registers: tuple[int, int],
    byte_products: ByteProducts,
    torch: tuple[str, str],
) -> Isa:
    return Isa(name, about, machines, frozenset(features.split()), left_out, *registers, byte_products, torch)


# Best first.
ISAS = (
    _isa(
        "amx",
        "16 x 16 x 32 products of bfloat16 in one instruction",
        _X86,
        "avx512f avx512bw avx512vl avx512vnni avx512bf16 amx-tile amx-int8 amx-bf16",
        (),
        (16, 32),
        "vpdpbusd",
        ("", ""),
    ),
    _isa(
        "avx512_vnni",
        "64 byte products in one instruction",
        _X86,
        "avx512f avx512bw avx512vl avx512vnni",
        ("amx",),
        (16, 32),
        "vpdpbusd",
        ("avx512", "AVX512_CORE_BF16"),
    ),
    _isa(
        "avx_vnni",
        "32 byte products in one instruction",
        _X86,
        "avx2 fma f16c avxvnni",
        _WIDE,
        (8, 16),
        "vpdpbusd",
        ("avx2", "AVX2_VNNI"),
    ),
    _isa(
        "avx2",
        "32 byte products in two instructions",
        _X86,
        "avx2 fma f16c",
        _NEWER,
        (8, 16),
        "pmaddubsw",
        ("avx2", "AVX2"),
    ),
    _isa("neon_i8mm", "16 byte products of mixed signs", _ARM, "neon dotprod i8mm", (), (4, 32), "usdot", ("", "")),
    _isa("neon_dotprod", "16 byte products", _ARM, "neon dotprod", ("i8mm", "bf16", "sve"), (4, 32), "sdot", ("", "")),
    _isa(
        "portable",
        "no byte products; runs everywhere",
        (),
        "",
        (*_AVX, "dotprod", "i8mm", "bf16", "sve"),
        (4, 16),
        "none",
        ("default", "SSE41"),
    ),
)
assert {"auto", *(one.name for one in ISAS)} == set(get_args(CpuIsa))


class IsaError(ValueError):
    """The instruction set that was asked for cannot be used, with the reason."""


@dataclass(slots=True)
class _Process:
    isa: Isa | None = None


@cache
def _process() -> _Process:
    return _Process()


def isa() -> Isa:
    """The instruction set of this process's kernels; from the first call on it stays."""
    process = _process()
    if process.isa is None:
        process.isa = best(cpu_features())
        tell_numba()
    return process.isa


def best(features: frozenset[str]) -> Isa:
    """The first of the table that a CPU of this machine's architecture with these features can run."""
    return next(one for one in ISAS if _can_run(one, features))


def available() -> tuple[Isa, ...]:
    """What this CPU and its operating system can run, best first."""
    features = cpu_features()
    return tuple(one for one in ISAS if _can_run(one, features))


@cache
def cpu_features() -> frozenset[str]:
    """LLVM's names of the features that the CPU has and the operating system allows."""
    found = frozenset(name for name, has in host_features().items() if has)
    if "amx-tile" in found and not _may_use_tiles():
        return frozenset(name for name in found if not name.startswith("amx"))
    return found


def host_features() -> dict[str, bool]:
    """By LLVM's names, what LLVM and the operating system know of the CPU's features."""
    from llvmlite import binding

    return dict(binding.get_host_cpu_features()) | arm_features()


@cache
def tell_numba() -> None:
    """Has numba compile for this process's set. Must come before numba's first compilation.

    By itself numba compiles for what LLVM sees of the CPU, which is all on x86, but not on Arm.
    """
    if platform.machine() in _ARM:
        _set_numba(isa())


def _set_numba(one: Isa) -> None:
    from numba import config

    settings: Any = config
    settings.CPU_FEATURES = restricted(one, host_features())


_ARCH_PRCTL, _REQUEST_PERMISSION, _TILE_DATA = 158, 0x1023, 18


def _may_use_tiles() -> bool:
    """Asks Linux for AMX's registers, for this process and its threads; without that their first use ends it."""
    if sys.platform != "linux":
        return False
    try:
        return ctypes.CDLL(None).syscall(_ARCH_PRCTL, _REQUEST_PERMISSION, _TILE_DATA) == 0
    except (AttributeError, OSError):
        return False


def choose(name: CpuIsa) -> Isa:
    """Makes ``name`` this process's instruction set; ``auto`` is the best one.

    To restrict code generation it must run before torch and numba are imported. Raises IsaError where the CPU lacks
    the set, and where it is too late.
    """
    if name == "auto":
        return isa()
    wanted = next(one for one in ISAS if one.name == name)
    able = available()
    if wanted not in able:
        missing = ", ".join(sorted(wanted.features - cpu_features())) or f"a CPU of {' or '.join(wanted.machines)}"
        raise IsaError(f"cpu_isa={name!r}: this machine lacks {missing}; it can run {', '.join(i.name for i in able)}")
    process = _process()
    if process.isa is wanted:
        return wanted
    if process.isa is None and wanted is able[0]:
        process.isa = wanted
        tell_numba()
        return wanted
    loaded = [library for library in ("torch", "numba") if library in sys.modules]
    if process.isa is not None or loaded:
        why = f"this process uses {process.isa.name}" if process.isa is not None else f"{loaded[0]} is loaded already"
        raise IsaError(f"cpu_isa={name!r}: {why}; choose it in a new process, as phloem.Runtime starts one")
    process.isa = wanted
    _restrict(wanted)
    return wanted


def _can_run(one: Isa, features: frozenset[str]) -> bool:
    return (not one.machines or platform.machine() in one.machines) and one.features <= features


def _restrict(wanted: Isa) -> None:
    """Has numba and torch leave out what the set leaves out."""
    for variable, value in zip(("ATEN_CPU_CAPABILITY", "ONEDNN_MAX_CPU_ISA"), wanted.torch, strict=True):
        if value:
            os.environ[variable] = value
    _set_numba(wanted)


def restricted(wanted: Isa, features: dict[str, bool]) -> str:
    """LLVM's list of features for code of this set on a CPU with ``features``."""
    kept = {name: has and not name.startswith(wanted.left_out) for name, has in features.items()}
    return ",".join(f"{'+' if has else '-'}{name}" for name, has in sorted(kept.items()))
