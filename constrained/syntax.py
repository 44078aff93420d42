"""The syntax tree that the readers of regexes and of EBNF build, and the languages of its parts."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from .code_points import Ranges
from .expressions import EMPTY, Expressions


@dataclass(frozen=True, slots=True)
class Literal:
    text: str


@dataclass(frozen=True, slots=True)
class Chars:
    ranges: Ranges


@dataclass(frozen=True, slots=True)
class Cat:
    parts: tuple["Node", ...]


@dataclass(frozen=True, slots=True)
class Alt:
    parts: tuple["Node", ...]


@dataclass(frozen=True, slots=True)
class Rep:
    inner: "Node"
    low: int
    high: int | None


@dataclass(frozen=True, slots=True)
class Anchor:
    kind: str  # "^" or "$"


@dataclass(frozen=True, slots=True)
class LookAhead:
    """What follows has to begin with ``inner``, or must not (``is_negative``)."""

    inner: "Node"
    is_negative: bool


@dataclass(frozen=True, slots=True)
class RuleName:
    name: str
    line: int


Node = Literal | Chars | Cat | Alt | Rep | Anchor | LookAhead | RuleName


def leaves(node: Node) -> Iterator[Node]:
    """The parts without parts of their own, in order."""
    waiting = [node]
    while waiting:
        match waiting.pop():
            case Cat(parts) | Alt(parts):
                waiting.extend(reversed(parts))
            case Rep(inner, _, _):
                waiting.append(inner)
            case leaf:
                yield leaf


def language(node: Node, ex: Expressions, rule: Callable[[str], int]) -> int:
    """The expression of a node without anchors and look-ahead; ``rule(name)`` is that of a rule it refers to.

    A node that stands in several places is visited once.
    """
    known: dict[int, int] = {}  # by ``id``: nodes are compared part by part

    def visit(node: Node) -> int:
        found = known.get(id(node))
        if found is None:
            match node:
                case Literal(text):
                    found = ex.literal(text.encode(errors="surrogatepass")) if text else EMPTY
                case Chars(ranges):
                    found = ex.chars(ranges)
                case Cat(parts):
                    found = ex.concat(*map(visit, parts))
                case Alt(parts):
                    found = ex.union(*map(visit, parts))
                case Rep(inner, low, high):
                    found = ex.repeat(visit(inner), low, high)
                case RuleName(name, _):
                    found = rule(name)
                case _:
                    raise AssertionError(node)
            known[id(node)] = found
        return found

    return visit(node)
