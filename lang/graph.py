"""A drawing of a program's nodes, as text or as SVG: one lane per sequence."""

from __future__ import annotations

from dataclasses import dataclass
from html import escape

from . import nodes
from .expressions import SglExpr
from .values import Leaf

_COLORS = {
    "text": "#eef1f5",
    "gen": "#d7f0dc",
    "select": "#fdeccb",
    "role": "#e7e2f7",
    "flow": "#dbeafe",
    "ref": "#fde2e2",
}
_WIDTH, _HEIGHT, _GAP, _LANE = 230, 30, 14, 270


@dataclass(frozen=True, slots=True)
class Box:
    """One operation. ``row``: its place in the whole program. ``targets``: rows of the boxes that it points to."""

    seq: int
    row: int
    kind: str
    label: str
    targets: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Graph:
    """``str(graph)`` is the text form, ``graph.svg()`` the picture, which a notebook shows."""

    name: str
    boxes: tuple[Box, ...]
    parents: dict[int, int]

    @classmethod
    def of(cls, name: str, log: list[nodes.Node]) -> Graph:
        return cls(name, *_boxes(log))

    def __str__(self) -> str:
        lines = [f"program {self.name}"]
        lines += _lane(self, seq=0, indent="  ")
        for seq in sorted({box.seq for box in self.boxes} - set(self.parents) - {0}):
            lines.append(f"  sequence {seq} (a program called by this one)")
            lines += _lane(self, seq, "    ")
        return "\n".join(lines)

    def svg(self) -> str:
        lanes = {seq: i for i, seq in enumerate(sorted({box.seq for box in self.boxes}))}
        place = {box.row: (lanes[box.seq] * _LANE + 20, i * (_HEIGHT + _GAP) + 20) for i, box in enumerate(self.boxes)}
        width = len(lanes) * _LANE + 20
        height = len(self.boxes) * (_HEIGHT + _GAP) + 30
        parts = [
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
            f'viewBox="0 0 {width} {height}" font-family="sans-serif" font-size="12" role="img">',
            f"<title>{escape(self.name)}</title>",
            '<defs><marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
            '<path d="M0 0L8 4L0 8z" fill="#667"/></marker></defs>',
        ]
        last: dict[int, int] = {}
        for box in self.boxes:
            if box.seq in last:
                parts.append(_arrow(place[last[box.seq]], place[box.row]))
            last[box.seq] = box.row
            parts += [_arrow(place[box.row], place[target]) for target in box.targets]
        for box in self.boxes:
            x, y = place[box.row]
            parts.append(
                f'<rect x="{x}" y="{y}" width="{_WIDTH}" height="{_HEIGHT}" rx="6" '
                f'fill="{_COLORS[box.kind]}" stroke="#99a"/>'
            )
            parts.append(f'<text x="{x + 9}" y="{y + 19}">{escape(_clip(box.label, 34))}</text>')
        return "\n".join([*parts, "</svg>"])

    def _repr_svg_(self) -> str:
        return self.svg()


def _boxes(log: list[nodes.Node]) -> tuple[tuple[Box, ...], dict[int, int]]:
    """Adjacent texts and holes share a box."""
    drafts: list[tuple[int, str, str, list[int]]] = []  # seq, kind, label, target rows
    row_of_leaf: dict[int, int] = {}
    open_fork: dict[int, int] = {}  # child without a box yet -> row of its fork
    last: dict[int, int] = {}
    parents: dict[int, int] = {}

    def add(seq: int, kind: str, label: str) -> int:
        row = len(drafts)
        drafts.append((seq, kind, label, []))
        if seq in open_fork:
            drafts[open_fork.pop(seq)][3].append(row)
        last[seq] = row
        return row

    for node in log:
        seq = node.seq
        match node:
            case nodes.TextNode() | nodes.HoleNode():
                piece = repr(node.text) if isinstance(node, nodes.TextNode) else f"{{{node.name}}}"
                row = last.get(seq)
                if row is not None and drafts[row][1] == "text":
                    drafts[row] = (seq, "text", f"{drafts[row][2]} {piece}", drafts[row][3])
                else:
                    add(seq, "text", piece)
            case nodes.RoleNode():
                add(seq, "role", f"{'begin' if node.is_begin else 'end'} {node.role}")
            case nodes.DefaultSystemNode():
                add(seq, "role", f"default system {node.content!r}")
            case nodes.GenNode():
                row_of_leaf[id(node.leaf)] = add(seq, "gen", f"gen {node.leaf.name}{_details(node)}")
            case nodes.SelectNode():
                label = f"select {node.leaf.name} of {len(node.choices)}"
                row_of_leaf[id(node.leaf)] = add(seq, "select", label)
            case nodes.PasteNode():
                row = add(seq, "ref", f"paste {node.source.name}")
                _lead(drafts, row_of_leaf, node.source, row)
            case nodes.ForkNode():
                row = add(seq, "flow", f"fork into {len(node.children)}")
                for child in node.children:
                    open_fork[child] = row
                    parents[child] = seq
            case nodes.JoinNode():
                row = add(seq, "flow", "join" if node.mode == "gather_variable" else "join, appending")
                for child in node.children:
                    if child in last:
                        drafts[last[child]][3].append(row)
            case nodes.ImageNode():
                add(seq, "text", "image")
            case nodes.PinNode():
                add(seq, "flow", f"pin {node.ttl_s:g} s")
            case nodes.SettleNode(children=children) if children:
                row = add(seq, "flow", f"continue with one of {len(children)}")
                for child in children:
                    if child in last:
                        drafts[last[child]][3].append(row)
            case nodes.CloseNode() | nodes.SettleNode():
                pass
    boxes = tuple([Box(seq, row, kind, label, tuple(to)) for row, (seq, kind, label, to) in enumerate(drafts)])
    return boxes, parents


def _lead(drafts: list[tuple[int, str, str, list[int]]], rows: dict[int, int], leaf: Leaf, row: int) -> None:
    if id(leaf) in rows:
        drafts[rows[id(leaf)]][3].append(row)


def _details(node: nodes.GenNode) -> str:
    given = [f"{name}={value!r}" for name, value in node.gen.overrides.items() if not isinstance(value, SglExpr)]
    if node.gen.grammar is not None:
        given.append(node.gen.grammar.kind)
    return f" ({', '.join(given)})" if given else ""


def _lane(graph: Graph, seq: int, indent: str) -> list[str]:
    lines = []
    rows = {box.row: box for box in graph.boxes}
    for box in graph.boxes:
        if box.seq != seq:
            continue
        refs = [rows[t] for t in box.targets if rows[t].kind == "ref"]
        to = f"  -> pasted into sequence {', '.join(str(ref.seq) for ref in refs)}" if refs else ""
        lines.append(f"{indent}{_clip(box.label, 100)}{to}")
        if box.label.startswith("fork into"):
            for child in [rows[t].seq for t in box.targets]:
                lines.append(f"{indent}  fork {child}")
                lines += _lane(graph, child, indent + "    ")
    return lines


def _arrow(start: tuple[int, int], end: tuple[int, int]) -> str:
    (x1, y1), (x2, y2) = start, end
    x1, y1 = x1 + _WIDTH // 2, y1 + _HEIGHT
    x2 = x2 + _WIDTH // 2
    middle = (y1 + y2) // 2
    curve = f"M{x1} {y1}C{x1} {middle} {x2} {middle} {x2} {y2}"
    return f'<path d="{curve}" fill="none" stroke="#667" marker-end="url(#tip)"/>'


def _clip(label: str, width: int) -> str:
    return label if len(label) <= width else label[: width - 1] + "…"
