"""LLVM's types, and expressions that the functions written in LLVM code share."""

from collections.abc import Callable
from typing import Any

from llvmlite import ir

LANES = 16
FUSED = ("contract",)  # a product may fuse with the sum it is added to


class _Bfloat(ir.Type):
    """LLVM's bfloat16, which Arm's instructions take; elsewhere its bits are an I16."""

    def _to_string(self) -> str:
        return "bfloat"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Bfloat)

    def __hash__(self) -> int:
        return hash(_Bfloat)


I8, I16, I32, I64 = (ir.IntType(bits) for bits in (8, 16, 32, 64))
F16, F32, F64, BF16 = ir.HalfType(), ir.FloatType(), ir.DoubleType(), _Bfloat()
V16, V16_I32, V16_I16, V16_I8 = (ir.VectorType(kind, LANES) for kind in (F32, I32, I16, I8))


def number(value: int) -> Any:
    return ir.Constant(I64, value)


def constant(kind: Any, value: float) -> Any:
    """The value, or a vector of it."""
    return ir.Constant(kind, [value] * kind.count if isinstance(kind, ir.VectorType) else value)


def opaque(builder: Any, value: int) -> Any:
    """The int64, of which the compiler knows nothing: a loop of so many turns stays a loop."""
    kind = ir.FunctionType(I64, [I64])
    return builder.asm(kind, "", "=r,0", [number(value)], side_effect=False)


def in_this_order(builder: Any, values: list[Any]) -> list[Any]:
    """The x86 vectors, in registers. The compiler keeps what makes them before it, and does not join what follows."""
    kinds = [value.type for value in values]
    constraints = ["=x"] * len(values) + [str(i) for i in range(len(values))]
    kind = ir.FunctionType(ir.LiteralStructType(kinds), kinds)
    found = builder.asm(kind, "", ",".join(constraints), values, side_effect=True)
    return [builder.extract_value(found, i) for i in range(len(values))]


def is_arm(builder: Any) -> bool:
    """Whether the code is for a 64-bit Arm CPU."""
    return builder.module.triple.startswith(("aarch64", "arm64"))


def concatenated(builder: Any, parts: list[Any]) -> Any:
    """One vector of all parts' lanes; the parts are 2^n vectors of one type."""
    while len(parts) > 1:
        lanes = ir.Constant(ir.VectorType(I32, 2 * parts[0].type.count), list(range(2 * parts[0].type.count)))
        parts = [builder.shuffle_vector(*parts[i : i + 2], lanes) for i in range(0, len(parts), 2)]
    return parts[0]


def at(builder: Any, kind: Any, address: Any, index: Any) -> Any:
    """A pointer to element ``index`` of the array of ``kind`` at ``address``."""
    return builder.gep(builder.inttoptr(address, kind.as_pointer()), [index])


def vector_at(builder: Any, kind: Any, address: Any, index: Any, lanes: int = LANES) -> Any:
    """A pointer to so many elements, from ``index`` on."""
    return builder.bitcast(at(builder, kind, address, index), ir.VectorType(kind, lanes).as_pointer())


def load_at(builder: Any, kind: Any, address: Any, offset: int) -> Any:
    """The value at ``address + offset`` (bytes), of any alignment."""
    return builder.load(builder.inttoptr(builder.add(address, number(offset)), kind.as_pointer()), align=1)


def splat(builder: Any, value: Any, lanes: int = LANES) -> Any:
    """A vector of so many lanes with this value."""
    kind = ir.VectorType(value.type, lanes)
    first = builder.insert_element(ir.Constant(kind, ir.Undefined), value, ir.Constant(I32, 0))
    return builder.shuffle_vector(first, first, ir.Constant(ir.VectorType(I32, lanes), None))


def fused(builder: Any, total: Any, a: Any, b: Any) -> Any:
    """total + a * b, rounded once where the machine can."""
    return builder.fadd(total, builder.fmul(a, b, flags=FUSED), flags=FUSED)


def declared(builder: Any, name: str, result: Any, *arguments: Any) -> Any:
    """A function of LLVM, of the CPU or of the C library."""
    found = builder.module.globals.get(name)
    return found or ir.Function(builder.module, ir.FunctionType(result, arguments), name)


def words_of(floats: Any) -> Any:
    """The int32, or vector of them, with the bits of these float32."""
    return ir.VectorType(I32, floats.count) if isinstance(floats, ir.VectorType) else I32


def widen(builder: Any, bits: Any, floats: Any) -> Any:
    """bfloat16 is the upper half of a float32."""
    words = words_of(floats)
    return builder.bitcast(builder.shl(builder.zext(bits, words), constant(words, 16)), floats)


def widen_half(builder: Any, bits: Any, floats: Any) -> Any:
    """float16 to float32 by moving its bits, which takes no instruction of its own; for finite numbers."""
    words = words_of(floats)
    word = builder.zext(bits, words)
    sign = builder.shl(builder.and_(word, constant(words, 0x8000)), constant(words, 16))
    rest = builder.shl(builder.and_(word, constant(words, 0x7FFF)), constant(words, 13))
    size = builder.fmul(builder.bitcast(rest, floats), constant(floats, 2.0**112))
    return builder.bitcast(builder.or_(builder.bitcast(size, words), sign), floats)


def narrow(builder: Any, value: Any, floats: Any) -> Any:
    """Rounds to the nearest bfloat16, ties to even."""
    words, halves = (I32, I16) if floats is F32 else (V16_I32, V16_I16)
    word = builder.bitcast(value, words)
    odd = builder.and_(builder.lshr(word, constant(words, 16)), constant(words, 1))
    rounded = builder.add(builder.add(word, constant(words, 0x7FFF)), odd)
    return builder.trunc(builder.lshr(rounded, constant(words, 16)), halves)


def carry(builder: Any, count: Any, state: list[Any], step: Callable[[Any, list[Any]], list[Any]]) -> list[Any]:
    """``for i in range(count): state = step(i, state)``, with the state in registers; returns the last state."""
    before = builder.block
    loop, done = (builder.append_basic_block(name) for name in ("carry.loop", "carry.done"))
    builder.cbranch(builder.icmp_signed(">", count, number(0)), loop, done)
    builder.position_at_end(loop)
    i, held = builder.phi(I64), [builder.phi(value.type) for value in state]
    after = step(i, held)
    following, end = builder.add(i, number(1)), builder.block
    builder.cbranch(builder.icmp_signed("<", following, count), loop, done)
    for phi, first, later in ((i, number(0), following), *zip(held, state, after, strict=True)):
        phi.add_incoming(first, before)
        phi.add_incoming(later, end)
    builder.position_at_end(done)
    results = [builder.phi(value.type) for value in state]
    for result, first, later in zip(results, state, after, strict=True):
        result.add_incoming(first, before)
        result.add_incoming(later, end)
    return results
