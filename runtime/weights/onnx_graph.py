"""The few fields of an ONNX file that say where its weights are. Contents of tensors are not read here.

The `onnx` package is 31 MB and reads a file into memory whole; this needs nine fields of six messages of
https://github.com/onnx/onnx/blob/main/onnx/onnx.proto and leaves the tensors where they are.
"""

from __future__ import annotations

import mmap
import re
import struct
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from ...protocol.errors import UnknownModel
from .damage import shown

MAX_ENTRIES = 1_000_000  # nodes, tensors or fields of one of them; a decoder of 100 layers has 50,000 nodes
MAX_NAME_LEN = 1000  # bytes
_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5
_SCOPES = "pkg.torch.onnx.name_scopes"
_LAST_MODULE = re.compile(r"'([^']*)', '[^']*'\]$")  # a list of Python's, whose last entry is the operation

Span = tuple[int, int]  # first byte and the one after the last


@dataclass(slots=True)
class Initialiser:
    """A tensor of the graph. ``data`` is its bytes in the file, unless ``external`` says where they are."""

    name: str = ""
    shape: list[int] = field(default_factory=list)
    data_type: int = 0
    data: Span | None = None
    external: dict[str, str] = field(default_factory=dict)
    is_external: bool = False


@dataclass(slots=True)
class GraphNode:
    op: str = ""
    name: str = ""
    domain: str = ""
    inputs: list[str] = field(default_factory=list)
    outputs: list[str] = field(default_factory=list)
    attributes: dict[str, int | float | list[int]] = field(default_factory=dict)
    scopes: str = ""  # what torch.onnx.export(dynamo=True) notes

    def module(self) -> str:
        """The path of the module that made the node, empty if the file does not say: ``model.layers.0.mlp.up_proj``."""
        if self.scopes:
            return match[1] if (match := _LAST_MODULE.search(self.scopes)) else ""
        path, slash, _ = self.name.rpartition("/")
        return path.strip("/").replace("/", ".") if slash else ""


@dataclass(frozen=True, slots=True)
class OnnxGraph:
    nodes: list[GraphNode]
    initialisers: dict[str, Initialiser]


def read_graph(path: Path, data: mmap.mmap) -> OnnxGraph:
    """The graph of ``data``, the bytes of ``path``. Raises UnknownModel for a file that is cut or no ONNX model."""
    reader = _Reader(path, data)
    nodes: list[GraphNode] = []
    initialisers: dict[str, Initialiser] = {}
    for number, _, value in reader.fields((0, len(data))):
        if number != 7 or not isinstance(value, tuple):
            continue
        for part, _, inner in reader.fields(value):
            if not isinstance(inner, tuple):
                continue
            if part == 1:
                nodes.append(reader.node(inner))
            elif part == 5:
                found = reader.initialiser(inner)
                initialisers[found.name] = found
    if not nodes or not initialisers:
        raise UnknownModel(f"{path} holds no ONNX graph with weights; export the model again")
    return OnnxGraph(nodes, initialisers)


class _Reader:
    """Protocol Buffers' wire format: https://protobuf.dev/programming-guides/encoding"""

    def __init__(self, path: Path, data: mmap.mmap) -> None:
        self.path, self.data = path, data
        self.num_fields = 0

    def fields(self, span: Span) -> Iterator[tuple[int, int, int | Span]]:
        """(number, wire type, value) of a message's fields; a length-delimited value is its span."""
        at, end = span
        while at < end:
            self.num_fields += 1
            if self.num_fields > 20 * MAX_ENTRIES:
                raise self.damage(f"more than {20 * MAX_ENTRIES:,} fields", at)
            key, at = self.varint(at, end)
            wire = key & 7
            value: int | Span
            if wire == _VARINT:
                value, at = self.varint(at, end)
            elif wire in (_BYTES, _FIXED32, _FIXED64):
                length = {_FIXED32: 4, _FIXED64: 8}.get(wire, 0)
                if wire == _BYTES:
                    length, at = self.varint(at, end)
                if length > end - at:
                    raise self.damage(f"a field of {length:,} bytes where {end - at:,} are left", at)
                value, at = (at, at + length), at + length
            else:
                raise self.damage(f"a field of the unknown wire type {wire}", at)
            yield key >> 3, wire, value

    def varint(self, at: int, end: int) -> tuple[int, int]:
        value = shift = 0
        while at < end and shift < 64:
            byte = self.data[at]
            value |= (byte & 127) << shift
            at, shift = at + 1, shift + 7
            if byte < 128:
                return value, at
        raise self.damage("a number that does not end", at)

    def text(self, value: int | Span) -> str:
        if not isinstance(value, tuple) or value[1] - value[0] > MAX_NAME_LEN:
            raise self.damage(f"a name that is no text of at most {MAX_NAME_LEN} bytes", 0)
        return bytes(self.data[value[0] : value[1]]).decode("utf-8", "replace")

    def numbers(self, value: int | Span) -> list[int]:
        """A repeated integer, packed or not; negative ones as they are."""
        found: list[int] = []
        if isinstance(value, int):
            found = [value]
        else:
            at, end = value
            while at < end and len(found) <= 64:
                number, at = self.varint(at, end)
                found.append(number)
        return [number - (1 << 64) if number >> 63 else number for number in found]

    def entry(self, value: int | Span) -> tuple[str, int | Span]:
        """A StringStringEntryProto: its key, and where its value is."""
        key = ""
        found: int | Span = 0
        for number, _, inner in self.fields(value if isinstance(value, tuple) else (0, 0)):
            key, found = (self.text(inner), found) if number == 1 else (key, inner)
        return key, found

    def initialiser(self, span: Span) -> Initialiser:
        found = Initialiser()
        for number, _, value in self.fields(span):
            match number, value:
                case 1, _:
                    found.shape += self.numbers(value)
                case 2, int():
                    found.data_type = value
                case 8, _:
                    found.name = self.text(value)
                case ((4 | 9), tuple()):  # packed floats are stored as raw ones are
                    found.data = value
                case 13, _:
                    key, inner = self.entry(value)
                    found.external[key] = self.text(inner)
                case 14, int():
                    found.is_external = value != 0
        if len(found.shape) > 64:
            raise self.damage(f"tensor {shown(found.name)} has more than 64 dimensions", span[0])
        return found

    def node(self, span: Span) -> GraphNode:
        found = GraphNode()
        for number, _, value in self.fields(span):
            match number, value:
                case 1, _:
                    found.inputs.append(self.text(value))
                case 2, _:
                    found.outputs.append(self.text(value))
                case 3, _:
                    found.name = self.text(value)
                case 4, _:
                    found.op = self.text(value)
                case 5, tuple():
                    self.attribute(value, found.attributes)
                case 7, _:
                    found.domain = self.text(value)
                case 9, tuple():
                    key, inner = self.entry(value)
                    if key == _SCOPES:
                        found.scopes = self.text(inner)
        return found

    def attribute(self, span: Span, into: dict[str, int | float | list[int]]) -> None:
        """Integers, floats and lists of integers; others are left out."""
        name = ""
        found: int | float | list[int] | None = None
        for number, wire, value in self.fields(span):
            match number, value:
                case 1, _:
                    name = self.text(value)
                case 2, tuple() if wire == _FIXED32:
                    found = struct.unpack("<f", self.data[value[0] : value[1]])[0]
                case 3, int():
                    found = value
                case 8, _:
                    found = [*(found if isinstance(found, list) else []), *self.numbers(value)][:64]
        if found is not None:
            into[name] = found

    def damage(self, what: str, at: int) -> UnknownModel:
        return UnknownModel(f"{self.path} is damaged, or no ONNX model: {what}, near byte {at:,}; export it again")
