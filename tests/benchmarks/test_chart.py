"""The charts: points lie where their values are, and text is escaped."""

import re
import xml.etree.ElementTree as ET

import pytest
from phloem.benchmarks.chart import DARK, LIGHT, bar_chart, line_chart, nice

SVG = "{http://www.w3.org/2000/svg}"


def test_points_lie_in_proportion() -> None:
    svg = line_chart("a < b", "rows", "ms", {"one": [(0, 0), (5, 5), (10, 10)], "two": [(0, 10)]})
    root = ET.fromstring(svg)
    circles = [c for c in root.iter() if c.tag.endswith("circle")]
    places = [(float(c.get("cx", "")), float(c.get("cy", ""))) for c in circles]
    assert places[1] == ((places[0][0] + places[2][0]) / 2, (places[0][1] + places[2][1]) / 2)
    assert places[3] == (places[0][0], places[2][1])
    assert len(re.findall("polyline", svg)) == 2 and "a &lt; b" in svg


def test_the_first_line_s_points_say_their_values_and_the_note_where_they_are_from() -> None:
    svg = line_chart("t", "x", "y", {"one": [(1, 2.75)], "two": [(1, 2.5)]}, note="a <machine>")
    assert ">2.5<" not in svg and svg.count(">2.75<") == 1
    assert "a &lt;machine&gt;" in svg


@pytest.mark.parametrize(("value", "top"), [(0.03, 0.04), (1, 1), (1.1, 2), (64, 80), (8000, 8000), (200_001, 400_000)])
def test_axes_end_at_a_round_number(value: float, top: float) -> None:
    assert nice(value) == pytest.approx(top)


def test_bars_are_as_long_as_their_values_and_a_series_has_one_colour() -> None:
    groups = {"a < b": {"one": 1.0, "two": 4.0}, "c": {"two": 2.0}}
    svg = bar_chart("t", groups, theme=LIGHT, label=lambda value: f"{value:g} s", note="<here>")
    bars = [r for r in ET.fromstring(svg).findall(f"{SVG}rect") if r.find(f"{SVG}title") is not None]
    widths = [float(bar.get("width", "")) for bar in bars]
    assert widths == [pytest.approx(widths[1] / 4, rel=0.01), widths[1], pytest.approx(widths[1] / 2, rel=0.01)]
    assert [bar.get("fill") for bar in bars] == [LIGHT.series[0], LIGHT.series[1], LIGHT.series[1]]
    assert "a &lt; b" in svg and "&lt;here&gt;" in svg and "4 s" in svg


def test_on_a_log_scale_equal_factors_are_equal_lengths() -> None:
    svg = bar_chart("t", {"a": {"x": 1.0, "y": 10.0, "z": 100.0}}, theme=DARK, label=str, is_log=True)
    bars = [r for r in ET.fromstring(svg).findall(f"{SVG}rect") if r.find(f"{SVG}title") is not None]
    one, two, three = (float(bar.get("width", "")) for bar in bars)
    assert two - one == pytest.approx(three - two, abs=0.2) and one > 0
    assert bar_chart("t", {"a": {"x": 5.0}}, theme=DARK, label=str, is_log=True).count("<title>") == 1
