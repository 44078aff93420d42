"""The errors of programs that fail on the compiled path, and where they are raised."""

import warnings

import pytest
from phloem import function, gen
from phloem.lang.program import UnknownVariable
from phloem.protocol import errors


def test_a_joined_fork_takes_no_more(connect):
    @function
    def body(s):
        forks = s.fork(2)
        forks.join()
        forks[0] += "late"

    with pytest.raises(errors.InvalidRequest, match="this fork was joined"):
        body.run(backend=connect())


def test_nothing_and_wrong_things_cannot_be_appended(connect):
    s = function(lambda s: None).run(backend=connect())
    with pytest.raises(ValueError, match="nothing to append"):
        s += None
    forks = []

    @function
    def body(s):
        forks.append(s.fork(2))
        forks[0] += "text"

    with pytest.raises(ValueError, match="forks \\+= 'text'"):
        body.run(backend=connect())
    with pytest.raises(errors.InvalidRequest, match="cannot append 3 of type int"):
        function(lambda s: s.__iadd__(3)).run(backend=connect())
    with pytest.raises(errors.InvalidRequest, match="the program has ended"):
        s += "x"
    with pytest.raises(ValueError, match="join mode 'all'"):
        function(lambda s: s.fork(2).join("all")).run(backend=connect())


def test_an_unknown_variable_is_a_key_error_that_names_the_known(connect):
    s = function(lambda s: s.__iadd__(gen("a"))).run(backend=connect())
    with pytest.raises(KeyError, match="no variable 'b' in this program; it has: 'a'"):
        s["b"]
    assert UnknownVariable.__mro__.index(KeyError)
    assert s.get_meta_info("b") is None
    assert "a" in s and "b" not in s


def test_the_cause_of_an_error_is_raised_where_the_value_is_read(connect):
    @function
    def body(s):
        s += "fine" + gen("a", max_tokens=5)
        s += gen("b", max_tokens=-1)

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        s = body.run(backend=connect())
        with pytest.raises(errors.InvalidParams, match="max_tokens=-1: must be >= 0"):
            s["b"]
        assert isinstance(s.error(), errors.InvalidParams)
        with pytest.raises(errors.InvalidParams):
            s.text()
        assert s.text(partial=True) == "fine"


def test_what_depends_on_a_failure_names_it_as_its_cause(connect):
    @function
    def body(s):
        s += "long " * 50 + gen("a")
        s += gen("b")

    s = body.run(backend=connect(context_len=10))
    with pytest.raises(errors.PromptTooLong):
        s["a"]
    with pytest.raises(errors.DependencyFailed) as caught:
        s["b"]
    assert isinstance(caught.value.__cause__, errors.PromptTooLong)


def test_an_exception_in_the_body_cancels_what_was_sent(connect):
    states = []

    @function
    def body(s):
        states.append(s)
        s += "x" + gen("a")
        s["a"]
        s += gen("b")
        raise LookupError("mine")

    backend = connect()
    with pytest.raises(LookupError, match="mine"):
        body.run(backend=backend)
    assert backend.client.cancels
    with pytest.raises(errors.Cancelled, match="body raised LookupError: mine"):
        states[0]["b"]
    assert states[0]["a"]


def test_a_body_that_fails_while_streaming_raises_from_the_stream(connect):
    @function
    def body(s):
        s += "ask"
        raise LookupError("mine")

    s = body.run(backend=connect(), stream=True)
    with pytest.raises(LookupError, match="mine"):
        list(s.text_iter())
    assert isinstance(s.error(), LookupError)


def test_the_first_argument_must_be_s():
    with pytest.raises(AssertionError, match="must be named s"):
        function(lambda state: None)


def test_an_expression_in_an_f_string_says_what_to_write(connect):
    with pytest.raises(TypeError, match=r'write "..." \+ gen'):
        f"{gen('x')}"
    with pytest.raises(TypeError, match=r"s\.ref\('a'\) pastes it, s\['a'\] waits"):
        function(lambda s: s.__iadd__(gen("a")).__iadd__(f"{s.ref('a')}")).run(backend=connect())
