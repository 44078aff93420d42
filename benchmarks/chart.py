"""A line chart as SVG: for the figures in the docs."""

from collections.abc import Mapping, Sequence
from html import escape

WIDTH, HEIGHT = 640, 376
LEFT, RIGHT, TOP, BOTTOM = 64, 150, 52, 48
COLOURS = ("#1b6e53", "#c2571a", "#3a5fa8", "#8a3f8f", "#6b6b2a")
Points = Sequence[tuple[float, float]]


def line_chart(title: str, x_label: str, y_label: str, lines: Mapping[str, Points], *, note: str = "") -> str:
    """The SVG of a line chart. Both axes begin at 0. The first line's points are labelled with their y value.

    ``note`` stands under the title and says where and how the figures were measured.
    """
    top_x = nice(max((x for points in lines.values() for x, _ in points), default=1.0))
    top_y = nice(max((y for points in lines.values() for _, y in points), default=1.0))
    inner_width, inner_height = WIDTH - LEFT - RIGHT, HEIGHT - TOP - BOTTOM

    def at(x: float, y: float) -> tuple[float, float]:
        return LEFT + x / top_x * inner_width, TOP + (1 - y / top_y) * inner_height

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" '
        'font-family="sans-serif" font-size="12">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
        f'<text x="{LEFT}" y="20" font-size="14" font-weight="bold">{escape(title)}</text>',
        f'<text x="{LEFT}" y="38" fill="#666" font-size="11">{escape(note)}</text>',
        f'<text x="{LEFT + inner_width / 2}" y="{HEIGHT - 10}" text-anchor="middle">{escape(x_label)}</text>',
        f'<text x="14" y="{TOP + inner_height / 2}" text-anchor="middle" '
        f'transform="rotate(-90 14 {TOP + inner_height / 2})">{escape(y_label)}</text>',
    ]
    for i in range(5):
        (x, _), (_, y) = at(top_x * i / 4, 0), at(0, top_y * i / 4)
        bottom = TOP + inner_height
        parts += [
            f'<path d="M{LEFT} {y:.1f}H{LEFT + inner_width}M{x:.1f} {TOP}V{bottom}" stroke="#ddd" fill="none"/>',
            f'<text x="{LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{top_y * i / 4:g}</text>',
            f'<text x="{x:.1f}" y="{bottom + 16}" text-anchor="middle">{top_x * i / 4:,g}</text>',
        ]
    for i, (name, points) in enumerate(lines.items()):
        colour = COLOURS[i % len(COLOURS)]
        places = [at(*point) for point in points]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
        parts.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"/>')
        parts += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{colour}"/>' for x, y in places]
        if i == 0:
            labels = [(x, y, f"{value:.3g}") for (x, y), (_, value) in zip(places, points, strict=True)]
            parts += [
                f'<text x="{x:.1f}" y="{y - 8:.1f}" text-anchor="middle" font-size="10" fill="{colour}">{label}</text>'
                for x, y, label in labels
            ]
        parts.append(f'<text x="{WIDTH - RIGHT + 10}" y="{TOP + 14 + 18 * i}" fill="{colour}">{escape(name)}</text>')
    return "\n".join([*parts, "</svg>"]) + "\n"


def nice(value: float) -> float:
    """The next number of the form 1, 2, 4, 6, 8 times a power of ten."""
    power = 1.0
    while power * 10 < value:
        power *= 10
    while power > value:
        power /= 10
    return next(power * digit for digit in (1, 2, 4, 6, 8, 10) if power * digit >= value)
