"""API speculative execution: fewer calls to backends that are called once per gen, and the same text."""

import threading

import pytest
from phloem import assistant, function, gen, select, user
from phloem.lang.backend.base_backend import BaseBackend
from phloem.protocol import errors


class Writer(BaseBackend):
    """A completion model that knows one text by heart and stops where it ends. A token is a character."""

    precache_in_batch = False

    def __init__(self, text):
        self.text = text
        self.calls = []

    def generate(self, s, sampling_params):
        self.calls.append((s.text_, sampling_params.max_new_tokens, sampling_params.stop))
        assert self.text.startswith(s.text_), (self.text, s.text_)
        rest = self.text[len(s.text_) :]
        ends = [at for stop in sampling_params.stop if (at := rest.find(stop)) >= 0]
        end = min([*ends, len(rest), sampling_params.max_new_tokens])
        reason = "length" if end == sampling_params.max_new_tokens < len(rest) and end not in ends else "stop"
        return rest[:end], {"completion_tokens": end, "finish_reason": {"type": reason}}


TEXT = "Name: Ada\nBorn: 1815\nJob: poet"


def three(s):
    s += "Name:" + gen("name", stop="\n", max_tokens=64)
    s += "\nBorn:" + gen("born", stop="\n", max_tokens=64)
    s += "\nJob:" + gen("job", stop="\n", max_tokens=64)


def test_three_gens_of_a_completion_model_are_one_call():
    backend = Writer(TEXT)
    s = function(num_api_spec_tokens=64)(three).run(backend=backend)
    assert (s["name"], s["born"], s["job"]) == (" Ada", " 1815", " poet") and s.text() == TEXT
    assert backend.calls == [("Name:", 64, ())] and s.stats()["calls"] == 1
    plain = Writer(TEXT)
    assert function(three).run(backend=plain).text() == TEXT and len(plain.calls) == 3


def test_a_constant_that_the_model_did_not_generate_needs_another_call():
    class Twist(Writer):
        """Says another line once the program has."""

        def generate(self, s, sampling_params):
            self.text = "Name: Ada\nAge: 36\n" if "Age" in s.text_ else "Name: Ada\nBorn: 1815\n"
            return super().generate(s, sampling_params)

    @function(num_api_spec_tokens=16)
    def body(s):
        s += "Name:" + gen("name", stop="\n", max_tokens=16)
        s += "\nAge:" + gen("age", stop="\n", max_tokens=16)

    twist = Twist("")
    s = body.run(backend=twist)
    assert s["name"] == " Ada" and s["age"] == " 36" and len(twist.calls) == 2


def test_a_gen_never_gets_more_tokens_than_it_may_have():
    backend = Writer("one two three four five six seven")

    @function(num_api_spec_tokens=30)
    def body(s):
        s += "one" + gen("a", max_tokens=4) + gen("b", max_tokens=6)

    s = body.run(backend=backend)
    assert (s["a"], s["b"]) == (" two", " three")
    again = Writer("one two three four")

    @function(num_api_spec_tokens=6)
    def cut(s):
        s += "one" + gen("a", max_tokens=64)

    assert cut.run(backend=again)["a"] == " two three four"


def test_a_gen_with_a_grammar_or_candidates_gets_its_own_call():
    backend = Writer("a 12 b 34 c")
    seen = []
    generate = backend.generate

    def spy(s, params):
        seen.append(params.regex)
        return generate(s, params)

    backend.generate = spy

    @function(num_api_spec_tokens=32)
    def body(s):
        s += "a" + gen("x", stop=" b") + " b" + gen("y", regex=" [0-9]+", max_tokens=3)

    s = body.run(backend=backend)
    assert (s["x"], s["y"]) == (" 12", " 34") and seen == [None, " [0-9]+"]


def test_runs_do_not_share_text_generated_ahead():
    texts = {str(i): f"{i}: a{i}\nb{i}\n" for i in range(40)}
    lock = threading.Lock()
    calls = []

    class Many(Writer):
        def generate(self, s, sampling_params):
            with lock:
                calls.append(1)
            writer = Writer(texts[s.text_.partition(":")[0]])
            return writer.generate(s, sampling_params)

    @function(num_api_spec_tokens=32)
    def body(s, name):
        s += name + ":" + gen("a", stop="\n") + "\n" + gen("b", stop="\n")

    states = body.run_batch([{"name": name} for name in texts], backend=Many(""))
    assert [(s["a"], s["b"]) for s in states] == [(f" a{i}", f"b{i}") for i in range(40)] and len(calls) == 40


def test_forks_do_not_generate_ahead_and_bind_keeps_the_setting():
    backend = Writer("x 1\ny 2\n")

    @function(num_api_spec_tokens=16)
    def body(s, word):
        s += word + gen("a", stop="\n")
        forks = s.fork(2)
        forks += "\ny" + gen("b", stop="\n")
        forks.join()

    s = body.bind(word="x").run(backend=backend)
    assert s["a"] == " 1" and s["b"] == [" 2", " 2"] and len(backend.calls) == 3


class Chat(BaseBackend):
    is_chat_model = True
    precache_in_batch = False

    def __init__(self, *turns):
        self.turns = list(turns)
        self.calls = []

    def generate(self, s, sampling_params):
        self.calls.append((list(s.messages_), sampling_params.max_new_tokens, sampling_params.stop))
        return self.turns[min(len(self.calls), len(self.turns)) - 1], {"completion_tokens": 9}


@function(num_api_spec_tokens=50)
def profile(s):
    s += user("Who?")
    with s.assistant():
        s += "Name:" + gen("name", stop="\n")
        s += "\nBorn:" + gen("born", stop="\n") + "\nJob:" + gen("job")


def test_the_gens_of_a_chat_models_turn_are_one_call():
    backend = Chat("Name: Ada\nBorn: 1815\nJob: poet")
    s = profile.run(backend=backend)
    assert (s["name"], s["born"], s["job"]) == (" Ada", " 1815", " poet")
    assert s.messages()[-1] == {"role": "assistant", "content": "Name: Ada\nBorn: 1815\nJob: poet"}
    assert backend.calls == [([{"role": "user", "content": "Who?"}], 50, ())]
    assert s.stats()["completion_tokens"] == 9 and s.stats()["calls"] == 1


def test_a_chat_model_that_does_not_follow_the_turn_is_called_three_times_and_then_refused():
    backend = Chat("I do not know", "Name: Ada", "Name: Ada\nBorn: 1815\nJob: poet")
    assert profile.run(backend=backend)["job"] == " poet" and len(backend.calls) == 3
    stubborn = Chat("I do not know")
    s = profile.run(backend=stubborn)
    with pytest.raises(errors.PhloemError, match=r"after 3 tries: expected 'Name:\{name\}.*'I do not know'"):
        s["name"]
    with pytest.raises(errors.PhloemError):
        s["job"]
    assert len(stubborn.calls) == 3 and s.stats()["calls"] == 3


def test_a_turn_with_an_unsupported_expression_is_refused_by_name():
    @function(num_api_spec_tokens=50)
    def chooses(s):
        with s.assistant():
            s += gen("a", stop=",") + select("b", ["x", "y"])

    with pytest.raises(errors.InvalidRequest, match="put select, fork and images outside of the turn"):
        chooses.run(backend=Chat("x"))["a"]

    @function(num_api_spec_tokens=50)
    def typed(s):
        s += assistant(gen("a", regex="x"))

    with pytest.raises(errors.InvalidRequest, match=r"gen\('a'\).*remove n, grammars"):
        typed.run(backend=Chat("x"))["a"]

    @function(num_api_spec_tokens=50)
    def reads(s):
        with s.assistant():
            s += gen("a", stop=",")
            s += "," + gen("b") if s["a"] else ""

    with pytest.raises(errors.InvalidRequest, match="before reading its values"):
        reads.run(backend=Chat("x,y"))["b"]
    with pytest.raises(errors.InvalidRequest, match="must be 1 or more"):
        function(num_api_spec_tokens=0)(three)
    with pytest.raises(errors.InvalidRequest, match="leave out stream=True or num_api_spec_tokens"):
        profile.run(backend=Chat("x"), stream=True)
