"""Every sampling parameter, grammar and setting of a run, on every backend: the request carries it, or it is refused
by name before anything is sent."""

import json
import sys
from types import SimpleNamespace

import phloem
import pytest
from phloem import assistant, function, gen, user
from phloem.lang.backend.openai import OpenAI
from phloem.lang.backend.runtime_endpoint import HttpBackend
from phloem.protocol import errors, ops
from phloem.protocol.messages import ProgramSettings, Submit
from phloem.protocol.sampling import FIELDS
from phloem.runtime.server.app import create_app
from phloem.tests.lang.fakes import echo
from phloem.tests.runtime.server.doubles import MODEL, ChatML, WordTokenizer, connected, live_server
from phloem.tests.runtime.string_engine import StringEngine

# a value that asks for something, by the parameter's type; where a bound forbids it, by its name
BY_TYPE = {
    "int": 3,
    "float": 0.5,
    "bool": True,
    "tuple[str, ...]": ("END",),
    "tuple[int, ...]": (7,),
    "dict[int, float]": {7: 1.5},
    "int | None": 11,
    "bool | None": True,
    "float | None": 30.0,
    "str": "tenant-a",
}
BY_NAME = {
    "skip_special_tokens": False,
    "finish": "cut",
    "regex": "[a-z]+",
    "json_schema": '{"type":"object"}',
    "ebnf": 'root ::= "a"',
}
ROWS = {field.name: field for field in FIELDS}
SETTINGS = [name for name in ProgramSettings.__struct_fields__ if name not in ("name", *ROWS)]


def value_of(name, kind):
    text = kind if isinstance(kind, str) else getattr(kind, "__name__", str(kind))
    text = str(kind) if "[" in str(kind) else text
    return BY_NAME.get(name, BY_TYPE.get(text))


class Sent(list):
    """The requests that a backend's client was given."""

    def take(self, **request):
        self.append(request)
        meta = SimpleNamespace(prompt_tokens=1, completion_tokens=1, input_tokens=1, output_tokens=1)
        choice = SimpleNamespace(text="a", message=SimpleNamespace(content="a"), finish_reason="stop", logprobs=None)
        return SimpleNamespace(
            choices=[choice] * request.get("n", 1),
            content=[SimpleNamespace(type="text", text="a")],
            usage=meta,
            stop_reason="end_turn",
        )

    async def take_async(self, **request):
        return self.take(**request)


def openai_model(name, monkeypatch, connect, server):
    sent = Sent()
    backend = OpenAI(name, api_key="k")
    for client, take in ((backend.client, sent.take), (backend.async_client, sent.take_async)):
        monkeypatch.setattr(client.chat.completions, "create", take)
        monkeypatch.setattr(client.completions, "create", take)
    return backend, sent


def through_litellm(name, *args, **kwargs):
    def make(monkeypatch, connect, server):
        sent = Sent()
        package = SimpleNamespace(completion=sent.take, acompletion=sent.take_async)
        monkeypatch.setitem(sys.modules, "litellm", package)
        return getattr(phloem, name)(*args, **kwargs), sent

    return make


def anthropic(monkeypatch, connect, server):
    sent = Sent()
    client = SimpleNamespace(messages=SimpleNamespace(create=sent.take))
    monkeypatch.setitem(sys.modules, "anthropic", SimpleNamespace(Anthropic=lambda: client))
    return phloem.Anthropic("claude-x"), sent


def other_server(monkeypatch, connect, server):
    """A ``RuntimeEndpoint`` of a server that has ``/generate`` alone."""
    sent = Sent()

    def call(self, method, path, body=None):
        if path == "/get_model_info":
            return {"model_path": "m"}
        sent.append(body)
        count = body["sampling_params"]["n"]
        answer = {"text": "a", "meta_info": {}}
        return answer if count == 1 else [answer] * count

    monkeypatch.setattr(HttpBackend, "_call", call)
    return HttpBackend("http://m", chat_template_name="default"), sent


def in_process(monkeypatch, connect, server):
    backend = connect(reply=echo)
    return backend, backend.client.submits


@pytest.fixture(scope="module")
def server():
    """A ``RuntimeEndpoint`` of our HTTP server over a string engine, and the submits that arrive at the engine."""
    submits = []

    class Engine(StringEngine):
        def step(self, inbox):
            submits.extend(message for _, message in inbox if isinstance(message, Submit))
            return super().step(inbox)

    with (
        connected(Engine(reply=echo)) as client,
        live_server(create_app(client, WordTokenizer(), ChatML(), model_name=MODEL)) as url,
    ):
        backend = phloem.RuntimeEndpoint(url)
        yield backend, submits
        backend.shutdown()


def over_http(monkeypatch, connect, server):
    server[1].clear()
    return server


BACKENDS = {
    "in process": (in_process, "ours"),
    "RuntimeEndpoint": (over_http, "ours"),
    "other server": (other_server, "native"),
    "OpenAI chat": (lambda *args: openai_model("gpt-x", *args), "chat"),
    "OpenAI completions": (lambda *args: openai_model("davinci-002", *args), "completions"),
    "Anthropic": (anthropic, "anthropic"),
    "LiteLLM": (through_litellm("LiteLLM", "provider/model"), "litellm"),
    "VertexAI": (through_litellm("VertexAI", "gemini-x"), "litellm"),
    "Crusoe": (through_litellm("Crusoe", "org/model", "key"), "litellm"),
}


def ask(backend, api, overrides, settings=None):
    """One generation with ``overrides``, waited for; raises what it raises."""

    @function
    def body(s):
        if api in ("ours", "native", "completions"):
            s += "say" + gen("a", **overrides)
        else:
            s += user("say") + assistant(gen("a", **overrides))

    return body.run(backend=backend, **(settings or {}))["a"]


def carries(field, value, api, request):
    """Whether ``request``, as sent, asks for it."""
    if api == "ours":
        op = next(op for op in request.ops if isinstance(op, ops.Gen))
        if field.part == "grammar":
            return (op.grammar.kind, op.grammar.text) == (field.name, value)
        if field.name == "return_text_in_logprobs":
            return op.params.return_logprob  # ours always have their text
        return getattr(op.params if field.part == "params" else op, field.name) == value
    found = {**request, **request.get("sampling_params", {})}.get(field.in_api(api))
    if field.name == "json_schema" and api != "native":
        return found["json_schema"]["schema"] == json.loads(value)
    if field.in_api(api) == "logprobs":
        return found == 3 if field.name == "top_logprobs_num" else found is not None and found is not False
    return found == (list(value) if isinstance(value, tuple) else value)


@pytest.mark.parametrize("name", ROWS)
@pytest.mark.parametrize("where", BACKENDS)
def test_a_parameter_is_carried_or_refused_by_name(where, name, monkeypatch, connect, server):
    make, api = BACKENDS[where]
    field = ROWS[name]
    value = value_of(name, field.type)
    assert value is not None and value != field.default, f"give {name} an example in BY_TYPE or BY_NAME"
    overrides = {name: value} | ({field.needs: True} if field.needs else {})
    backend, sent = make(monkeypatch, connect, server)
    known = api == "ours" or (field.in_api(api) is not None)
    if known and field.needs and api != "ours":
        known = ROWS[field.needs].in_api(api) is not None
    if known:
        ask(backend, api, overrides)
        (request,) = sent
        assert carries(field, value, api, request)
    else:
        with pytest.raises(errors.InvalidRequest, match=f"^({name}|{field.needs or name})="):
            ask(backend, api, overrides)
        assert not sent


@pytest.mark.parametrize("setting", [*SETTINGS, "speculative"])
@pytest.mark.parametrize("where", BACKENDS)
def test_a_setting_of_a_run_is_carried_or_refused_by_name(where, setting, monkeypatch, connect, server):
    make, api = BACKENDS[where]
    types = ProgramSettings.__annotations__
    value = value_of(setting, types[setting])
    backend, sent = make(monkeypatch, connect, server)
    given = {setting: value}
    if api == "ours":
        ask(backend, api, {}, given)
        gens = [op for op in sent[0].ops if isinstance(op, ops.Gen)]
        holder = gens[0].params if setting in ROWS else sent[0].settings
        assert getattr(holder, setting) == value
    elif setting == "deadline_s":
        ask(backend, api, {}, given)  # ends here, whatever the server does: tests/lang/test_failures.py
        assert len(sent) == 1
    elif api == "native" and setting == "adapter":
        ask(backend, api, {}, given)
        assert sent[0]["lora_path"] == value
    else:
        for run in (lambda: ask(backend, api, {}, given), lambda: batch(backend, api, given)):
            with pytest.raises(errors.InvalidRequest, match=f"^{setting}="):
                run()
        assert not sent


def batch(backend, api, settings):
    @function
    def body(s, x):
        s += user(x) + assistant(gen("a"))

    return [state["a"] for state in body.run_batch([{"x": "say"}], backend=backend, **settings)]


def test_a_parameter_is_given_under_one_name(connect):
    with pytest.raises(errors.InvalidRequest, match="max_new_tokens and max_tokens are one parameter"):
        ask(connect(reply=echo), "ours", {}, {"max_tokens": 2, "max_new_tokens": 3})


def test_anthropics_temperature_is_not_clamped(monkeypatch):
    backend, sent = anthropic(monkeypatch, None, None)
    with pytest.raises(errors.InvalidRequest, match=r"^temperature=1.5: the Anthropic API takes 0 to 1"):
        ask(backend, "anthropic", {"temperature": 1.5})
    assert not sent


@pytest.mark.parametrize("where", BACKENDS)
def test_an_unneeded_logprob_parameter_is_refused(where, monkeypatch, connect, server):
    make, api = BACKENDS[where]
    backend, _ = make(monkeypatch, connect, server)
    with pytest.raises(errors.PhloemError, match="top_logprobs_num=3: "):
        ask(backend, api, {"top_logprobs_num": 3})


@pytest.mark.parametrize("name", ["seed", "sampling_seed"])
def test_a_region_takes_no_seed_under_either_name(name, connect):
    @function
    def body(s):
        with s.sampling(**{name: 3}):
            s += "say" + gen("a")

    with pytest.raises(errors.InvalidRequest, match="a seed belongs to a whole run"):
        body.run(backend=connect(reply=echo))
