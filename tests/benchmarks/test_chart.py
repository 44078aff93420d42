"""The charts: points lie where their values are, and text is escaped."""

import re
import xml.etree.ElementTree as ET

import pytest
from phloem.benchmarks.chart import line_chart, nice


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
