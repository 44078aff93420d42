"""Memory by address and vectors of 16 floats, as functions for compiled code. They check no bounds.

They take addresses (int64) and count in elements: ``load16(a, i, kind)`` loads 16 elements of the array at ``a`` from
element i on, widened to float32. ``kind`` is the array's type, ``FLOAT32`` or ``BFLOAT16``. LLVM splits the vectors
where the CPU's are shorter. A product may fuse with a sum, but sums are not reordered, so a result does not depend on
the code around it.
"""

import inspect
import operator
from collections.abc import Callable
from typing import Any, ClassVar

from llvmlite import ir
from numba import types
from numba.core.typing import signature
from numba.core.typing.templates import ConcreteTemplate, infer_global
from numba.extending import intrinsic, lower_builtin, models, register_model

from ...cpu_isa import isa
from .llvm import (
    F32,
    F64,
    FUSED,
    I8,
    I16,
    I32,
    I64,
    LANES,
    V16,
    V16_I8,
    V16_I16,
    V16_I32,
    at,
    constant,
    declared,
    fused,
    is_arm,
    narrow,
    number,
    splat,
    vector_at,
    widen,
    widen_half,
    words_of,
)
from .machine_code import inlined

FLOAT32 = 0
BFLOAT16 = 1
_YIELD = 1  # Arm's number of the hint


class Vector16(types.Type):
    """16 float32."""

    def __init__(self) -> None:
        super().__init__(name="Vector16")


vector16 = Vector16()


@register_model(Vector16)
class _Vector16Model(models.PrimitiveModel):
    def __init__(self, dmm: Any, fe_type: Any) -> None:
        super().__init__(dmm, fe_type, V16)


def compiled(result: types.Type, *arguments: types.Type) -> Callable[[Callable[..., Any]], Any]:
    """Makes ``emit(builder, *values)``, which writes LLVM code, callable from compiled code with these types."""

    def decorate(emit: Callable[..., Any]) -> Any:
        def typing(context: Any, *given: Any) -> Any:
            def codegen(context: Any, builder: Any, signature: Any, values: Any) -> Any:
                found = emit(builder, *values)
                return context.get_dummy_value() if found is None else found

            return result(*arguments), codegen

        # numba counts a call's arguments by the signature.
        names = ["context", *(f"a{i}" for i in range(len(arguments)))]
        kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
        typing.__signature__ = inspect.Signature([inspect.Parameter(n, kind) for n in names])  # type: ignore[attr-defined]
        typing.__name__ = typing.__qualname__ = emit.__name__
        typing.__doc__ = emit.__doc__
        return intrinsic(typing)

    return decorate


def when_compiled(name: str, value: Callable[[], int]) -> Any:
    """``f()``: the constant that ``value`` returns when the code that calls it is compiled."""

    def emit(builder: Any) -> Any:
        return number(value())

    emit.__name__ = name
    return compiled(types.int64)(emit)


@compiled(types.int64, types.int64, types.int64)
def get_i64(builder: Any, address: Any, index: Any) -> Any:
    return builder.load(at(builder, I64, address, index))


@compiled(types.int64, types.int64, types.int64)
def get_i8(builder: Any, address: Any, index: Any) -> Any:
    return builder.sext(builder.load(at(builder, I8, address, index)), I64)


@compiled(types.int64, types.int64, types.int64)
def get_i32(builder: Any, address: Any, index: Any) -> Any:
    return builder.sext(builder.load(at(builder, I32, address, index)), I64)


@compiled(types.float64, types.int64, types.int64)
def get_f64(builder: Any, address: Any, index: Any) -> Any:
    return builder.load(at(builder, F64, address, index))


@compiled(types.float32, types.int64, types.int64)
def get_f32(builder: Any, address: Any, index: Any) -> Any:
    return builder.load(at(builder, F32, address, index))


@compiled(types.float32, types.int64, types.int64)
def get_f16(builder: Any, address: Any, index: Any) -> Any:
    return widen_half(builder, builder.load(at(builder, I16, address, index)), F32)


@compiled(types.float32, types.int64, types.int64)
def get_bf16(builder: Any, address: Any, index: Any) -> Any:
    return widen(builder, builder.load(at(builder, I16, address, index)), F32)


@compiled(types.void, types.int64, types.int64, types.int64)
def put_i64(builder: Any, address: Any, index: Any, value: Any) -> None:
    builder.store(value, at(builder, I64, address, index))


@compiled(types.void, types.int64, types.int64, types.int64)
def put_i8(builder: Any, address: Any, index: Any, value: Any) -> None:
    builder.store(builder.trunc(value, I8), at(builder, I8, address, index))


@compiled(types.void, types.int64, types.int64, types.int64)
def put_i32(builder: Any, address: Any, index: Any, value: Any) -> None:
    builder.store(builder.trunc(value, I32), at(builder, I32, address, index))


@compiled(types.void, types.int64, types.int64, types.float32)
def put_f32(builder: Any, address: Any, index: Any, value: Any) -> None:
    builder.store(value, at(builder, F32, address, index))


@compiled(types.void, types.int64, types.int64, types.float32)
def put_bf16(builder: Any, address: Any, index: Any, value: Any) -> None:
    builder.store(narrow(builder, value, F32), at(builder, I16, address, index))


@compiled(types.void, types.int64, types.int64, types.float64)
def put_f64(builder: Any, address: Any, index: Any, value: Any) -> None:
    builder.store(value, at(builder, F64, address, index))


@compiled(types.int64, types.int64, types.int64)
def take_number(builder: Any, address: Any, index: Any) -> Any:
    """Returns the int64 there and adds 1, atomically: each thread gets another number. A full memory barrier."""
    return builder.atomic_rmw("add", at(builder, I64, address, index), ir.Constant(I64, 1), "seq_cst")


@compiled(types.int64, types.int64, types.int64)
def give_number(builder: Any, address: Any, index: Any) -> Any:
    """Subtracts 1 atomically; returns the number before."""
    return builder.atomic_rmw("sub", at(builder, I64, address, index), ir.Constant(I64, 1), "seq_cst")


@compiled(types.int64, types.int64, types.int64)
def watch(builder: Any, address: Any, index: Any) -> Any:
    """Loads the int64 there; what other threads wrote before they changed it is then visible too."""
    return builder.load_atomic(at(builder, I64, address, index), "seq_cst", 8)


def fetch(builder: Any, address: Any, size: int, *, level: int = 2) -> None:
    """Fetches ``size`` bytes to a cache level, ahead of their use. Any address is allowed.

    To the first level only some twenty lines can be on their way at once, and loads wait behind them.
    """
    function = declared(builder, "llvm.prefetch.p0", ir.VoidType(), I8.as_pointer(), I32, I32, I32)
    read, locality, data = (ir.Constant(I32, value) for value in (0, 4 - level, 1))
    for line in range(0, size, 64):
        place = builder.inttoptr(builder.add(address, number(line)), I8.as_pointer())
        builder.call(function, [place, read, locality, data])


@compiled(types.void, types.int64)
def prefetch(builder: Any, address: Any) -> None:
    """Fetches a cache line to the second level."""
    fetch(builder, address, 64)


@compiled(types.void)
def pause(builder: Any) -> None:
    """Tells the core that this thread is spinning."""
    if builder.module.triple.startswith("x86_64"):
        builder.call(declared(builder, "llvm.x86.sse2.pause", ir.VoidType()), [])
    elif is_arm(builder):
        builder.call(declared(builder, "llvm.aarch64.hint", ir.VoidType(), I32), [ir.Constant(I32, _YIELD)])


def c_function(name: str, num_arguments: int) -> Any:
    """``f(...)``: the C library's function of that name, on int64 addresses, its result ignored."""

    def emit(builder: Any, *values: Any) -> None:
        builder.call(declared(builder, name, I32, *(I64,) * num_arguments), values)

    emit.__name__ = f"c_{name}"
    return compiled(types.void, *(types.int64,) * num_arguments)(emit)


@compiled(types.void, types.int64, types.int64)
def call_function(builder: Any, function: Any, argument: Any) -> None:
    """Calls the compiled function at an address with one int64."""
    kind = ir.FunctionType(ir.VoidType(), [I64])
    builder.call(builder.inttoptr(function, kind.as_pointer()), [argument])


def local_floats(count: int) -> Any:
    """``f()``: the address of ``count`` float32 on the stack of the function that calls it. They hold anything.

    numba's own ``alloca_once`` fills them with zeros at each call. LLVM writes that out number by number, which for
    20 KB takes longer than all else of a kernel.
    """

    def emit(builder: Any) -> Any:
        with builder.goto_entry_block():
            return builder.ptrtoint(builder.alloca(ir.ArrayType(F32, count)), I64)

    emit.__name__ = f"local_floats_{count}"
    return compiled(types.int64)(emit)


@compiled(types.int64, types.float32)
def bits_of(builder: Any, value: Any) -> Any:
    """The float's 32 bits as 0 <= n < 2^32."""
    return builder.zext(builder.bitcast(value, I32), I64)


@compiled(vector16, types.int64, types.int64)
def load16_f32(builder: Any, address: Any, index: Any) -> Any:
    return builder.load(vector_at(builder, F32, address, index), align=4)


@compiled(vector16, types.int64, types.int64)
def load16_bf16(builder: Any, address: Any, index: Any) -> Any:
    return widen(builder, builder.load(vector_at(builder, I16, address, index), align=2), V16)


@compiled(types.void, types.int64, types.int64, vector16)
def store16_f32(builder: Any, address: Any, index: Any, value: Any) -> None:
    builder.store(value, vector_at(builder, F32, address, index), align=4)


@compiled(vector16, types.int64, types.int64)
def load4_f32(builder: Any, address: Any, index: Any) -> Any:
    """Lanes 4 i to 4 i + 3: number ``index + i``."""
    four = builder.load(vector_at(builder, F32, address, index, 4), align=4)
    return builder.shuffle_vector(four, four, ir.Constant(V16_I32, [i // 4 for i in range(LANES)]))


@compiled(types.void, types.int64, types.int64, vector16)
def store4_f32(builder: Any, address: Any, index: Any, value: Any) -> None:
    """Lane 4 i becomes number ``index + i``."""
    four = builder.shuffle_vector(value, value, ir.Constant(ir.VectorType(I32, 4), [0, 4, 8, 12]))
    builder.store(four, vector_at(builder, F32, address, index, 4), align=4)


@compiled(types.void, types.int64, types.int64, vector16)
def store16_bf16(builder: Any, address: Any, index: Any, value: Any) -> None:
    builder.store(narrow(builder, value, V16), vector_at(builder, I16, address, index), align=2)


@compiled(vector16, types.int64, types.int64)
def load16_i8(builder: Any, address: Any, index: Any) -> Any:
    """Bytes with a sign as floats."""
    place = builder.bitcast(at(builder, ir.IntType(8), address, index), V16_I8.as_pointer())
    return builder.sitofp(builder.load(place, align=1), V16)


@compiled(types.void, types.int64, types.int64, vector16)
def store16_i8(builder: Any, address: Any, index: Any, value: Any) -> None:
    """Whole numbers between -128 and 127 as bytes."""
    whole = builder.fptosi(value, V16_I32)
    place = builder.bitcast(at(builder, ir.IntType(8), address, index), V16_I8.as_pointer())
    builder.store(builder.trunc(whole, V16_I8), place, align=1)


@compiled(types.void, types.int64, types.int64, vector16)
def store16_i16_in_pairs(builder: Any, address: Any, index: Any, value: Any) -> None:
    """Whole numbers of 16 bits; of each four, the first and third, then the second and fourth."""
    words = builder.trunc(builder.fptosi(value, V16_I32), V16_I16)
    order = ir.Constant(V16_I32, [4 * (i // 4) + (0, 2, 1, 3)[i % 4] for i in range(LANES)])
    builder.store(builder.shuffle_vector(words, words, order), vector_at(builder, I16, address, index), align=2)


@compiled(vector16, vector16)
def round16(builder: Any, value: Any) -> Any:
    """Rounds to the nearest whole number, ties to even, for numbers below 2^22."""
    rounder = constant(V16, _ROUNDER)
    return builder.fsub(builder.fadd(value, rounder), rounder)


@compiled(vector16, types.float32)
def splat16(builder: Any, value: Any) -> Any:
    return splat(builder, value)


def _add(builder: Any, a: Any, b: Any) -> Any:
    return builder.fadd(a, b, flags=FUSED)


def _sub(builder: Any, a: Any, b: Any) -> Any:
    return builder.fsub(a, b, flags=FUSED)


def _mul(builder: Any, a: Any, b: Any) -> Any:
    return builder.fmul(a, b, flags=FUSED)


def _div(builder: Any, a: Any, b: Any) -> Any:
    return builder.fdiv(a, b)


@compiled(vector16, vector16, vector16, vector16)
def fused16(builder: Any, total: Any, a: Any, b: Any) -> Any:
    """total + a * b, rounded once where the machine can."""
    return fused(builder, total, a, b)


def quotient(builder: Any, a: Any, b: Any) -> Any:
    """a / b of 16 lanes, for b above 0, to about 1e-7 of the value.

    CPUs with AMX divide 16 numbers in 16 cycles, and do this in 3. On an AMD core with AVX-512 a division is quicker.
    """
    if not isa().has_tiles:
        return builder.fdiv(a, b)
    near = declared(builder, "llvm.x86.avx512.rcp14.ps.512", V16, V16, V16, I16)
    guess = builder.call(near, [b, constant(V16, 0.0), ir.Constant(I16, -1)])
    left = builder.fsub(constant(V16, 1.0), builder.fmul(guess, b, flags=FUSED), flags=FUSED)
    return builder.fmul(a, fused(builder, guess, guess, left))  # one step of Newton's method


@compiled(vector16, vector16, vector16)
def max16(builder: Any, a: Any, b: Any) -> Any:
    """Lane by lane; b where either is NaN."""
    return builder.select(builder.fcmp_ordered(">", a, b), a, b)


@compiled(types.float32, vector16)
def sum16(builder: Any, value: Any) -> Any:
    return _fold(builder, value, lambda a, b: builder.fadd(a, b))


@compiled(types.float32, vector16)
def highest16(builder: Any, value: Any) -> Any:
    return _fold(builder, value, lambda a, b: builder.select(builder.fcmp_ordered(">", a, b), a, b))


@compiled(types.int64, vector16, vector16)
def above16(builder: Any, a: Any, b: Any) -> Any:
    """Bit i: a's lane i is greater than b's."""
    return builder.zext(builder.bitcast(builder.fcmp_ordered(">", a, b), I16), I64)


@compiled(vector16, types.int64, vector16, vector16)
def choose16(builder: Any, bits: Any, a: Any, b: Any) -> Any:
    """Lane i of a where bit i is 1, else of b."""
    chosen = builder.bitcast(builder.trunc(bits, I16), ir.VectorType(ir.IntType(1), LANES))
    return builder.select(chosen, a, b)


@compiled(types.float32, vector16, types.int64)
def lane16(builder: Any, value: Any, index: Any) -> Any:
    return builder.extract_element(value, builder.trunc(index, I32))


@compiled(vector16, *(vector16,) * 4)
def sum16_of_four(builder: Any, a: Any, b: Any, c: Any, d: Any) -> Any:
    """Lanes 4 i to 4 i + 3: ``sum16`` of vector i, to the bit."""
    return _fold_four(builder, (a, b, c, d), lambda x, y: builder.fadd(x, y))


@compiled(vector16, *(vector16,) * 4)
def highest16_of_four(builder: Any, a: Any, b: Any, c: Any, d: Any) -> Any:
    """Lanes 4 i to 4 i + 3: ``highest16`` of vector i."""
    return _fold_four(builder, (a, b, c, d), lambda x, y: builder.select(builder.fcmp_ordered(">", x, y), x, y))


def _fold_four(builder: Any, values: tuple[Any, ...], join: Callable[[Any, Any], Any]) -> Any:
    def joined(a: Any, b: Any, distance: int) -> Any:
        """Of each run of 2 * distance lanes of a, and then of b, the halves joined."""
        starts = [i for i in range(2 * LANES) if not i & distance]
        picks = [ir.Constant(V16_I32, [i + offset for i in starts]) for offset in (0, distance)]
        return join(*(builder.shuffle_vector(a, b, pick) for pick in picks))

    def turned(a: Any, distance: int) -> Any:
        return join(a, builder.shuffle_vector(a, a, ir.Constant(V16_I32, [i ^ distance for i in range(LANES)])))

    a, b, c, d = values
    return turned(turned(joined(joined(a, b, 8), joined(c, d, 8), 4), 2), 1)


def _fold(builder: Any, value: Any, join: Callable[[Any, Any], Any]) -> Any:
    """Joins all lanes, half with half, in the same order on every CPU."""
    width = LANES
    while width > 1:
        width //= 2
        low, high = (
            builder.shuffle_vector(
                value, value, ir.Constant(ir.VectorType(I32, width), list(range(start, start + width)))
            )
            for start in (0, width)
        )
        value = join(low, high)
    return builder.extract_element(value, ir.Constant(I32, 0))


# exp(r) = 1 + r + r^2 * p(r) for |r| <= ln(2) / 2; p's coefficients, lowest first, interpolate at Chebyshev points.
_EXP_P = (
    0.5,
    0.1666666716337204,
    0.04166646674275398,
    0.00833331048488617,
    0.0013933649752289057,
    0.00019890991097781807,
)
_EXP_LOWEST, _EXP_HIGHEST = -87.33654, 88.37626
_LOG2_E, _LN2_HIGH, _LN2_LOW = 1.44269504, 0.693359375, -2.12194440e-4
_ROUNDER, _ROUNDER_BITS = 12582912.0, 0x4B400000  # 1.5 * 2^23: adding it leaves an integer in the low bits


def _exp(builder: Any, x: Any, floats: Any) -> Any:
    words = I32 if floats is F32 else V16_I32

    def add(a: Any, b: Any) -> Any:
        return builder.fadd(a, b, flags=FUSED)

    def mul(a: Any, b: Any) -> Any:
        return builder.fmul(a, b, flags=FUSED)

    lowest, highest = constant(floats, _EXP_LOWEST), constant(floats, _EXP_HIGHEST)
    too_low = builder.fcmp_ordered("<", x, lowest)
    x = builder.select(too_low, lowest, x)
    x = builder.select(builder.fcmp_ordered(">", x, highest), highest, x)
    # x = n * ln(2) + r
    moved = add(mul(x, constant(floats, _LOG2_E)), constant(floats, _ROUNDER))
    whole = builder.fsub(moved, constant(floats, _ROUNDER))
    r = add(x, mul(whole, constant(floats, -_LN2_HIGH)))
    r = add(r, mul(whole, constant(floats, -_LN2_LOW)))
    p = constant(floats, _EXP_P[-1])
    for coefficient in reversed(_EXP_P[:-1]):
        p = add(mul(p, r), constant(floats, coefficient))
    result = add(add(mul(mul(r, r), p), r), constant(floats, 1.0))
    n = builder.sub(builder.bitcast(moved, words), constant(words, _ROUNDER_BITS))
    result = builder.bitcast(builder.add(builder.bitcast(result, words), builder.shl(n, constant(words, 23))), floats)
    return builder.select(too_low, constant(floats, 0.0), result)


@compiled(vector16, vector16)
def exp16(builder: Any, x: Any) -> Any:
    """To about 1e-7 of the value; 0 below -87.3, capped above 88.3."""
    return _exp(builder, x, V16)


@compiled(types.float32, types.float32)
def exp(builder: Any, x: Any) -> Any:
    """``exp16`` of one number."""
    return _exp(builder, x, F32)


# 2^r = 1 + r * q(r) for |r| <= 1/2; q's coefficients, lowest first, interpolate at Chebyshev points.
_EXP2_Q = (0.6931471824645996, 0.2402234971523285, 0.055503811687231064, 0.00966636836528778, 0.0013381302123889327)
_EXP2_LOWEST = -127.0  # whose exponent bits and fraction are all 0


def exp2_each(builder: Any, values: list[Any], floats: Any) -> list[Any]:
    """``exp2_16`` of each, step by step in turns, since each step waits for the one before."""
    words = words_of(floats)
    lowest, rounder = constant(floats, _EXP2_LOWEST), constant(floats, _ROUNDER)
    # NaN stays NaN.
    values = [builder.select(builder.fcmp_ordered(">", lowest, x), lowest, x) for x in values]
    moved = [builder.fadd(x, rounder) for x in values]
    whole = [builder.fsub(m, rounder) for m in moved]
    rest = [builder.fsub(x, n) for x, n in zip(values, whole, strict=True)]
    powers = [constant(floats, _EXP2_Q[-1])] * len(values)
    for coefficient in (*reversed(_EXP2_Q[:-1]), 1.0):
        powers = [fused(builder, constant(floats, coefficient), q, r) for q, r in zip(powers, rest, strict=True)]
    # The rounder's own bits are shifted out.
    shifts = [builder.shl(builder.bitcast(m, words), constant(words, 23)) for m in moved]
    bits = [builder.add(builder.bitcast(p, words), n) for p, n in zip(powers, shifts, strict=True)]
    return [builder.bitcast(word, floats) for word in bits]


# 2^r = 1 + r * q(r) for 0 <= r < 1; q's coefficients, lowest first, interpolate at Chebyshev points.
_EXP2_NEAR_Q = (0.6931340098381042, 0.24064704775810242, 0.05344102904200554, 0.012763113714754581)
_REST_OF_FLOOR = 9  # VREDUCEPS: what is above the next lower whole number


def exp2_near_each(builder: Any, values: list[Any]) -> list[Any]:
    """2^x of each 16 lanes, x up to 127, for weights that are rounded to bfloat16: with AVX-512, which splits a number
    and scales it by powers of 2 in one instruction each, to 8e-6 of the value; elsewhere as ``exp2_each``.
    """
    if isa().lanes < LANES or is_arm(builder):
        return exp2_each(builder, values, V16)
    reduce = declared(builder, "llvm.x86.avx512.mask.reduce.ps.512", V16, V16, I32, V16, I16, I32)
    scale = declared(builder, "llvm.x86.avx512.mask.scalef.ps.512", V16, V16, V16, V16, I16, I32)
    zero, all_lanes, mode = constant(V16, 0.0), ir.Constant(I16, -1), ir.Constant(I32, 4)
    rests = [builder.call(reduce, [x, ir.Constant(I32, _REST_OF_FLOOR), zero, all_lanes, mode]) for x in values]
    powers = [constant(V16, _EXP2_NEAR_Q[-1])] * len(values)
    for coefficient in (*reversed(_EXP2_NEAR_Q[:-1]), 1.0):
        powers = [fused(builder, constant(V16, coefficient), q, r) for q, r in zip(powers, rests, strict=True)]
    return [builder.call(scale, [p, x, zero, all_lanes, mode]) for p, x in zip(powers, values, strict=True)]


@compiled(vector16, vector16)
def exp2_16(builder: Any, x: Any) -> Any:
    """2^x for x up to 127, to about 3e-7 of the value; nearly 0 below -126, and 0 from -127 down."""
    return exp2_each(builder, [x], V16)[0]


@compiled(types.float32, types.float32)
def exp2(builder: Any, x: Any) -> Any:
    """``exp2_16`` of one number."""
    return exp2_each(builder, [x], F32)[0]


class _VectorOperator(ConcreteTemplate):
    cases: ClassVar = [signature(vector16, vector16, vector16)]


def _emit_operator(emit: Callable[..., Any]) -> Callable[..., Any]:
    return lambda context, builder, signature, values: emit(builder, *values)


for _symbol, _emit in (
    (operator.add, _add),
    (operator.sub, _sub),
    (operator.mul, _mul),
    (operator.truediv, _div),
):
    infer_global(_symbol)(type("_VectorOperator", (_VectorOperator,), {}))
    lower_builtin(_symbol, vector16, vector16)(_emit_operator(_emit))


@inlined
def load16(address: int, index: int, kind: int) -> Any:
    if kind == BFLOAT16:
        return load16_bf16(address, index)
    return load16_f32(address, index)


@inlined
def store16(address: int, index: int, kind: int, value: Any) -> None:
    if kind == BFLOAT16:
        store16_bf16(address, index, value)
    else:
        store16_f32(address, index, value)


@inlined
def get(address: int, index: int, kind: int) -> Any:
    if kind == BFLOAT16:
        return get_bf16(address, index)
    return get_f32(address, index)


@inlined
def put(address: int, index: int, kind: int, value: Any) -> None:
    if kind == BFLOAT16:
        put_bf16(address, index, value)
    else:
        put_f32(address, index, value)


@inlined
def put_outputs(
    sums: int, at: int, bias: int, out: int, out_kind: int, row: int, stride: int, column: int, num_outputs: int
) -> None:
    """Adds the bias to 16 float32 at ``sums[at:]`` and stores them as outputs ``column`` and following of a row.

    Outputs from ``num_outputs`` on are left out. Rows lie ``stride`` numbers apart.
    """
    to = row * stride + column
    if column + LANES <= num_outputs:
        values = load16_f32(sums, at)
        if bias != 0:
            values = values + load16_f32(bias, column)
        store16(out, to, out_kind, values)
    else:
        for i in range(num_outputs - column):
            value = get_f32(sums, at + i)
            if bias != 0:
                value += get_f32(bias, column + i)
            put(out, to + i, out_kind, value)
