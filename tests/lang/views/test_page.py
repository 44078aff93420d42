"""The page of a run is self-contained, shows the run and escapes all text."""

import re
from html.parser import HTMLParser

import pytest
from phloem.lang.api import function
from phloem.lang.gen import gen
from phloem.lang.graph import Graph
from phloem.lang.select import select
from phloem.lang.views.page import fragment, page
from phloem.lang.views.record import LaneView, OpView, RunView, Stretch, record_of
from phloem.protocol.messages import TokenTrace

EVIL = "</i><script>alert('x')</script>\" onmouseover='y' &amp; \x00 \ud800"
VOID = {"meta", "path", "rect", "input"}


class Checked(HTMLParser):
    """Asserts that tags nest, and that scripts and external resources do not occur. ``text``: the visible text."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.text = ""
        self.feed(html)
        assert not self.open

    def handle_starttag(self, tag, attrs):
        assert tag not in ("script", "link", "img", "iframe")
        for name, value in attrs:
            assert not name.startswith("on") or tag == "input", (tag, name, value)
            assert name not in ("src", "srcset"), value
            assert name != "href" or value.startswith("#"), value
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        if tag not in VOID:
            assert self.open.pop() == tag

    def handle_data(self, data):
        if "style" not in self.open:
            self.text += data


def run_of(*tokens, ops=(), title="t"):
    return RunView(title, tuple(ops), (LaneView(0, None, (Stretch(tuple(tokens)),)),), Graph("t", (), {}), {}, True)


def test_no_text_becomes_markup():
    tokens = [TokenTrace(EVIL, origin, -0.5, ((EVIL, -1.0),)) for origin in ("prompt", "generated", "forced", EVIL)]
    op = OpView(0, 0, "gen", EVIL, is_timed=True, decode_s=1.0, scores=((EVIL, -1.0),), error=EVIL)
    run = RunView(EVIL, (op,), (LaneView(0, None, (Stretch(tuple(tokens), 0),)),), Graph(EVIL, (), {}), {}, True)
    for html in (page(run), fragment(run)):
        assert EVIL.replace("\x00", "�") in Checked(html).text.replace("\x00", "�")


def test_a_program_with_markup_in_its_text_is_written_complete(connect, tmp_path):
    @function
    def program(s):
        s += EVIL[:-1] + gen("x") + select("y", choices=[EVIL[:-1], "b"])

    state = program.run(backend=connect(reply=lambda prompt, op: "<b>bold</b>"))
    state.trace_html(tmp_path / "run.html", title="<title>")
    html = (tmp_path / "run.html").read_text(encoding="utf-8")
    assert "<b>bold</b>" in Checked(html).text and "<title>&lt;title&gt;" in html
    assert set(re.findall(r"https?://[^\s\"']+", html)) == {"http://www.w3.org/2000/svg"}
    assert Checked(state._repr_html_())


def test_a_token_shows_its_probability_and_its_alternatives():
    html = page(run_of(TokenTrace(" Paris", "generated", -0.105, ((" Paris", -0.105), (" Lyon", -2.996)))))
    assert "90.0% &#x27; Paris&#x27;" in html and "5.0% &#x27; Lyon&#x27;" in html
    sure, unsure = (page(run_of(TokenTrace("a", "generated", p))) for p in (-0.01, -3.0))
    shade = [float(re.search(r"style='background:rgba\([\d,]+,([\d.]+)\)'", html)[1]) for html in (sure, unsure)]
    assert shade[0] < shade[1]


def test_the_timeline_draws_the_operations_with_known_times():
    ops = [
        OpView(0, 0, "gen", "a", is_timed=True, start_s=0.0, queue_s=0.25, prefill_s=0.25, decode_s=0.5),
        OpView(1, 0, "select", "b", is_timed=True, start_s=1.0, prefill_s=1.0),
    ]
    html = page(run_of(ops=ops))
    assert "left:0.000%;width:12.500%" in html and "left:25.000%;width:25.000%" in html
    assert "left:50.000%;width:50.000%" in html
    assert "reports no times" in page(run_of(ops=[OpView(0, 0, "gen", "a")]))


def test_a_long_program_stays_a_usable_page(connect):
    @function
    def long(s):
        for i in range(60):
            forks = s.fork(3)
            for fork in forks:
                fork += f"part {i}" + gen("x", max_tokens=4)
            forks.join()
            s += forks.ref("x") + gen("y", max_tokens=4)

    html = page(record_of(long.run(backend=connect(reply=lambda prompt, op: " word " * 10)).program))
    assert Checked(html) and html.count("<details open>") == 12 and html.count("<details>") == 169
    assert len(html) < 600_000


def test_a_running_program_shows_nothing_in_a_notebook(connect):
    seen = []

    @function
    def program(s):
        s += gen("x")
        seen.append(s._repr_html_())

    state = program.run(backend=connect(reply=lambda prompt, op: "x"))
    assert seen == [None] and "generated" in state._repr_html_()


def test_a_compiled_program_shows_its_graph(connect):
    @function
    def program(s, q):
        s += q + gen("x")

    backend = connect(reply=lambda prompt, op: "x")
    compiled = program.compile()
    assert compiled._repr_html_() is None
    compiled.run("a", backend=backend)
    assert "<svg" in compiled._repr_html_() and "gen x" in compiled._repr_html_()


@pytest.mark.parametrize("value", [0.0, 0.0123, 5.0])
def test_seconds_read_well(value):
    html = page(run_of(ops=[OpView(0, 0, "gen", "a", is_timed=True, decode_s=value)]))
    assert {0.0: "0 ms", 0.0123: "12.3 ms", 5.0: "5.00 s"}[value] in html
