import json
import random
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from phloem.constrained import Compiler, GrammarSpec, Matcher, Vocabulary, compile, fill_masks

from .conftest import encode, is_set, mismatches, takes

SCHEMA = json.dumps(
    {
        "type": "object",
        "properties": {
            "name": {"type": "string", "maxLength": 5},
            "age": {"type": "integer", "minimum": 3, "maximum": 120},
            "children": {"type": "array", "items": {"$ref": "#"}},
        },
        "required": ["name"],
        "additionalProperties": False,
    }
)


@pytest.mark.parametrize(
    ("text", "valid"),
    [
        ('{"name": "é"}', True),
        ('{"name":"abcde","age":3}', True),
        ('{"name":"abcdef"}', False),
        ('{"name": "a", "age": 120, "children": [{"name": "b", "children": []}, {"name": ""}]}', True),
        ('{"name": "a", "age": 121}', False),
        ('{"name": "a", "age": 2}', False),
        ('{"age": 3}', False),
        ('{"age": 3, "name": ""}', False),
        ('{"name": "a", "more": 1}', False),
        ('{"name": "a", "name": "a"}', False),
        ("[]", False),
        ('{\n  "name": "a"\n}', True),
    ],
)
def test_schema_takes_exactly_its_values(vocabulary: Vocabulary, text: str, valid: bool) -> None:
    grammar = compile("json_schema", SCHEMA, vocabulary)
    assert takes(grammar, text) == valid
    assert takes(grammar, text, random.Random(1)) == valid


def test_any_order_takes_properties_in_any_order(vocabulary: Vocabulary) -> None:
    text = '{"age": 3, "name": ""}'
    assert takes(compile("json_schema", SCHEMA, vocabulary, property_order="any"), text)


def test_compact_takes_no_white_space(vocabulary: Vocabulary) -> None:
    grammar = compile("json_schema", SCHEMA, vocabulary, whitespace="compact")
    assert takes(grammar, '{"name":"a","age":3}')
    assert not takes(grammar, '{"name": "a"}')


def test_white_space_is_bounded(vocabulary: Vocabulary) -> None:
    grammar = compile("json", "", vocabulary, whitespace="flexible")
    assert takes(grammar, "[\n" + " " * 40 + "1]")
    assert not takes(grammar, "[\n" + " " * 41 + "1]")
    assert not takes(grammar, "[   1]")


@pytest.mark.parametrize("value", [0, -1, 1.5, 1e300, "", 'a"b\\c\n\u001f/é😀', None, True, [], {}, [[{"": [1, "x"]}]]])
def test_json_takes_any_json(vocabulary: Vocabulary, value: object) -> None:
    grammar = compile("json", "", vocabulary)
    for text in (json.dumps(value), json.dumps(value, ensure_ascii=False), json.dumps(value, indent=2)):
        assert takes(grammar, text)


@pytest.mark.parametrize(
    "text", ["", "01", "+1", ".5", "1.", "nul", '"\n"', '"\\x"', "[1,]", "{1:2}", '{"a"}', "[] []", '"\\ud800"']
)
def test_json_takes_nothing_else(vocabulary: Vocabulary, text: str) -> None:
    assert not takes(compile("json", "", vocabulary), text)


def test_random_walks_through_a_schema_are_valid(vocabulary: Vocabulary) -> None:
    jsonschema = pytest.importorskip("jsonschema")
    validator = jsonschema.Draft202012Validator(json.loads(SCHEMA))
    grammar = compile("json_schema", SCHEMA, vocabulary)
    assert mismatches(grammar, lambda text: validator.is_valid(json.loads(text)), walks=30) == []


def test_end_token_is_allowed_exactly_where_the_text_may_end(vocabulary: Vocabulary) -> None:
    matcher = compile("regex", "a(-a)*", vocabulary).matcher()
    row = np.zeros(vocabulary.num_words, np.uint32)
    for text, may_end in [("a", True), ("-", False), ("a", True)]:
        assert matcher.accept(encode(vocabulary, text)[0])
        matcher.fill_mask(row)
        assert is_set(row, vocabulary.eos) == matcher.is_accepting() == may_end
    assert matcher.accept(vocabulary.eos) and matcher.is_finished()


def test_a_token_may_lead_from_where_the_text_may_end_to_where_it_may_not(vocabulary: Vocabulary) -> None:
    matcher = compile("regex", "a(-a)*", vocabulary).matcher()
    assert matcher.accept(vocabulary.tokens.index(b"a-"))
    assert not matcher.is_accepting()


def test_an_error_is_final_and_names_its_position(vocabulary: Vocabulary) -> None:
    matcher = compile("choices", '["yes", "no"]', vocabulary).matcher()
    y, n = encode(vocabulary, "y")[0], encode(vocabulary, "n")[0]
    assert matcher.accept(y)
    assert not matcher.accept(n)
    assert matcher.error == f"token {n} (b'n') refused at position 1: the grammar does not allow it"
    assert not matcher.accept(encode(vocabulary, "e")[0])
    matcher.rollback(1)
    assert matcher.error is None and matcher.accept(n)


def test_rollback_returns_to_the_same_mask(vocabulary: Vocabulary) -> None:
    matcher = compile("json", "", vocabulary).matcher()
    masks = []
    for token in encode(vocabulary, '{"a": [1, "name", {}], "b": null}'):
        masks.append(matcher.mask().copy())
        assert matcher.accept(token)
    assert matcher.accept(vocabulary.eos)
    for mask in reversed(masks[3:]):
        matcher.rollback(2 if matcher.is_finished() else 1)
        assert (matcher.mask() == mask).all()
    with pytest.raises(ValueError, match="cannot roll back 99 tokens: 3 were accepted"):
        matcher.rollback(99)


def test_clones_are_independent(vocabulary: Vocabulary) -> None:
    one = compile("choices", '["aa", "ab"]', vocabulary).matcher()
    assert one.accept(ord("a"))
    other = one.clone()
    assert one.accept(ord("a")) and other.accept(ord("b"))
    assert one.is_accepting() and other.is_accepting()
    assert not other.accept(ord("b")) and one.error is None


def test_special_tokens_are_never_allowed(vocabulary: Vocabulary) -> None:
    matcher = compile("json", "", vocabulary).matcher()
    brace = len(vocabulary) - 1  # special, though its bytes are "{"
    assert not is_set(matcher.mask(), brace)
    assert not matcher.accept(brace)


def test_forced_tokens_are_the_only_ones_allowed(vocabulary: Vocabulary) -> None:
    grammar = compile("choices", '["q!q", "q!r"]', vocabulary)
    matcher = grammar.matcher()
    assert matcher.forced_tokens() == [ord("q"), ord("!")]
    assert grammar.matcher().forced_tokens() == [ord("q"), ord("!")]  # asking changes nothing


def test_forced_tokens_stop_where_the_text_could_end(vocabulary: Vocabulary) -> None:
    matcher = compile("regex", "q(!)?", vocabulary).matcher()
    assert matcher.forced_tokens() == [ord("q")]


def test_fill_mask_writes_int32_rows_too(vocabulary: Vocabulary) -> None:
    matcher: Matcher = compile("json", "", vocabulary).matcher()
    row = np.zeros(vocabulary.num_words, np.int32)
    matcher.fill_mask(row)
    assert (row.view(np.uint32) == matcher.mask()).all()


def test_many_rows_are_filled_at_once(vocabulary: Vocabulary) -> None:
    matchers = [compile("choices", '["aa", "ab"]', vocabulary).matcher(), compile("json", "", vocabulary).matcher()]
    rows = np.zeros((2, vocabulary.num_words), np.int32)
    fill_masks(matchers, rows)
    for matcher, row in zip(matchers, rows, strict=True):
        assert (row.view(np.uint32) == matcher.mask()).all()


def test_no_token_is_forced_where_two_could_follow(vocabulary: Vocabulary) -> None:
    """Where two tokens could go on, even in forced text, none is forced: what the model prefers stays possible."""
    rng = random.Random(9)
    for kind, text in (
        ("json_schema", SCHEMA),
        ("choices", '["return acc!", "return acc?"]'),
        ("regex", "the (name|age)"),
    ):
        for _ in range(10):
            matcher = compile(kind, text, vocabulary).matcher()
            for _ in range(12):
                forced = matcher.forced_tokens()
                for token in forced:
                    bits = np.unpackbits(matcher.mask().view(np.uint8), bitorder="little")
                    assert bits.sum() == 1 and bits[token]
                    assert matcher.accept(token)
                allowed = np.flatnonzero(np.unpackbits(matcher.mask().view(np.uint8), bitorder="little")).tolist()
                assert len(allowed) != 1 or allowed == [vocabulary.eos]
                if not matcher.accept(rng.choice(allowed)) or matcher.is_finished():
                    break


def test_a_limit_that_a_text_passes_is_an_error_of_its_matcher(vocabulary: Vocabulary) -> None:
    compiler = Compiler(Vocabulary(vocabulary.tokens, vocabulary.special, vocabulary.eos), max_states=60)
    grammar = compiler.compile(GrammarSpec("ebnf", 'root ::= "" | "(" root ")" | "[" root "]" | "<" root ">" root'))
    matcher = grammar.matcher()
    rng = random.Random(0)
    for _ in range(300):
        if not matcher.accept(ord(rng.choice("([<"))) or matcher.mask() is None or matcher.error:
            break
    assert matcher.error is not None and "more than 240 automaton states" in matcher.error
    assert is_set(matcher.mask(), vocabulary.eos) and matcher.mask().astype(bool).sum() == 1


@pytest.mark.parametrize("max_tokens", [None, 400])
@pytest.mark.parametrize(
    ("kind", "text"),
    [("json_schema", SCHEMA), ("regex", "(ab|cd){3,9}[0-9]+"), ("ebnf", 'root ::= "(" root ")" | "x"')],
)
def test_what_is_prepared_on_another_thread_is_then_taken_without_the_machines_lock(
    vocabulary, kind, text, max_tokens
) -> None:
    grammar = Compiler(vocabulary).compile(GrammarSpec(kind, text))
    matcher = grammar.matcher(max_tokens=max_tokens)
    rng = random.Random(1)
    num_new = 0
    with ThreadPoolExecutor(1) as other:
        for _ in range(25):
            allowed = np.flatnonzero(np.unpackbits(matcher.mask().view(np.uint8), bitorder="little"))
            token = int(rng.choice(allowed))
            if token == vocabulary.eos:
                break
            num_new += not matcher.knows((token,))
            matcher.clone().prepare((token,))
            assert matcher.knows((token,))
            with grammar.machine.lock:
                taken = other.submit(
                    lambda token=token: (matcher.accept(token), matcher.forced_tokens(), matcher.mask())
                )
                is_accepted, forced, mask = taken.result(timeout=60)
            assert is_accepted and mask.any()
            for token in forced:
                assert matcher.accept(token)
    assert num_new > 0


def test_a_mask_or_token_that_takes_too_much_work_fails_at_once_when_asked_again(vocabulary, monkeypatch) -> None:
    grammar = Compiler(vocabulary).compile(GrammarSpec("regex", "[a-z]{1,4}(ab|ba){2,30}"))
    matcher = grammar.matcher()
    assert matcher.accept(encode(vocabulary, "q")[0])
    monkeypatch.setattr("phloem.constrained.machine.masks.MASK_WORK", -1)
    twin, again = matcher.clone(), matcher.clone()
    assert twin.mask() is not None and "takes more than" in twin.error
    spent = grammar.machine.fuel.spent
    with ThreadPoolExecutor(1) as other, grammar.machine.lock:
        other.submit(again.mask).result(timeout=60)
    assert again.error == twin.error and grammar.machine.fuel.spent == spent
