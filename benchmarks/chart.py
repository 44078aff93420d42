"""Charts as SVG, with lines or bars: for the figures in the docs."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from math import log

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


# -- bars -------------------------------------------------------------------------------------------------------------

BAR_WIDTH, BAR_HEIGHT, GROUP_GAP = 440, 13, 12  # of the picture and of one bar: legible on a phone
BAR_LEFT, BAR_RIGHT, BAR_TOP = 12, 64, 62


@dataclass(frozen=True, slots=True)
class Theme:
    """The colours of a chart's ground, of its text and lines, and of its series."""

    ground: str
    text: str
    faint: str
    series: tuple[str, ...]


LIGHT = Theme(
    "#ffffff",
    "#1f2328",
    "#d0d7de",
    ("#1b6e53", "#7fb8a3", "#b9a44c", "#c2571a", "#3a5fa8", "#8a3f8f", "#57606a", "#a03030"),
)
DARK = Theme(
    "#0d1117",
    "#e6edf3",
    "#3d444d",
    ("#3fb98b", "#2a7058", "#b9a44c", "#e8864a", "#7aa2f0", "#c58ac9", "#8b949e", "#e06c6c"),
)


def bar_chart(
    title: str,
    groups: Mapping[str, Mapping[str, float]],
    *,
    theme: Theme,
    label: Callable[[float], str],
    note: str = "",
    is_log: bool = False,
) -> str:
    """The SVG of horizontal bars: one group a row of ``groups``, one bar a series, labelled with its value.

    Series have the same colour in every group and stand in the legend in the order in which they are met. With
    ``is_log`` equal lengths are equal factors, and the shortest bar is the least value. Values are above 0.
    """
    series = list(dict.fromkeys(name for row in groups.values() for name in row))
    values = [value for row in groups.values() for value in row.values()]
    least, most = min(values, default=1.0), max(values, default=1.0)
    full = BAR_WIDTH - BAR_LEFT - BAR_RIGHT

    def length(value: float) -> float:
        if not is_log:
            return value / most * full
        return full * (0.06 + 0.94 * log(value / least) / log(most / least)) if most > least else full

    per_row = 3
    rows = (len(series) + per_row - 1) // per_row
    y = BAR_TOP + 18.0 * rows
    bars = []
    for name, row in groups.items():
        y += GROUP_GAP + 14
        bars.append(f'<text x="{BAR_LEFT}" y="{y - 4:.1f}" font-weight="bold">{escape(name)}</text>')
        for one, value in row.items():
            colour = theme.series[series.index(one) % len(theme.series)]
            bars += [
                f'<rect x="{BAR_LEFT}" y="{y:.1f}" width="{length(value):.1f}" height="{BAR_HEIGHT - 2}" '
                f'fill="{colour}"><title>{escape(one)}</title></rect>',
                f'<text x="{BAR_LEFT + length(value) + 5:.1f}" y="{y + BAR_HEIGHT - 3:.1f}" font-size="11">'
                f"{escape(label(value))}</text>",
            ]
            y += BAR_HEIGHT
    legend = []
    for i, one in enumerate(series):
        x, at = BAR_LEFT + (i % per_row) * (BAR_WIDTH - 2 * BAR_LEFT) / per_row, BAR_TOP + 18 * (i // per_row)
        legend += [
            f'<rect x="{x:.1f}" y="{at - 10}" width="11" height="11" fill="{theme.series[i % len(theme.series)]}"/>',
            f'<text x="{x + 16:.1f}" y="{at}" font-size="12">{escape(one)}</text>',
        ]
    height = round(y + GROUP_GAP)
    return (
        "\n".join(
            [
                f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {BAR_WIDTH} {height}" '
                f'font-family="sans-serif" font-size="13" fill="{theme.text}">',
                f'<rect width="{BAR_WIDTH}" height="{height}" fill="{theme.ground}"/>',
                f'<text x="{BAR_LEFT}" y="22" font-size="15" font-weight="bold">{escape(title)}</text>',
                f'<text x="{BAR_LEFT}" y="40" font-size="11" fill-opacity="0.7">{escape(note)}</text>',
                f'<path d="M{BAR_LEFT} {BAR_TOP + 18 * rows}V{height - GROUP_GAP}" stroke="{theme.faint}"/>',
                *legend,
                *bars,
                "</svg>",
            ]
        )
        + "\n"
    )
