"""The same programs on a third party's backend: one call per generation, the same results."""

import asyncio
import threading

import pytest
from phloem import assistant, function, gen, select, set_default_backend, system, user
from phloem.lang.backend.base_backend import BaseBackend
from phloem.lang.chat_template import get_chat_template
from phloem.lang.choices import ChoicesDecision
from phloem.lang.global_config import global_config
from phloem.protocol import errors


class Echo(BaseBackend):
    """Answers with the last word of the text; records what it saw."""

    def __init__(self, template="default"):
        self.template = get_chat_template(template)
        self.prompts = []
        self.params = []
        self.lock = threading.Lock()

    def get_chat_template(self):
        return self.template

    def generate(self, s, sampling_params):
        with self.lock:
            self.prompts.append(s.text_)
            self.params.append(sampling_params)
        if "fail" in s.text_[-6:]:
            raise ConnectionError("no route")
        return f" <{s.text_.split()[-1]}>", {"prompt_tokens": 3, "completion_tokens": 2}

    def generate_stream(self, s, sampling_params):
        for piece in (" x", " y"):
            yield piece, {}

    def select(self, s, choices, temperature, choices_method=None):
        return ChoicesDecision(choices[-1], {"normalized_prompt_logprobs": [0.0] * len(choices)})


class AsyncEcho(Echo):
    async def generate_async(self, s, sampling_params):
        await asyncio.sleep(0.001)
        return Echo.generate(self, s, sampling_params)


@pytest.fixture(params=[Echo, AsyncEcho])
def backend(request):
    return request.param()


def test_forks_refs_joins_and_selects_run_in_order(backend):
    @function
    def tree(s):
        s += "root"
        forks = s.fork(3)
        for i, f in enumerate(forks):
            f += f" b{i}" + gen("leaf")
        s += " early:" + forks.ref("leaf").join(",")
        forks.join()
        s += select("c", choices=[" p", " q"]) + gen("last")

    s = tree.run(backend=backend)
    assert s["leaf"] == [" <b0>", " <b1>", " <b2>"] and s["last"] == " <q>"
    assert s.text() == "root early: <b0>, <b1>, <b2> q <q>"
    assert s.get_meta_info("c")["normalized_prompt_logprobs"] == [0.0, 0.0]
    assert s.stats() == {"messages": 1, "calls": 5, "prompt_tokens": 12, "completion_tokens": 8, "cached_tokens": 0}


def test_roles_are_text_by_the_backends_template():
    @function
    def chat(s):
        s += system("be brief") + user("hi")
        s += assistant(gen("a"))

    backend = Echo("chatml")
    s = chat.run(backend=backend)
    assert s.text().startswith("<|im_start|>system\nbe brief<|im_end|>\n<|im_start|>user\nhi<|im_end|>\n")
    assert s.messages()[2] == {"role": "assistant", "content": "<<|im_start|>assistant>"}
    assert backend.params[0].stop == ("<|im_end|>",)


def test_a_default_system_prompt_is_inserted():
    s = function(lambda s: s.__iadd__(user("hi"))).run(backend=Echo("qwen"))
    assert s.messages()[0]["role"] == "system"


def test_the_cause_reaches_every_reader(backend):
    @function
    def body(s):
        s += "please fail" + gen("a")
        s += gen("b")

    s = body.run(backend=backend)
    with pytest.raises(ConnectionError, match="no route"):
        s["a"]
    with pytest.raises(errors.DependencyFailed) as caught:
        s["b"]
    assert isinstance(caught.value.__cause__, ConnectionError)
    assert s.text(partial=True) == "please fail" and isinstance(s.error(), ConnectionError)
    s.stats()


def test_a_failed_fork_does_not_stop_its_sisters(backend):
    @function
    def body(s):
        forks = s.fork(2)
        forks += [" fail" + gen("x"), " fine" + gen("x")]
        s.states = forks

    s = body.run(backend=backend)
    with pytest.raises(ConnectionError):
        s.states[0]["x"]
    assert s.states[1]["x"] == " <fine>"


def test_streaming_yields_constants_and_chunks_in_order():
    @function
    def body(s):
        s += "ask" + gen("a") + " end"

    assert list(body.run(backend=Echo(), stream=True).text_iter()) == ["ask", " x", " y", " end"]


def test_inline_runs_everything_on_the_callers_thread():
    seen = []

    class Where(Echo):
        def generate(self, s, sampling_params):
            seen.append(threading.get_ident())
            return " w", {}

    s = function(lambda s: s.__iadd__("a" + gen("x") + gen("y"))).run(backend=Where(), use_thread=False)
    assert seen == [threading.get_ident()] * 2 and s["y"] == " w"


def test_many_forks_need_few_threads():
    """Sequences that wait for others hold no thread, so a pool of two is enough for all of them."""

    class Narrow(Echo):
        max_threads = 2

    @function
    def body(s):
        forks = s.fork(20)
        for i, f in enumerate(forks):
            f += f" {i}" + gen("x")
            grand = f.fork(2)
            grand += gen("y")
            grand.join()
        forks.join()
        s += "end" + gen("z")

    assert body.run(backend=Narrow())["z"] == " <end>"


def test_the_default_backend_is_used():
    backend = Echo()
    set_default_backend(backend)
    try:
        assert function(lambda s: s.__iadd__("hi" + gen("x"))).run()["x"] == " <hi>"
        assert global_config.default_backend is backend
    finally:
        set_default_backend(None)
    with pytest.raises(errors.InvalidRequest, match="no backend"):
        function(lambda s: None).run()
    with pytest.raises(errors.Unsupported, match="is not a backend"):
        function(lambda s: None).run(backend=3)


def test_a_backend_that_ignores_n_is_an_error(backend):
    s = function(lambda s: s.__iadd__("hi" + gen("x", n=2))).run(backend=backend)
    with pytest.raises(errors.Unsupported, match="returned 1 candidate"):
        s["x"]
