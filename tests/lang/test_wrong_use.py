"""Mistakes in a program raise errors that say what to write instead. On both paths where possible."""

import asyncio

import pytest
from phloem import RuntimeEndpoint, assistant, function, gen, image, select, user
from phloem.lang.expressions import TraceError
from phloem.lang.program import UnknownVariable
from phloem.protocol import errors

PNG = b"\x89PNG\r\n\x1a\n" + b"0" * 16


def nested_roles(s):
    s += user("a" + assistant("b"))


def nothing(s):
    s += None


def number(s):
    s += 42


def formatted(s):
    s += f"Q: {gen('x')}"


def misspelt(s):
    s += gen("x", max_token=3)


def text_for_forks(s):
    forks = s.fork(2)
    forks += "text"


def too_few_for_forks(s):
    forks = s.fork(2)
    forks += ["a"]


def unknown_join(s):
    s.fork(2).join("merge")


def text_as_choices(s):
    s += select("x", "abc")


def late(s):
    fork = s.fork(1)
    fork.join()
    fork[0].__iadd__("late")


@pytest.mark.parametrize(
    ("body", "kind", "message"),
    [
        (nested_roles, ValueError, r"role 'assistant' begins inside the open role 'user'.*s \+= user_end\(\)"),
        (nothing, ValueError, r"s \+= None: there is nothing to append; did a function forget to return its text\?"),
        (number, ValueError, r"cannot append 42 of type int.*append a str, gen\(\.\.\.\), select"),
        (formatted, TraceError, r'cannot go into an f-string.*write "\.\.\." \+ gen\(\.\.\.\) \+ "\.\.\."'),
        (misspelt, TypeError, r"gen\('x'\) has no argument 'max_token'; did you mean 'max_tokens'\?"),
        (text_for_forks, ValueError, r"a str is none of these; write forks \+= lambda i"),
        (too_few_for_forks, ValueError, "1 items for 2 forks; give one each"),
        (unknown_join, ValueError, "join mode 'merge'; it is one of gather_variable, concate_and_append"),
        (text_as_choices, ValueError, "must be a list of non-empty strings"),
        (late, ValueError, r"this fork was joined; append before join\(\)"),
    ],
)
def test_a_mistake_in_the_body_says_what_to_write(backend, body, kind, message):
    with pytest.raises(kind, match=message):
        function(body).run(backend=backend)


def test_an_unknown_variable_names_the_known(backend):
    s = function(lambda s: s.__iadd__(gen("answer"))).run(backend=backend)
    with pytest.raises(UnknownVariable, match="no variable 'anser' in this program; it has: 'answer'") as caught:
        s["anser"]
    assert isinstance(caught.value, KeyError)


@pytest.mark.parametrize(
    ("write", "message"),
    [
        (
            lambda s, topic: s.__iadd__(f"About {topic}:"),
            r'Cannot put argument inside a f-string.*write s \+= "\.\.\."',
        ),
        (lambda s, topic: s.__iadd__("a" if topic else "b"), "a branch: argument 'topic' is not known.*as a constant"),
        (lambda s, topic: [s.__iadd__(t) for t in topic], "a loop: argument 'topic' is not known"),
        (lambda s, topic: s.__iadd__(topic[0]), "indexing: argument 'topic' is not known"),
    ],
)
def test_reading_an_argument_under_trace_says_what_to_write(backend, write, message):
    with pytest.raises(TraceError, match=message):
        function(write).trace(backend=backend)
    with pytest.raises(TraceError, match=message):
        function(write).compile(backend=backend)


def test_branching_on_a_value_under_trace_says_what_to_write(backend):
    def body(s):
        s += gen("x")
        if s["x"]:
            s += "yes"

    with pytest.raises(TraceError, match=r"'x' is not known"):
        function(body).compile(backend=backend)


def test_a_blocking_read_inside_an_event_loop_says_what_to_await(backend):
    @function
    async def body(s):
        s += gen("x")
        return s["x"]

    with pytest.raises(errors.InvalidRequest, match=r"would block the event loop.*write await s.get\('x'\)"):
        asyncio.run(body.run(backend=backend))


def test_a_batch_inside_an_event_loop_says_what_to_await(backend):
    @function
    async def body(s):
        s += gen("x")

    async def main():
        body.run_batch([{}], backend=backend)

    with pytest.raises(errors.InvalidRequest, match=r"a second event loop.*write await body.run_batch_async"):
        asyncio.run(main())


def test_one_loops_state_can_be_read_from_another_and_from_none(backend):
    @function
    async def body(s):
        s += "a" + gen("x")

    s = asyncio.run(body.run(backend=backend))
    assert s["x"]

    async def other():
        return await s.get("x")

    assert asyncio.run(other()) == s["x"]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"temprature": 1}, r"argument 'temprature'; it takes topic; did you mean 'temperature'\?"),
        ({"topc": 1}, r"argument 'topc'.*did you mean 'topic'\?"),
        ({"zzzz": 1}, r"run\(\) also takes sampling parameters, backend=, stream=, deadline_s="),
    ],
)
def test_an_unknown_argument_is_named_with_the_nearest_known_one(backend, given, message):
    def body(s, topic="t"):
        s += gen("x")

    with pytest.raises(TypeError, match=message):
        function(body).run(backend=backend, **given)


def test_a_parameter_out_of_its_limits_is_named_with_its_gen(engine):
    s = function(lambda s: s.__iadd__("a" + gen("x", temperature=-1.0) + gen("y"))).run(backend=engine)
    with pytest.raises(errors.PhloemError, match=r"temperature=-1.0: must be between 0 and 100, in gen\('x'\)"):
        s["x"]


def test_an_image_is_refused_by_a_model_without_vision(connect):
    s = function(lambda s: s.__iadd__(user("see" + image(PNG)) + assistant(gen("x")))).run(
        backend=connect(model="tiny")
    )
    with pytest.raises(errors.Unsupported, match=r"image\(...\): tiny takes no images; give it text, or another model"):
        s["x"]


@pytest.mark.parametrize(
    ("backend", "message"),
    [
        ("http://localhost:1", r"is an address.*backend=phloem.RuntimeEndpoint\('http://localhost:1'\)"),
        ("smollm2", "'smollm2' is not a backend; give a phloem.Runtime"),
        (3, "3 is not a backend"),
    ],
)
def test_an_object_that_is_not_a_backend_is_refused_with_what_is_one(backend, message):
    with pytest.raises(errors.Unsupported, match=message):
        function(lambda s: s.__iadd__("a")).run(backend=backend)


def test_an_address_without_a_scheme_is_refused_with_the_known_schemes():
    with pytest.raises(
        errors.InvalidRequest, match=r"'localhost:1': must begin with http://, https://, tcp:// or ipc://"
    ):
        RuntimeEndpoint("localhost:1")


@pytest.mark.parametrize(
    ("parameter", "value"),
    [("min_tokens", 3), ("repetition_penalty", 1.2), ("stop_regex", ("x",)), ("top_k", 3), ("regex", "a")],
)
def test_what_a_foreign_api_lacks_is_refused_by_name(parameter, value):
    params = gen("x", **{parameter: value}).sampling_params
    with pytest.raises(errors.InvalidRequest, match=f"{parameter}=.*: the OpenAI API has no such parameter"):
        params.to_openai_kwargs()
