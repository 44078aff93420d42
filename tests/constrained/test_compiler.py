import gc
import json
import threading
from typing import Any

import pytest
from phloem.constrained import Compiler, GrammarError, GrammarSpec, Vocabulary, compile
from phloem.constrained.machine import Machine

from .conftest import takes

SCHEMA = '{"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"]}'


def test_same_grammar_is_compiled_once(vocabulary: Vocabulary) -> None:
    assert compile("regex", "[0-9]+", vocabulary) is compile("regex", "[0-9]+", vocabulary)


@pytest.mark.parametrize(
    ("kind", "text", "message"),
    [
        ("regex", "(a", "'\\(' is never closed"),
        ("regex", "a(?<=b)", "look-behind '\\(\\?<=' is not supported"),
        ("regex", "(a)\\1", "back-reference"),
        ("regex", "a{2,1}", "bounds the wrong way round"),
        ("json_schema", "{", "the schema is not JSON"),
        ("json_schema", "3", "a schema must be an object, true or false, not 3"),
        ("json_schema", '{"type": "strin"}', 'unknown type "strin"; there are .* \\(at #/type\\)'),
        ("json_schema", '{"properties": {"a": {"minLength": -1}}}', "not -1 \\(at #/properties/a/minLength\\)"),
        ("json_schema", '{"$ref": "#/nowhere"}', "there is nothing at #/nowhere"),
        ("json_schema", '{"$ref": "http://else.where/"}', "leads outside the schema"),
        ("json_schema", '{"type": "string", "enum": [1]}', "no value satisfies the schema"),
        ("json_schema", '{"properties": {"a": {"$ref": "#"}}, "required": ["a"], "type": "object"}', "no value"),
        ("choices", "[]", "choices must be a list of one or more strings"),
        ("json_schema", '{"dependentRequired": {"a": "b"}}', 'not "b" \\(at #/dependentRequired/a\\)'),
        ("json_schema", '{"$anchor": 5}', "anchor must be a string, not 5"),
        ("json_schema", '{"minItems": 1e99999999}', "the number 1e99999999 is out of range"),
        ("json_schema", '{"enum": [1e-99999999]}', "the number 1e-99999999 is out of range"),
        ("structural_tags", '{"tags": [{"begin": "<", "schema": {"type": "x"}, "end": ">"}]}', "at #/tags/0/schema/t"),
        ("lark", 'begin: "a"', "there is no rule 'start'"),
        ("lark", "start: A\nA: /[/", "character 1: the pattern ends too early \\(at A\\)"),
        ("lark", "%declare X\nstart: X", "terminal X is declared but not defined"),
        ("ebnf", 'root ::= root "a"', "no text matches rule 'root'"),
        ("nonsense", "", "unknown grammar kind 'nonsense'"),
    ],
)  # fmt: skip
def test_a_bad_grammar_is_refused_by_name(vocabulary: Vocabulary, kind: str, text: str, message: str) -> None:
    for _ in range(2):  # from the compiler, then from its cache
        with pytest.raises(GrammarError, match=message):
            compile(kind, text, vocabulary)


def test_threads_share_a_vocabulary(vocabulary: Vocabulary) -> None:
    wrong: list[str] = []

    def work(n: int) -> None:
        schema = json.dumps({"type": "object", "properties": {f"k{n % 3}": {"type": "integer", "minimum": n}}})
        for _ in range(5):
            grammar = compile("json_schema", schema, vocabulary, property_order="any")
            if not takes(grammar, f'{{"k{n % 3}": {n}}}') or takes(grammar, f'{{"k{n % 3}": {n - 1}}}'):
                wrong.append(schema)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(1, 7)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_new_grammars_leave_a_full_machine_for_a_fresh_one(vocabulary: Vocabulary) -> None:
    compiler = Compiler(Vocabulary(vocabulary.tokens, vocabulary.special, vocabulary.eos), max_states=100)
    first = compiler.compile(GrammarSpec("json_schema", SCHEMA))
    for i in range(60):
        compiler.compile(GrammarSpec("choices", json.dumps([f"choice {i} of many", f"another {i}"])))
    again = compiler.compile(GrammarSpec("json_schema", SCHEMA))
    assert again.machine is not first.machine
    assert takes(first, '{"name": "a"}') and takes(again, '{"name": "a"}')


def test_no_grammar_waits_for_a_machine(vocabulary: Vocabulary) -> None:
    compiler = Compiler(vocabulary)
    unique = json.dumps({"type": "array", "items": {"enum": ["a", "b"]}, "uniqueItems": True})
    before = [each for each in gc.get_objects() if type(each) is Machine]
    plain, reads = (compiler.compile(GrammarSpec("json_schema", text)) for text in (SCHEMA, unique))
    assert plain.machine is not reads.machine
    assert {plain.machine, reads.machine} <= set(before)


def test_a_grammar_that_cannot_be_compiled_keeps_no_machine(vocabulary: Vocabulary) -> None:
    def machines() -> list[Machine]:
        gc.collect()
        return [each for each in gc.get_objects() if type(each) is Machine]

    compiler = Compiler(vocabulary)
    before = machines()  # held, so that none of them can be freed meanwhile
    errors = []
    for i in range(3):
        with pytest.raises(GrammarError) as caught:
            compiler.compile(GrammarSpec("regex", "a" * 20_000 + f"({i}"))
        errors.append(caught.value)
    assert len(machines()) == len(before) and len(errors) == 3


@pytest.mark.parametrize(
    ("schema", "reads"),
    [
        ({"minProperties": 1, "maxProperties": 3}, False),
        ({"minProperties": 2}, True),
        ({"minProperties": 10}, True),
        ({"oneOf": [{"type": "object"}, {"type": "null"}], "maxProperties": 3}, False),
        ({"not": {"maxProperties": 3}}, True),
        ({"if": {"$ref": "#/$defs/few"}, "then": {}, "$defs": {"few": {"maxProperties": 3}}}, True),
        ({"additionalProperties": {"type": "string"}, "oneOf": [{"additionalProperties": False}, {}]}, False),
        ({"not": {"additionalProperties": {"type": "string"}}}, True),
        ({"anyOf": [{"patternProperties": {"^a": {"type": "string"}}}, {}], "unevaluatedProperties": False}, True),
        ({"not": {"patternProperties": {"^a": {"type": "string"}, "^b": {}}}}, True),
    ],
)
def test_grammars_that_compare_names_have_a_machine_of_their_own(
    vocabulary: Vocabulary, schema: dict[str, Any], reads: bool
) -> None:
    assert compile("json_schema", json.dumps(schema), vocabulary).machine.compares_names == reads
