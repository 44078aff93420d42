"""Invalid, large and slow grammars sent to a real engine process over HTTP and ZeroMQ: other requests run normally."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import httpx
import pytest
from phloem.protocol import errors
from phloem.protocol import messages as m
from phloem.protocol import ops as o
from phloem.protocol.client import Client
from phloem.protocol.ops import GrammarSpec
from phloem.protocol.program_call import OpFailed, ProgramEvent, SubmitRefused
from phloem.protocol.sampling import SamplingParams
from phloem.runtime.config import EngineConfig
from phloem.runtime.process import EngineProcess
from phloem.runtime.server.app import create_app
from phloem.runtime.tokenizer import load_tokenizer
from phloem.tests.runtime.server.doubles import live_server
from phloem.tests.runtime.wire import Heard, begin

BAD = [  # kind, grammar, what the error says
    ("json_schema", '{"properties": {"a/b": {"type": "nope"}}}', "#/properties/a~1b"),
    ("json_schema", '{"items": {"minItems": "two"}}', "#/items"),
    ("json_schema", '{"items":' * 10_000 + "{}" + "}" * 10_000, "nests too deep"),
    ("json_schema", '{"items":' * 250 + "{}" + "}" * 250, "nests deeper than 200"),
    ("json_schema", '{"a": ' * 160_000, "nests too deep"),
    ("json_schema", '{"$ref": "#"}', "refers to itself without end"),
    ("json_schema", '{"$ref": "http://127.0.0.1:1/x"}', "leads outside the schema"),
    (
        "json_schema",
        '{"type": "string", "pattern": "^(a|b)*a(a|b){18}$", "allOf": [{"pattern": "^(a|b)*b(a|b){18}$"}]}',
        "more than 10,000 states",
    ),
    ("json_schema", '{"pattern": "(a"}', "#/pattern"),
    ("json_schema", "[1", "JSON"),
    ("regex", "(" * 10_000 + "a" + ")" * 10_000, "deep"),
    ("regex", "a{1,1000000}", "limit of 100,000"),
    ("regex", "(?<=b)a", "look-behind"),
    ("ebnf", "root ::= " + "(" * 5_000 + '"a"' + ")" * 5_000, "nest deeper"),
    ("ebnf", 'root ::= "a" other', "other"),
    ("lark", "start: nothing", "nothing"),
    ("choices", "[]", "one or more strings"),
]
LARGE = GrammarSpec(  # seconds of compiling, most of them for patterns that its values do not need
    "json_schema",
    json.dumps(
        {
            "enum": [f"value number {i}" for i in range(100)],
            "$defs": {f"d{i}": {"pattern": f"^v{i}[a-z]{{2,9}}(x|yz)+$"} for i in range(6_000)},
        }
    ),
)
ANSWER_S = 60.0


class Served(NamedTuple):
    url: str
    client: Client
    engine: EngineProcess


@pytest.fixture(scope="module")
def served(tiny_model_path: Path) -> Iterator[Served]:
    config = EngineConfig(model=str(tiny_model_path), precision="float32", num_slots=16_384, num_threads=1)
    engine = EngineProcess(config)
    try:
        with Client(engine.url, engine_alive=engine.death) as client:
            app = create_app(client, load_tokenizer(tiny_model_path), None, model_name="tiny")
            with live_server(app) as url:
                yield Served(url, client, engine)
    finally:
        engine.stop()


def ask(
    served: Served, name: str, grammar: GrammarSpec | None, heard: Heard | None = None, *, max_tokens: int = 150
) -> Heard:
    heard = Heard() if heard is None else heard
    params = SamplingParams(temperature=1.0, seed=4, max_tokens=max_tokens, ignore_eos=True)
    gen = o.Gen(op=1, seq=0, params=params, grammar=grammar, stream=True)
    begin(served.client, m.Submit(name, [o.Text(op=0, seq=0, text="tell "), gen, o.Close(op=2, seq=0)]), heard)
    return heard


def end_of(heard: Heard) -> m.Done | OpFailed:
    said = heard.until(m.Closed, within_s=ANSWER_S)
    return next(x for x in said if isinstance(x, m.Done | OpFailed) and x.op == 1)


def honest(served: Served, turn: str) -> list[Heard]:
    grammars = [
        None,
        GrammarSpec("regex", "[a-z]{1,140}( [0-9]{3}){2}"),
        GrammarSpec("json_schema", '{"type": "array"}'),
    ]
    return [ask(served, f"{turn} {i}", grammar) for i, grammar in enumerate(grammars)]


def test_each_is_refused_by_name_and_nobody_else_notices(served):
    alone = [end_of(heard).value for heard in honest(served, "alone")]
    crowd = honest(served, "crowd")
    refused = [ask(served, f"bad {i}", GrammarSpec(kind, text)) for i, (kind, text, _) in enumerate(BAD)]
    for heard, (kind, text, says) in zip(refused, BAD, strict=True):
        end = end_of(heard)
        assert isinstance(end, OpFailed), (kind, text[:60])
        assert isinstance(end.error, errors.InvalidGrammar) and says in end.error.message, (text[:60], end.error)
        assert len(end.error.message) < 2_000
    assert [end_of(heard).value for heard in crowd] == alone
    assert served.engine.death() is None


def test_over_http_each_is_a_400_with_its_reason(served):
    fields = {"regex": "regex", "json_schema": "json_schema", "ebnf": "ebnf"}
    for kind, text, says in BAD:
        if kind not in fields:
            continue
        body = {"prompt": "a", "max_tokens": 5, fields[kind]: text}
        response = httpx.post(f"{served.url}/v1/completions", json=body, timeout=ANSWER_S)
        assert response.status_code == 400, (text[:60], response.text[:300])
        error = response.json()["error"]
        assert error["code"] == "invalid_grammar" and says in error["message"], (text[:60], error)
    deep = '{"prompt": "a", "json_schema": ' + '{"items":' * 10_000 + "{}" + "}" * 10_000 + "}"
    headers = {"content-type": "application/json"}
    response = httpx.post(f"{served.url}/v1/completions", content=deep, headers=headers, timeout=ANSWER_S)
    assert response.status_code == 400, response.text[:300]
    fine = httpx.post(f"{served.url}/v1/completions", json={"prompt": "a", "regex": "[0-9]{4}"}, timeout=ANSWER_S)
    assert len(fine.json()["choices"][0]["text"]) == 4


def test_while_a_large_grammar_is_compiled_others_are_written_and_small_ones_compiled(served):
    told: list[tuple[str, type]] = []

    def noting(name: str) -> Heard:
        class Noting(Heard):
            def __call__(self, event: ProgramEvent) -> None:
                told.append((name, type(event)))
                super().__call__(event)

        return Noting()

    running = ask(served, "running", None, noting("running"), max_tokens=1_900)
    running.until(m.Delta, within_s=ANSWER_S)
    large = ask(served, "large", LARGE, noting("large"))
    small = ask(served, "small", GrammarSpec("regex", "[0-9]{5}[x-z]"), noting("small"))
    assert end_of(large).value[0].startswith('"value number ')
    assert isinstance(end_of(small), m.Done)
    served.client.cancel("running")
    running.until(m.Closed, within_s=ANSWER_S)
    first_of_large = told.index(("large", m.Delta))
    assert told.index(("small", m.Closed)) < first_of_large
    assert told[told.index(("large", m.Accepted)) : first_of_large].count(("running", m.Delta)) > 1


def test_what_is_too_large_to_be_looked_at_is_refused_with_the_limit(served):
    heard = ask(served, "huge", GrammarSpec("json_schema", " " * (1 << 20) + "{}"))
    event = heard.until(SubmitRefused)[-1]
    assert isinstance(event.error, errors.LimitExceeded) and "1,048,576" in event.error.message
