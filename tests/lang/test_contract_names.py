"""The names and signatures that programs written for SGLang rely on (rows 1.1, 1.2 and 1.5 of the contract)."""

import asyncio
import inspect
import re
import sys
import types

import phloem
import pytest
from phloem import assistant, function, gen, select, system, user
from phloem.engines import Connection, Engine, make_config
from phloem.lang import ir
from phloem.lang.backend.base_backend import BaseBackend
from phloem.protocol import errors, ops
from phloem.protocol.sampling import SamplingParams
from phloem.runtime.config import EngineConfig
from phloem.runtime.server_args import ServerArgs
from phloem.tests.runtime.string_engine import StringEngine

SGLANG_ALL = [
    "function",
    "gen",
    "gen_int",
    "gen_string",
    "select",
    "image",
    "video",
    "system",
    "user",
    "assistant",
    "system_begin",
    "system_end",
    "user_begin",
    "user_end",
    "assistant_begin",
    "assistant_end",
    "separate_reasoning",
    "set_default_backend",
    "flush_cache",
    "get_server_info",
    "global_config",
    "token_length_normalized",
    "greedy_token_selection",
    "unconditional_likelihood_normalized",
    "Runtime",
    "RuntimeEndpoint",
    "Engine",
    "ServerArgs",
    "OpenAI",
    "Anthropic",
    "VertexAI",
    "LiteLLM",
    "Crusoe",
    "__version__",
]

GEN_ORDER = [
    "name",
    "max_tokens",
    "min_tokens",
    "n",
    "stop",
    "stop_token_ids",
    "stop_regex",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "frequency_penalty",
    "presence_penalty",
    "ignore_eos",
    "return_logprob",
    "logprob_start_len",
    "top_logprobs_num",
    "return_text_in_logprobs",
    "dtype",
    "choices",
    "choices_method",
    "regex",
    "json_schema",
]
NOT_IN_GEN_INT = {"min_tokens", "dtype", "choices", "choices_method", "regex", "json_schema"}


@pytest.mark.parametrize("name", SGLANG_ALL)
def test_every_top_level_name_is_there_and_exported(name):
    assert name in phloem.__all__ and getattr(phloem, name) is not None


def test_the_modules_that_programs_import_from_are_there():
    from phloem.lang import choices, interpreter
    from phloem.lang.backend import base_backend, openai, runtime_endpoint

    for name in (
        "REGEX_INT",
        "REGEX_FLOAT",
        "REGEX_BOOL",
        "REGEX_STR",
        "SglExpr",
        "SglExprList",
        "SglGen",
        "SglSelect",
    ):
        assert hasattr(ir, name)
    for name in ("SglFunction", "SglSamplingParams", "SglArgument", "SglVariable", "SglRoleBegin", "SglRoleEnd"):
        assert hasattr(ir, name)
    assert choices.ChoicesDecision and choices.ChoicesSamplingMethod
    assert interpreter.ProgramState and interpreter.ProgramStateGroup and interpreter.StreamExecutor
    assert base_backend.BaseBackend and runtime_endpoint.RuntimeEndpoint and openai.OpenAI


def test_gen_takes_its_arguments_in_sglangs_order():
    assert list(inspect.signature(gen).parameters)[: len(GEN_ORDER)] == GEN_ORDER
    expr = gen("x", 9, 2, 3, ["a"], [7], None, 0.5, 0.9, 40, 0.1, 0.2, 0.3, True)
    assert expr.name == "x" and expr.overrides == {
        "max_tokens": 9,
        "min_tokens": 2,
        "n": 3,
        "stop": ("a",),
        "stop_token_ids": (7,),
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 40,
        "min_p": 0.1,
        "frequency_penalty": 0.2,
        "presence_penalty": 0.3,
        "ignore_eos": True,
    }


def test_gen_int_and_gen_string_are_gens_of_a_dtype():
    for maker, dtype in ((phloem.gen_int, int), (phloem.gen_string, str)):
        assert list(inspect.signature(maker).parameters) == [n for n in GEN_ORDER if n not in NOT_IN_GEN_INT]
        expr = maker("x", 5)
        assert expr.overrides == {"max_tokens": 5, "dtype": dtype}
        assert expr.grammar == gen("x", dtype=dtype).grammar


def test_choices_make_a_gen_a_select():
    expr = gen("x", choices=["a", "b"], temperature=0.0, choices_method=phloem.greedy_token_selection)
    assert isinstance(expr, ir.SglSelect) and expr.choices == ("a", "b")
    assert expr.choices_method is phloem.greedy_token_selection
    assert gen("x", choices=["a"]).choices_method is phloem.token_length_normalized


@pytest.mark.parametrize(
    "extra", [{"max_tokens": 5}, {"stop": "."}, {"n": 2}, {"regex": "a"}, {"dtype": int}, {"type": int}, {"retries": 1}]
)
def test_what_choices_would_ignore_is_refused_by_name(extra):
    (word,) = extra
    with pytest.raises(
        errors.InvalidRequest, match=rf"gen\('x', choices=...\) picks .* so {word} has no effect; leave it out"
    ):
        gen("x", choices=["a", "b"], **extra)


def test_a_bad_regex_raises_where_it_is_written():
    with pytest.raises(re.error, match="regex="):
        gen("x", regex="(")


def test_a_function_may_be_bare_or_called():
    assert function(lambda s: None).run(backend=Echo()).ret_value is None

    @function(num_api_spec_tokens=8)
    def body(s):
        return 3

    assert body.num_api_spec_tokens == 8 and body.run(backend=Echo()).ret_value == 3
    with pytest.raises(AssertionError, match="must be named s"):
        function(lambda state: None)


class Echo(BaseBackend):
    """Records every method that the session calls."""

    precache_in_batch = False

    def __init__(self):
        self.told = []

    def generate(self, s, sampling_params):
        self.told.append("generate")
        return " ok", {"prompt_tokens": 1}

    def begin_program(self, s):
        self.told.append("begin_program")

    def end_program(self, s):
        self.told.append("end_program")

    def commit_lazy_operations(self, s):
        self.told.append(f"commit_lazy_operations:{s.text_}")

    def fork_program(self, src, dst, position_ids_offset=None):
        self.told.append(f"fork_program:{len(dst)}")

    def cache_prefix(self, prefix_str):
        self.told.append(f"cache_prefix:{prefix_str}")


def test_a_backend_has_sglangs_methods():
    for name in [
        "get_model_name",
        "get_chat_template",
        "cache_prefix",
        "uncache_prefix",
        "end_request",
        "begin_program",
        "end_program",
        "commit_lazy_operations",
        "fork_program",
        "fill_image",
        "generate",
        "generate_stream",
        "select",
        "concatenate_and_append",
        "shutdown",
        "flush_cache",
        "get_server_info",
    ]:
        assert callable(getattr(BaseBackend, name))
    assert BaseBackend.support_concate_and_append is False


def test_a_fork_of_several_commits_the_text_before_it_and_a_fork_of_one_does_not():
    backend = Echo()

    @function
    def body(s, size):
        s += "a prompt"
        s.fork(size).join()

    body.run(2, backend=backend, use_thread=False)
    assert backend.told[:4] == ["begin_program", "begin_program", "begin_program", "commit_lazy_operations:a prompt"]
    assert "fork_program:2" in backend.told and backend.told.count("end_program") == 3
    one = Echo()
    body.run(1, backend=one, use_thread=False)
    assert not any(told.startswith("commit") for told in one.told)


def test_a_fork_before_any_text_works():
    @function
    def body(s):
        forks = s.fork(2)
        forks += "x" + gen("a")
        forks.join()

    assert body.run(backend=Echo())["a"] == [" ok", " ok"]


def test_flush_cache_and_server_info_without_a_backend_are_false_and_none(monkeypatch):
    monkeypatch.setattr(phloem.global_config, "default_backend", None)
    assert phloem.flush_cache() is False and phloem.get_server_info() is None
    with pytest.raises(errors.InvalidRequest, match="set_default_backend"):
        function(lambda s: None).run()


def test_flush_cache_and_server_info_ask_the_backend_or_what_holds_one():
    class Holder:
        def __init__(self, backend):
            self.endpoint = backend

    class Told(Echo):
        def flush_cache(self):
            return True

        def get_server_info(self):
            return {"model": "x"}

    assert phloem.flush_cache(Told()) and phloem.flush_cache(Holder(Told()))
    assert phloem.get_server_info(Holder(Told())) == {"model": "x"}


def test_the_global_config_has_sglangs_settings_and_refuses_those_that_nothing_reads():
    for name in [
        "verbosity",
        "default_backend",
        "skip_special_tokens_in_output",
        "enable_precache_with_tracing",
        "enable_parallel_encoding",
    ]:
        assert hasattr(phloem.global_config, name)
    with pytest.raises(errors.InvalidRequest, match=r"global_config.spaces_between_special_tokens_in_out = False"):
        phloem.global_config.spaces_between_special_tokens_in_out = False
    with pytest.raises(errors.InvalidRequest, match=r"global_config.verbose = 2: there is no such setting"):
        phloem.global_config.verbose = 2


def test_special_tokens_stay_in_the_output_where_the_global_config_says_so(connect, monkeypatch):
    @function
    def body(s):
        s += gen("a") + gen("b")

    sent = []
    for skip in (True, False):
        monkeypatch.setattr(phloem.global_config, "skip_special_tokens_in_output", skip)
        backend = connect()
        body.run(backend=backend).sync()
        body.run(backend=backend, skip_special_tokens=True).sync()
        gens = [op for submit in backend.client.submits for op in submit.ops if isinstance(op, ops.Gen)]
        sent.append([op.params.skip_special_tokens for op in gens])
    assert sent == [[True] * 4, [False, False, True, True]]


@pytest.mark.parametrize("enabled", [True, False])
def test_parallel_encoding_is_asked_for_where_the_global_config_enables_it(enabled, monkeypatch):
    class Appending(Echo):
        support_concate_and_append = True

        def concatenate_and_append(self, src_rids, dst_rid):
            self.told.append(f"concatenate:{len(src_rids)}")

    @function
    def body(s):
        forks = s.fork(2)
        forks += lambda i: f" {i}"
        forks.join("concate_and_append")

    monkeypatch.setattr(phloem.global_config, "enable_parallel_encoding", enabled)
    backend = Appending()
    state = body.run(backend=backend)
    state.stats()
    assert state.text() == " 0 1"
    assert ("concatenate:2" in backend.told) is enabled


# -- engines ----------------------------------------------------------------------------------------------------------


def test_server_args_are_engine_options():
    args = ServerArgs(model_path="m", context_length=512, random_seed=3, disable_radix_cache=True, dtype="float32")
    expected = EngineConfig(model="m", max_seq_len=512, seed=3, prefix_cache=False, precision="float32")
    assert make_config(args, {}) == expected
    options = {"model_path": "m", "context_length": 512, "random_seed": 3, "disable_radix_cache": True}
    assert make_config(None, {**options, "dtype": "float32", "dp_size": 1}) == expected
    split = {"model_path": "m", "tp_size": 2, "pp_size": 3, "ep_size": 2}
    expected = EngineConfig(model="m", tensor_parallel=2, pipeline_parallel=3, expert_parallel=2)
    assert make_config(None, split) == expected
    split = {"model_path": "m", "tp_size": 2, "nnodes": 2, "node_rank": 1, "dist_init_addr": "10.0.0.1:5000"}
    expected = EngineConfig(model="m", tensor_parallel=2, nnodes=2, node_rank=1, dist_init_addr="10.0.0.1:5000")
    assert make_config(None, split) == expected


def test_wrong_server_args_are_named():
    with pytest.raises(errors.Unsupported, match="dp_size=2: an engine is one replica; .* replicas=2"):
        make_config(None, {"model_path": "m", "dp_size": 2})
    with pytest.raises(errors.Unsupported, match=r"attn_cp_size=2: it divides .*set sequence_parallel=2 and tp_size"):
        make_config(None, {"model_path": "m", "tp_size": 4, "attn_cp_size": 2})
    with pytest.raises(errors.Unsupported, match="dtype='int3'"):
        make_config(None, {"model_path": "m", "dtype": "int3"})
    with pytest.raises(errors.InvalidParams, match="unknown option 'mem_fraction_static'"):
        make_config(None, {"model_path": "m", "mem_fraction_static": 0.8})
    with pytest.raises(errors.InvalidParams, match="model and model_path are the same"):
        make_config("m", {"model_path": "m"})
    with pytest.raises(errors.InvalidParams, match="no model was given"):
        make_config(None, {})


@pytest.fixture
def engine():
    with Engine.over(StringEngine(reply=lambda prompt, op: [" one two three"] * op.n)) as engine:
        yield engine


def test_an_engine_generates_as_sglangs_does(engine):
    out = engine.generate("say", {"max_new_tokens": 2, "temperature": 0, "stop": " two"})
    assert out["text"] == out.text == " one" and out["meta_info"]["finish_reason"]["type"] == "stop"
    assert isinstance(out["output_ids"], list)
    assert [o["text"] for o in engine.generate(["a", "b"], {"max_new_tokens": 8})] == [" one two three"] * 2
    assert len(engine.generate("a", {"n": 2}).texts) == 2
    with pytest.raises(KeyError, match="there are 'text'"):
        out["texts"]
    with pytest.raises(errors.InvalidParams, match="unknown sampling parameter 'max_tokns'"):
        engine.generate("a", {"max_tokns": 2})
    with pytest.raises(errors.InvalidParams, match="sampling_params is a SamplingParams, not a dict"):
        engine.generate("a", SamplingParams(temperature=0.0))


def test_an_engine_generates_in_an_event_loop(engine):
    async def main():
        whole = await engine.async_generate("say", {"max_new_tokens": 8})
        stream = await engine.async_generate("say", {"max_new_tokens": 8}, stream=True)
        return whole["text"], [text async for text in stream]

    assert asyncio.run(main()) == (" one two three", [" one", " two", " three"])


def test_a_runtime_streams_from_async_generate(engine):
    async def main():
        return [text async for text in phloem.Runtime.async_generate(engine, "say", {"max_new_tokens": 8})]

    assert asyncio.run(main()) == [" one", " two", " three"]


def test_a_runtime_has_sglangs_methods(engine):
    for name in [
        "generate",
        "async_generate",
        "encode",
        "cache_prefix",
        "get_tokenizer",
        "start_profile",
        "stop_profile",
        "shutdown",
        "endpoint",
    ]:
        assert hasattr(phloem.Runtime, name) and hasattr(Engine, name)
    engine.cache_prefix("a long beginning")
    assert isinstance(engine, Connection) and engine.endpoint.get_model_name() == "string"
    for call in (lambda: engine.encode("x"), engine.start_profile, engine.stop_profile):
        with pytest.raises(errors.Unsupported):
            call()


# -- the backends of others, through stand-ins for their packages ------------------------------------------------------


class Fake(types.SimpleNamespace):
    """A module or client that records calls."""


@function
def talk(s):
    s += system("brief") + user("hi") + assistant(gen("a", max_tokens=8, temperature=0.5, stop="."))


def usage(**counts):
    return types.SimpleNamespace(**counts)


def test_anthropic_sends_turns_and_the_system_apart(monkeypatch):
    calls = []

    def create(**request):
        calls.append(request)
        text = types.SimpleNamespace(type="text", text="hello")
        return Fake(content=[text], stop_reason="end_turn", usage=usage(input_tokens=4, output_tokens=2))

    module = Fake(Anthropic=lambda **kwargs: Fake(messages=Fake(create=create)))
    monkeypatch.setitem(sys.modules, "anthropic", module)
    backend = phloem.Anthropic("claude-x")
    s = talk.run(backend=backend)
    assert s["a"] == "hello" and backend.token_usage.completion_tokens == 2
    (request,) = calls
    assert request["system"] == "brief" and request["messages"] == [{"role": "user", "content": "hi"}]
    assert (request["model"], request["max_tokens"], request["stop_sequences"]) == ("claude-x", 8, ["."])
    with pytest.raises(errors.InvalidRequest, match="regex='x': the Anthropic API has no such parameter"):
        function(lambda s: s.__iadd__(user("q") + assistant(gen("a", regex="x")))).run(backend=backend)["a"]


class FakeLiteLLM:
    """The ``litellm`` package as far as a backend uses it; ``calls`` are the requests."""

    def __init__(self):
        self.calls = []

    def completion(self, **request):
        self.calls.append(request)
        counts = usage(prompt_tokens=4, completion_tokens=2)
        if request.get("stream"):
            pieces = [Fake(choices=[Fake(delta=Fake(content=text), finish_reason=None)]) for text in ("hel", "lo")]
            end = Fake(choices=[Fake(delta=Fake(content=None), finish_reason="stop")])
            return iter([*pieces, end, Fake(choices=[], usage=counts)])
        choice = Fake(message=Fake(content="hello"), finish_reason="stop")
        return Fake(choices=[choice] * request.get("n", 1), usage=counts)

    async def acompletion(self, **request):
        return self.completion(**request)


@pytest.fixture
def litellm(monkeypatch):
    package = FakeLiteLLM()
    monkeypatch.setitem(sys.modules, "litellm", package)
    monkeypatch.delattr("phloem.lang.backend.chat_api.OpenAIFormat.generate_stream_async")  # the fake streams no events
    return package


def test_litellm_sends_turns(litellm):
    backend = phloem.LiteLLM("provider/model", api_base="http://x")
    assert talk.run(backend=backend)["a"] == "hello"
    (request,) = litellm.calls
    assert request["model"] == "provider/model" and request["api_base"] == "http://x"
    assert request["messages"][-1] == {"role": "user", "content": "hi"}
    assert "n" not in request and "top_p" not in request  # a provider may refuse them, even at their defaults
    assert backend.token_usage.prompt_tokens == 4


def test_vertexai_goes_through_litellm(litellm):
    settings = [{"category": "c", "threshold": "t"}]
    backend = phloem.VertexAI("gemini-x", settings, project="p")
    s = talk.run(backend=backend)
    assert s["a"] == "hello" and backend.get_model_name() == "vertex_ai/gemini-x"
    (request,) = litellm.calls
    assert request["messages"] == [{"role": "system", "content": "brief"}, {"role": "user", "content": "hi"}]
    assert (request["max_tokens"], request["stop"]) == (8, ["."])
    assert (request["vertex_project"], request["safety_settings"]) == ("p", settings)
    assert s.get_meta_info("a")["finish_reason"] == {"type": "stop"} and backend.token_usage.completion_tokens == 2
    streamed = talk.run(backend=backend, stream=True)
    assert list(filter(None, streamed.text_iter("a"))) == ["hel", "lo"]
    assert streamed.get_meta_info("a")["completion_tokens"] == 2
    assert function(lambda s: s.__iadd__("once" + gen("a"))).run(backend=backend)["a"] == "hello"
    assert litellm.calls[-1]["messages"] == [{"role": "user", "content": "once"}]


def test_crusoe_goes_through_litellm(litellm):
    with pytest.raises(errors.InvalidRequest, match="Crusoe needs its key"):
        phloem.Crusoe("org/model")
    backend = phloem.Crusoe("org/model", "secret")
    assert talk.run(backend=backend)["a"] == "hello"
    (request,) = litellm.calls
    assert request["api_base"] == "https://managed-inference-api-proxy.crusoecloud.com/v1/"
    assert (request["model"], request["api_key"]) == ("openai/org/model", "secret")


@pytest.mark.parametrize(
    ("name", "package"), [("Anthropic", "anthropic"), ("LiteLLM", "litellm"), ("VertexAI", "litellm")]
)
def test_a_missing_package_says_what_to_install(monkeypatch, name, package):
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(errors.Unsupported, match=rf"the {name} backend .* pip install 'phloem\[{package}\]'"):
        getattr(phloem, name)("model")


def test_select_needs_a_backend_that_can_score():
    with pytest.raises(errors.Unsupported, match=r"Echo has no select\(\)"):
        function(lambda s: s.__iadd__("x" + select("c", ["a", "b"]))).run(backend=Echo())["c"]
