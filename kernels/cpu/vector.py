"""Memory by address and vectors of 16 floats, as functions that compiled code may call. Never checks a bound.

Compiled functions get addresses (int64) and count in elements: ``load16(a, i, kind)`` is the 16 elements of the array
at ``a`` from element i on, widened to float32. ``kind`` says what the array holds, ``FLOAT32`` or ``BFLOAT16``. LLVM
splits the vectors where the machine's are shorter. Products may fuse with sums but sums are never reordered, so a
result does not depend on what surrounds it.

A change here does not refresh numba's on-disk cache of the functions in other files: touch them too.
"""

import inspect
import operator
from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic, models, overload, register_model

FLOAT32 = 0
BFLOAT16 = 1
LANES = 16

_I16, _I32, _I64, _F32, _F64 = ir.IntType(16), ir.IntType(32), ir.IntType(64), ir.FloatType(), ir.DoubleType()
_V16 = ir.VectorType(_F32, LANES)
_FUSED = ("contract",)


class Vector16(types.Type):
    """16 float32."""

    def __init__(self) -> None:
        super().__init__(name="Vector16")


vector16 = Vector16()


@register_model(Vector16)
class _Vector16Model(models.PrimitiveModel):
    def __init__(self, dmm: Any, fe_type: Any) -> None:
        super().__init__(dmm, fe_type, _V16)


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


def _at(builder: Any, kind: Any, address: Any, index: Any) -> Any:
    """A pointer to element ``index`` of the array of ``kind`` at ``address``."""
    return builder.gep(builder.inttoptr(address, kind.as_pointer()), [index])


def _vector_at(builder: Any, kind: Any, address: Any, index: Any) -> Any:
    return builder.bitcast(_at(builder, kind, address, index), ir.VectorType(kind, LANES).as_pointer())


def _constant(kind: Any, value: float) -> Any:
    """The value, or a vector of it."""
    return ir.Constant(kind, [value] * LANES if isinstance(kind, ir.VectorType) else value)


def _call(builder: Any, name: str, kind: Any, values: list[Any]) -> Any:
    """LLVM's own function ``name`` on values of one kind."""
    suffix = f"v{LANES}f32" if isinstance(kind, ir.VectorType) else {_F32: "f32", _F64: "f64"}[kind]
    function = builder.module.globals.get(f"{name}.{suffix}")
    if function is None:
        function = ir.Function(builder.module, ir.FunctionType(kind, [kind] * len(values)), f"{name}.{suffix}")
    return builder.call(function, values)


def _widen(builder: Any, bits: Any, floats: Any) -> Any:
    """bfloat16 is the upper half of a float32."""
    words = _I32 if floats is _F32 else ir.VectorType(_I32, LANES)
    return builder.bitcast(builder.shl(builder.zext(bits, words), _constant(words, 16)), floats)


def _narrow(builder: Any, value: Any, floats: Any) -> Any:
    """To the nearest bfloat16, the even one of two."""
    words, halves = (_I32, _I16) if floats is _F32 else (ir.VectorType(_I32, LANES), ir.VectorType(_I16, LANES))
    word = builder.bitcast(value, words)
    odd = builder.and_(builder.lshr(word, _constant(words, 16)), _constant(words, 1))
    rounded = builder.add(builder.add(word, _constant(words, 0x7FFF)), odd)
    return builder.trunc(builder.lshr(rounded, _constant(words, 16)), halves)


@compiled(types.int64, types.int64, types.int64)
def get_i64(builder: Any, address: Any, index: Any) -> Any:
    return builder.load(_at(builder, _I64, address, index))


@compiled(types.int64, types.int64, types.int64)
def get_i32(builder: Any, address: Any, index: Any) -> Any:
    return builder.sext(builder.load(_at(builder, _I32, address, index)), _I64)


@compiled(types.float64, types.int64, types.int64)
def get_f64(builder: Any, address: Any, index: Any) -> Any:
    return builder.load(_at(builder, _F64, address, index))


@compiled(types.float32, types.int64, types.int64)
def get_f32(builder: Any, address: Any, index: Any) -> Any:
    return builder.load(_at(builder, _F32, address, index))


@compiled(types.float32, types.int64, types.int64)
def get_bf16(builder: Any, address: Any, index: Any) -> Any:
    return _widen(builder, builder.load(_at(builder, _I16, address, index)), _F32)


@compiled(types.void, types.int64, types.int64, types.int64)
def put_i64(builder: Any, address: Any, index: Any, value: Any) -> None:
    builder.store(value, _at(builder, _I64, address, index))


@compiled(types.void, types.int64, types.int64, types.int64)
def put_i32(builder: Any, address: Any, index: Any, value: Any) -> None:
    builder.store(builder.trunc(value, _I32), _at(builder, _I32, address, index))


@compiled(types.void, types.int64, types.int64, types.float32)
def put_f32(builder: Any, address: Any, index: Any, value: Any) -> None:
    builder.store(value, _at(builder, _F32, address, index))


@compiled(types.void, types.int64, types.int64, types.float32)
def put_bf16(builder: Any, address: Any, index: Any, value: Any) -> None:
    builder.store(_narrow(builder, value, _F32), _at(builder, _I16, address, index))


@compiled(types.void, types.int64, types.int64, types.float64)
def put_f64(builder: Any, address: Any, index: Any, value: Any) -> None:
    builder.store(value, _at(builder, _F64, address, index))


@compiled(types.int64, types.int64, types.int64)
def take_number(builder: Any, address: Any, index: Any) -> Any:
    """The int64 there, which no other thread will get: it is one more afterwards. Orders memory on both sides."""
    return builder.atomic_rmw("add", _at(builder, _I64, address, index), ir.Constant(_I64, 1), "seq_cst")


@compiled(types.int64, types.int64, types.int64)
def give_number(builder: Any, address: Any, index: Any) -> Any:
    """The opposite: it is one less afterwards."""
    return builder.atomic_rmw("sub", _at(builder, _I64, address, index), ir.Constant(_I64, 1), "seq_cst")


@compiled(types.int64, types.int64, types.int64)
def watch(builder: Any, address: Any, index: Any) -> Any:
    """The int64 there as other threads left it, and all that they wrote before."""
    return builder.load_atomic(_at(builder, _I64, address, index), "seq_cst", 8)


@compiled(types.void, types.int64)
def prefetch(builder: Any, address: Any) -> None:
    """Asks for the cache line at an address, which may be none of ours."""
    kind = ir.FunctionType(ir.VoidType(), [ir.IntType(8).as_pointer(), _I32, _I32, _I32])
    name = "llvm.prefetch.p0"
    function = builder.module.globals.get(name) or ir.Function(builder.module, kind, name)
    read, keep, data = ir.Constant(_I32, 0), ir.Constant(_I32, 3), ir.Constant(_I32, 1)
    builder.call(function, [builder.inttoptr(address, ir.IntType(8).as_pointer()), read, keep, data])


@compiled(types.void)
def pause(builder: Any) -> None:
    """Tells the core that the thread only waits."""
    if builder.module.triple.startswith("x86_64"):
        kind, name = ir.FunctionType(ir.VoidType(), []), "llvm.x86.sse2.pause"
        builder.call(builder.module.globals.get(name) or ir.Function(builder.module, kind, name), [])


def c_function(name: str, num_arguments: int) -> Any:
    """``f(...)``: the C library's function of that name, on int64 addresses, its result ignored."""

    def emit(builder: Any, *values: Any) -> None:
        kind = ir.FunctionType(_I32, [_I64] * num_arguments)
        builder.call(builder.module.globals.get(name) or ir.Function(builder.module, kind, name), values)

    emit.__name__ = f"c_{name}"
    return compiled(types.void, *(types.int64,) * num_arguments)(emit)


@compiled(types.void, types.int64, types.int64)
def call_function(builder: Any, function: Any, argument: Any) -> None:
    """Calls the compiled function at an address with one int64."""
    kind = ir.FunctionType(ir.VoidType(), [_I64])
    builder.call(builder.inttoptr(function, kind.as_pointer()), [argument])


def local_floats(count: int) -> Any:
    """``f()``: the address of ``count`` float32 that live as long as the call of the function that asks."""

    def emit(builder: Any) -> Any:
        return builder.ptrtoint(cgutils.alloca_once(builder, ir.ArrayType(_F32, count)), _I64)

    emit.__name__ = f"local_floats_{count}"
    return compiled(types.int64)(emit)


@compiled(types.int64, types.float32)
def bits_of(builder: Any, value: Any) -> Any:
    """The float's 32 bits as 0 <= n < 2^32."""
    return builder.zext(builder.bitcast(value, _I32), _I64)


@compiled(types.float32, types.int64)
def float_of(builder: Any, bits: Any) -> Any:
    return builder.bitcast(builder.trunc(bits, _I32), _F32)


@compiled(vector16, types.int64, types.int64)
def load16_f32(builder: Any, address: Any, index: Any) -> Any:
    return builder.load(_vector_at(builder, _F32, address, index), align=4)


@compiled(vector16, types.int64, types.int64)
def load16_bf16(builder: Any, address: Any, index: Any) -> Any:
    return _widen(builder, builder.load(_vector_at(builder, _I16, address, index), align=2), _V16)


@compiled(types.void, types.int64, types.int64, vector16)
def store16_f32(builder: Any, address: Any, index: Any, value: Any) -> None:
    builder.store(value, _vector_at(builder, _F32, address, index), align=4)


@compiled(types.void, types.int64, types.int64, vector16)
def store16_bf16(builder: Any, address: Any, index: Any, value: Any) -> None:
    builder.store(_narrow(builder, value, _V16), _vector_at(builder, _I16, address, index), align=2)


@compiled(types.void, types.int64, types.int64, vector16)
def store16_i8(builder: Any, address: Any, index: Any, value: Any) -> None:
    """Whole numbers between -128 and 127 as bytes."""
    whole = builder.fptosi(value, ir.VectorType(_I32, LANES))
    place = builder.bitcast(
        _at(builder, ir.IntType(8), address, index), ir.VectorType(ir.IntType(8), LANES).as_pointer()
    )
    builder.store(builder.trunc(whole, ir.VectorType(ir.IntType(8), LANES)), place, align=1)


@compiled(vector16, vector16)
def round16(builder: Any, value: Any) -> Any:
    """To the nearest whole number, the even one of two; for numbers below 2^22."""
    rounder = _constant(_V16, _ROUNDER)
    return builder.fsub(builder.fadd(value, rounder), rounder)


@compiled(vector16, types.float32)
def splat16(builder: Any, value: Any) -> Any:
    first = builder.insert_element(ir.Constant(_V16, ir.Undefined), value, ir.Constant(_I32, 0))
    return builder.shuffle_vector(first, first, ir.Constant(ir.VectorType(_I32, LANES), [0] * LANES))


@compiled(vector16, vector16, vector16)
def add16(builder: Any, a: Any, b: Any) -> Any:
    return builder.fadd(a, b, flags=_FUSED)


@compiled(vector16, vector16, vector16)
def sub16(builder: Any, a: Any, b: Any) -> Any:
    return builder.fsub(a, b, flags=_FUSED)


@compiled(vector16, vector16, vector16)
def mul16(builder: Any, a: Any, b: Any) -> Any:
    return builder.fmul(a, b, flags=_FUSED)


@compiled(vector16, vector16, vector16)
def div16(builder: Any, a: Any, b: Any) -> Any:
    return builder.fdiv(a, b)


@compiled(vector16, vector16, vector16)
def max16(builder: Any, a: Any, b: Any) -> Any:
    """Lane by lane; b's where either is not a number."""
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
    return builder.zext(builder.bitcast(builder.fcmp_ordered(">", a, b), _I16), _I64)


@compiled(vector16, types.int64, vector16, vector16)
def choose16(builder: Any, bits: Any, a: Any, b: Any) -> Any:
    """Lane i of a where bit i is 1, else of b."""
    chosen = builder.bitcast(builder.trunc(bits, _I16), ir.VectorType(ir.IntType(1), LANES))
    return builder.select(chosen, a, b)


@compiled(types.float32, vector16, types.int64)
def lane16(builder: Any, value: Any, index: Any) -> Any:
    return builder.extract_element(value, builder.trunc(index, _I32))


def _fold(builder: Any, value: Any, join: Callable[[Any, Any], Any]) -> Any:
    """All lanes joined, halves first: the same order on every machine."""
    width = LANES
    while width > 1:
        width //= 2
        low, high = (
            builder.shuffle_vector(
                value, value, ir.Constant(ir.VectorType(_I32, width), list(range(start, start + width)))
            )
            for start in (0, width)
        )
        value = join(low, high)
    return builder.extract_element(value, ir.Constant(_I32, 0))


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
    words = _I32 if floats is _F32 else ir.VectorType(_I32, LANES)

    def add(a: Any, b: Any) -> Any:
        return builder.fadd(a, b, flags=_FUSED)

    def mul(a: Any, b: Any) -> Any:
        return builder.fmul(a, b, flags=_FUSED)

    lowest, highest = _constant(floats, _EXP_LOWEST), _constant(floats, _EXP_HIGHEST)
    too_low = builder.fcmp_ordered("<", x, lowest)
    x = builder.select(too_low, lowest, x)
    x = builder.select(builder.fcmp_ordered(">", x, highest), highest, x)
    # x = n * ln(2) + r
    moved = add(mul(x, _constant(floats, _LOG2_E)), _constant(floats, _ROUNDER))
    whole = builder.fsub(moved, _constant(floats, _ROUNDER))
    r = add(x, mul(whole, _constant(floats, -_LN2_HIGH)))
    r = add(r, mul(whole, _constant(floats, -_LN2_LOW)))
    p = _constant(floats, _EXP_P[-1])
    for coefficient in reversed(_EXP_P[:-1]):
        p = add(mul(p, r), _constant(floats, coefficient))
    result = add(add(mul(mul(r, r), p), r), _constant(floats, 1.0))
    n = builder.sub(builder.bitcast(moved, words), _constant(words, _ROUNDER_BITS))
    result = builder.bitcast(builder.add(builder.bitcast(result, words), builder.shl(n, _constant(words, 23))), floats)
    return builder.select(too_low, _constant(floats, 0.0), result)


@compiled(vector16, vector16)
def exp16(builder: Any, x: Any) -> Any:
    """To about 1e-7 of the value; 0 below -87.3, capped above 88.3."""
    return _exp(builder, x, _V16)


@compiled(types.float32, types.float32)
def exp(builder: Any, x: Any) -> Any:
    """What ``exp16`` makes of each lane."""
    return _exp(builder, x, _F32)


def multiply_tile(num_rows: int, num_vectors: int) -> Any:
    """The inner loop of every product here, its sums in registers: ``f(a, a_step, b, b_step, c, c_step, n)`` does

    for r in range(num_rows), v in range(16 * num_vectors):  c[r * c_step + v] += sum of a[r * a_step + i] *
    b[i * b_step + v] for i in range(n), added one by one in this order.
    """

    def emit(builder: Any, a: Any, a_step: Any, b: Any, b_step: Any, c: Any, c_step: Any, count: Any) -> None:
        def row_start(step: Any, row: int, more: int = 0) -> Any:
            return builder.add(builder.mul(step, ir.Constant(_I64, row)), ir.Constant(_I64, more))

        places = [[row_start(c_step, r, LANES * v) for v in range(num_vectors)] for r in range(num_rows)]
        before = [[builder.load(_vector_at(builder, _F32, c, at), align=4) for at in row] for row in places]
        entry = builder.block
        loop, done = (builder.append_basic_block(name) for name in ("tile.loop", "tile.done"))
        builder.cbranch(builder.icmp_signed(">", count, ir.Constant(_I64, 0)), loop, done)

        builder.position_at_end(loop)
        i = builder.phi(_I64)
        sums = [[builder.phi(_V16) for _ in range(num_vectors)] for _ in range(num_rows)]
        line = builder.mul(i, b_step)
        columns = [
            builder.load(_vector_at(builder, _F32, b, builder.add(line, ir.Constant(_I64, LANES * v))), align=4)
            for v in range(num_vectors)
        ]
        after: list[list[Any]] = []
        for r in range(num_rows):
            value = builder.load(_at(builder, _F32, a, builder.add(row_start(a_step, r), i)))
            first = builder.insert_element(ir.Constant(_V16, ir.Undefined), value, ir.Constant(_I32, 0))
            zeros = ir.Constant(ir.VectorType(_I32, LANES), [0] * LANES)
            factor = builder.shuffle_vector(first, first, zeros)
            after.append(
                [
                    builder.fadd(sums[r][v], builder.fmul(factor, columns[v], flags=_FUSED), flags=_FUSED)
                    for v in range(num_vectors)
                ]
            )
        following = builder.add(i, ir.Constant(_I64, 1))
        builder.cbranch(builder.icmp_signed("<", following, count), loop, done)
        i.add_incoming(ir.Constant(_I64, 0), entry)
        i.add_incoming(following, loop)

        builder.position_at_end(done)
        for r in range(num_rows):
            for v in range(num_vectors):
                sums[r][v].add_incoming(before[r][v], entry)
                sums[r][v].add_incoming(after[r][v], loop)
                result = builder.phi(_V16)
                result.add_incoming(before[r][v], entry)
                result.add_incoming(after[r][v], loop)
                places[r][v] = (places[r][v], result)
        for row in places:
            for at, result in row:
                builder.store(result, _vector_at(builder, _F32, c, at), align=4)

    emit.__name__ = f"multiply_tile_{num_rows}x{num_vectors}"
    return compiled(types.void, *(types.int64,) * 7)(emit)


def transpose_tile(kind: int) -> Any:
    """``f(rows, start, to, step)``: 16 elements from ``start`` on of each of the 16 arrays of this kind whose addresses
    lie at ``rows`` become 16 columns: element i of array j goes to float32 ``to[i * step + j]``.
    """

    def emit(builder: Any, rows: Any, start: Any, to: Any, step: Any) -> None:
        lines: list[Any] = []
        for j in range(LANES):
            address = builder.load(_at(builder, _I64, rows, ir.Constant(_I64, j)))
            if kind == BFLOAT16:
                halves = builder.load(_vector_at(builder, _I16, address, start), align=2)
                lines.append(_widen(builder, halves, _V16))
            else:
                lines.append(builder.load(_vector_at(builder, _F32, address, start), align=4))
        # Swapping blocks of 8, 4, 2, 1: lane bit and line bit change places.
        size = LANES // 2
        while size:
            low = [i if not i & size else LANES + i - size for i in range(LANES)]
            high = [i + size if not i & size else LANES + i for i in range(LANES)]
            picks = [ir.Constant(ir.VectorType(_I32, LANES), pick) for pick in (low, high)]
            swapped = list(lines)
            for j in range(LANES):
                if not j & size:
                    pair = lines[j], lines[j + size]
                    swapped[j], swapped[j + size] = (builder.shuffle_vector(*pair, pick) for pick in picks)
            lines = swapped
            size //= 2
        for i, line in enumerate(lines):
            at = builder.mul(step, ir.Constant(_I64, i))
            builder.store(line, _vector_at(builder, _F32, to, at), align=4)

    emit.__name__ = f"transpose_tile_{kind}"
    return compiled(types.void, *(types.int64,) * 4)(emit)


def _overload_operator(symbol: Any, function: Any) -> None:
    def typing(a: Any, b: Any) -> Any:
        def run(a: Any, b: Any) -> Any:
            return function(a, b)

        return run if isinstance(a, Vector16) and isinstance(b, Vector16) else None

    overload(symbol)(typing)


for _symbol, _intrinsic in (
    (operator.add, add16),
    (operator.sub, sub16),
    (operator.mul, mul16),
    (operator.truediv, div16),
):
    _overload_operator(_symbol, _intrinsic)


@njit(forceinline=True)
def load16(address: int, index: int, kind: int) -> Any:
    if kind == BFLOAT16:
        return load16_bf16(address, index)
    return load16_f32(address, index)


@njit(forceinline=True)
def store16(address: int, index: int, kind: int, value: Any) -> None:
    if kind == BFLOAT16:
        store16_bf16(address, index, value)
    else:
        store16_f32(address, index, value)


@njit(forceinline=True)
def get(address: int, index: int, kind: int) -> Any:
    if kind == BFLOAT16:
        return get_bf16(address, index)
    return get_f32(address, index)


@njit(forceinline=True)
def put(address: int, index: int, kind: int, value: Any) -> None:
    if kind == BFLOAT16:
        put_bf16(address, index, value)
    else:
        put_f32(address, index, value)
