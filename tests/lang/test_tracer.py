"""Traces, graphs, compiled programs and common prefixes."""

import xml.etree.ElementTree as ElementTree

import pytest
from phloem import assistant, function, gen, global_config, select, system, user
from phloem.lang.backend.base_backend import BaseBackend
from phloem.lang.expressions import TraceError
from phloem.protocol import errors, ops
from phloem.tests.lang.fakes import echo


@function
def expand(s, tip):
    s += "Expand: " + tip + gen("detailed")


@function
def tips(s, topic, count=2):
    s += "Tips for " + topic + "." + gen("tip")
    forks = s.fork(2)
    forks += lambda i: f" v{i}" + gen("version", temperature=0.5)
    forks.join()
    s += " all" + s.ref("version", sep=";")
    s += select("kind", choices=[" a", " b"])
    s["about"] = topic


def test_a_compiled_program_gives_what_the_program_gives(connect):
    compiled_backend, plain_backend = connect(reply=echo), connect(reply=echo)
    compiled = tips.compile(backend=compiled_backend)
    for topic in ("bread", "tea"):
        a = compiled.run(topic, backend=compiled_backend, temperature=0.3)
        b = tips.run(topic, backend=plain_backend, temperature=0.3)
        assert a.text() == b.text()
        assert a["version"] == b["version"] and a["about"] == topic and a["kind"] == " a"
        assert a.stats() == b.stats() and a.stats()["messages"] == 1
    for a, b in zip(compiled_backend.client.submits, plain_backend.client.submits, strict=True):
        assert a.ops == b.ops


def test_a_compiled_program_calls_its_body_once(connect):
    calls = []

    @function
    def body(s, x):
        calls.append(x)
        s += "q " + x + gen("a", max_tokens=x)

    backend = connect(reply=echo)
    compiled = body.compile()
    states = compiled.run_batch([{"x": 3}, {"x": 4}], backend=backend)
    assert [s["a"] for s in states] == [" <3>", " <4>"] and len(calls) == 1
    limits = [op.params.max_tokens for sent in backend.client.submits for op in sent.ops if isinstance(op, ops.Gen)]
    assert limits == [3, 4]


def test_a_compiled_chat_streams_and_keeps_messages(connect):
    @function
    def chat(s, question):
        s += system("brief") + user(question)
        s += assistant(gen("a"))

    backend = connect(reply=lambda prompt, op: " x y")
    s = chat.compile(backend=backend).run("hi", backend=backend, stream=True)
    assert list(s.text_iter("a")) == [" x", " y"]
    assert s.messages()[1:] == [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "x y"}]


def test_wrong_arguments_of_a_compiled_program_are_named(connect):
    compiled, backend = tips.compile(), connect()
    with pytest.raises(TypeError, match="is missing topic"):
        compiled.run(backend=backend)
    with pytest.raises(TypeError, match="unexpected keyword argument 'colour'; it takes topic, count"):
        compiled.run("x", colour=1, backend=backend)


def test_a_body_that_branches_cannot_be_compiled_and_hears_what_to_do(connect):
    @function
    def on_value(s):
        s += gen("a")
        if s["a"]:
            s += "x"

    @function
    def on_argument(s, x):
        s += "1" if x else "2"

    @function
    def formatted(s, x):
        s += f"{x}"

    backend = connect()
    with pytest.raises(TraceError, match="'a' is not known yet"):
        on_value.compile(backend=backend)
    with pytest.raises(TypeError, match="a branch: argument 'x' is not known"):
        on_argument.compile(backend=backend)
    assert on_argument.compile(x=True, backend=backend).run(backend=backend).text() == "1"
    with pytest.raises(TypeError, match="Cannot put argument inside a f-string"):
        formatted.trace(backend=backend)


def test_a_program_called_inside_a_trace_becomes_part_of_it(connect):
    @function
    def outer(s, topic):
        s += "Tips for " + topic + gen("tip")
        branch = expand(tip=s["tip"])
        s += " detail:" + branch["detailed"] + gen("end")

    backend = connect(reply=echo)
    s = outer.compile(backend=backend).run("tea", backend=backend)
    assert s.text() == "Tips for tea <tea> detail: <<tea>> < <<tea>>>".replace("< <<tea>>>", "<<<tea>>>")
    assert s.stats()["messages"] == 1 == len(backend.client.submits)


def test_a_trace_lists_what_the_body_said(connect):
    trace = tips.trace(backend=connect())
    assert repr(trace.flatten_nodes()[:2]) == "[Constant('Tips for '), Argument(topic)]"
    assert set(trace.variables) == {"tip", "version", "kind", "about"}
    assert "Gen('tip')" in trace.last_node.print_graph_dfs()


def test_a_trace_needs_no_backend_and_then_has_the_roles_of_the_default_template(monkeypatch):
    monkeypatch.setattr(global_config, "default_backend", None)

    @function
    def chat(s, question):
        s += user(question) + assistant(gen("answer"))

    trace = chat.trace()
    assert [repr(expr) for expr in trace.flatten_nodes()] == [
        "RoleBegin(user)",
        "Argument(question)",
        "RoleEnd(user)",
        "RoleBegin(assistant)",
        "Gen('answer')",
        "RoleEnd(assistant)",
    ]
    lines = trace.last_node.print_graph_dfs().splitlines()
    assert len(lines) == 6 and lines[4] == "%4 = seq 0: Gen('answer')"
    assert "begin user" in str(chat.graph())
    with pytest.raises(errors.InvalidRequest, match="no backend"):
        chat.run("?")


def test_a_graph_is_drawn_as_text_and_as_svg(connect):
    graph = tips.graph(backend=connect())
    text = str(graph)
    assert text.startswith("program tips\n  'Tips for ' {topic} '.'\n  gen tip")
    assert "fork into 2" in text and "gen version (temperature=0.5)" in text and "paste version" in text
    root = ElementTree.fromstring(graph.svg())
    boxes = root.findall("{http://www.w3.org/2000/svg}rect")
    assert len(boxes) == len(graph.boxes) and "{topic}" in graph.svg()


LONG = "You know everything about plants and answer questions on them shortly. "


class Recorder(BaseBackend):
    def __init__(self):
        self.cached = []

    def cache_prefix(self, prefix_str):
        self.cached.append(prefix_str)

    def generate(self, s, sampling_params):
        return "x", {}


def test_a_batch_caches_a_long_common_prefix_first():
    def program(prefix):
        @function
        def body(s, q):
            s += prefix + q + gen("a")

        return body

    for length, expected in ((65, 1), (64, 0)):
        backend = Recorder()
        program("p" * length).run_batch([("a",), ("b",)], backend=backend)
        assert backend.cached == ["p" * 65] * expected
    backend = Recorder()
    program("p" * 65).run_batch([("a",)], backend=backend)
    assert backend.cached == []


def test_cache_and_pin_send_the_common_beginning_of_all_runs(connect):
    @function
    def chat(s, question):
        s += system(LONG)
        s += user(question)
        s += assistant(gen("a"))

    backend = connect()
    chat.cache(backend)
    assert chat.pin(backend) == 15
    chat.unpin(backend)
    cached, pinned, unpinned = backend.client.submits
    assert [type(op).__name__ for op in cached.ops] == ["Special", "Text", "Special", "Special", "Gen", "Close"]
    assert next(op.ttl_s for op in pinned.ops if isinstance(op, ops.Pin)) == 3600
    assert next(op.ttl_s for op in unpinned.ops if isinstance(op, ops.Pin)) == 0


def test_unknown_arguments_of_a_trace_are_refused(connect):
    with pytest.raises(errors.InvalidRequest, match="tips\\(\\) has no argument 'topics'"):
        tips.trace(topics="x", backend=connect())
