import itertools
import json
import random
import re

import pytest
from phloem.constrained import Vocabulary, compile
from phloem.constrained.compiler import Compiler
from phloem.constrained.expressions import NO_TEXT, NOTHING
from phloem.constrained.json.scalars import Scalars
from phloem.constrained.regex_syntax import compile_regex
from phloem.constrained.spec import GrammarSpec

from ..conftest import encode, is_set, takes

jsonschema = pytest.importorskip("jsonschema")


@pytest.mark.parametrize(
    ("text", "valid"),
    [
        ('"\\u00e9"', True),
        ('"\\u00E9\\n\\/"', True),
        ('"\\ud83d\\ude00"', True),
        ('"\\ud83d"', False),
        ('"\\ude00"', False),
        ('"\\x41"', False),
        ('"\t"', False),
        ('"\x7f"', True),
    ],
)
def test_free_text_takes_the_escapes_of_the_standard(vocabulary: Vocabulary, text: str, valid: bool) -> None:
    grammar = compile("json_schema", '{"type": "string"}', vocabulary)
    assert takes(grammar, text, random.Random(2)) == valid


def test_a_listed_text_is_spelled_one_way(vocabulary: Vocabulary) -> None:
    grammar = compile("json_schema", json.dumps({"enum": ['é"\n', "\u0001"]}), vocabulary)
    assert takes(grammar, '"é\\"\\n"') and takes(grammar, '"\\u0001"')
    assert not takes(grammar, '"\\u00e9\\"\\n"') and not takes(grammar, '"é\\"\\u000a"')


@pytest.mark.parametrize(("low", "high"), [(0, 2), (2, 3), (1, None)])
def test_lengths_count_characters_not_bytes_and_an_escape_as_one(
    vocabulary: Vocabulary, low: int, high: int | None
) -> None:
    schema = {"type": "string", "minLength": low} | ({} if high is None else {"maxLength": high})
    grammar = compile("json_schema", json.dumps(schema), vocabulary)
    for length in range(5):
        valid = low <= length and (high is None or length <= high)
        for character in ("a", "é", "\U0001f600", "\\n", "\\u00e9", "\\ud83d\\ude00"):
            assert takes(grammar, f'"{character * length}"') == valid, (character, length)


def test_a_pattern_and_lengths_hold_together(vocabulary: Vocabulary) -> None:
    grammar = compile(
        "json_schema", '{"type": "string", "pattern": "^a+b*$", "minLength": 2, "maxLength": 3}', vocabulary
    )
    texts = ["", "a", "aa", "ab", "aab", "abb", "aabb", "ba"]
    assert [text for text in texts if takes(grammar, f'"{text}"')] == ["aa", "ab", "aab", "abb"]


def test_literals_are_whole(vocabulary: Vocabulary) -> None:
    grammar = compile("json_schema", '{"type": ["null", "boolean"]}', vocabulary)
    assert all(takes(grammar, text) for text in ("null", "true", "false"))
    assert not any(takes(grammar, text) for text in ("nul", "nulll", "True", "1", ""))


COUNTED = [
    ("(a,){0,5}a?", 0, None), ("(a,){0,5}a?", 0, 7), ("([ab],?){1,4}", 2, 5), ("(a|ab){3}", 4, None),
    ("[ab]{0,6}", 3, 5),
    ("(a{1,3},){2,9}", 0, 8), ("(a{4}|b)+", 2, 6), ("(ab){1,9}", 3, 5), ("(a|,b)*b", 7, None), ("(aa|b){0,4},", 1, 6),
    ("((a,){0,3}b){0,3}", 0, 6), ("b[a,]{0,20}", 0, 5), ("[ab]{3,17}", 0, 7), ("(ab|b,)[a,]{2,19}", 3, 6),
]  # fmt: skip


ALTERNATIVES = [
    [("(a,){0,5}a?", 0, 3), ("[ab]*", 0, None)], [("(a,){0,9}", 3, 6), ("(ab?)*", 0, None), ("b*", 0, 4)],
    [("[ab]{2,}", 2, 5), ("a*b", 0, None)], [("(a|b,)*", 1, 7), ("(ab){1,9}", 3, 5)],
    [("a(b,)*", 4, None), (".*", 0, 2)], [("([ab],)*", 0, 4), ("([ab],)*b", 6, None)],
]  # fmt: skip


@pytest.mark.parametrize("parts", [[case] for case in COUNTED] + ALTERNATIVES, ids=str)
def test_masks_of_counted_patterns_equal_their_definition(parts: list[tuple[str, int, int | None]]) -> None:
    """Every token is tried after every beginning of a text, against all texts of Python's ``re``."""
    words = ["a", "b", ",", '"', "aa", "a,", "ab", "a,a,", ',"', 'b"', "aaaa", "abab", "</s>"]
    vocabulary = Vocabulary([word.encode() for word in words], {len(words) - 1}, len(words) - 1)
    schemas = [
        {"type": "string", "pattern": f"^({p})$", "minLength": low} | ({} if high is None else {"maxLength": high})
        for p, low, high in parts
    ]
    grammar = compile("json_schema", json.dumps({"anyOf": schemas}), vocabulary)
    longest = 9
    texts = ["".join(t) for n in range(longest + 1) for t in itertools.product("ab,", repeat=n)]
    valid = {
        f'"{t}"' for t in texts if any(low <= len(t) <= (high or 99) and re.fullmatch(p, t) for p, low, high in parts)
    }
    begins = {text[:at] for text in valid for at in range(len(text) + 1)}
    for text in sorted(t for t in begins if len(t) <= longest - 4):
        matcher = grammar.matcher()
        for character in text:
            assert matcher.accept(words.index(character)), (text, matcher.error)
        row = matcher.mask()
        for token, word in enumerate(words[:-1]):
            assert is_set(row, token) == (text + word in begins), (text, word)
        assert matcher.is_accepting() == (text in valid)


@pytest.mark.parametrize(
    ("pattern", "high"),
    [
        ("[0-9]*[a-z]{60}", 64), ("x?[a-z]{60,100}-[a-z]*", 70), (r"(\S+ ){30,200}\S+", 70),
        ("(a{40}|x|(ab,){20,30}){1,3}", 85),
        ("(([0-9a-f]{2}:){3,12}[0-9a-f]{2},){1,61}", 64), ("((a|ab){10,20}c){3,9}", 60),
        ("(?:[a-m]{3,}[n-z]{2,} ?){12,}", 66),
    ],
)  # fmt: skip
def test_masks_leave_room_for_repeats_that_have_to_follow(vocabulary: Vocabulary, pattern: str, high: int) -> None:
    schema = {"type": "string", "pattern": f"^{pattern}$", "maxLength": high}
    grammar = compile("json_schema", json.dumps(schema), vocabulary)
    rng = random.Random(1)
    matcher = grammar.matcher()
    for _ in range(2 * high):
        row = matcher.mask()
        allowed = [token for token in range(len(vocabulary)) if grammar.machine.advance(matcher.state, token) >= 0]
        assert allowed == [t for t in range(len(vocabulary)) if vocabulary.is_text[t] and is_set(row, t)]
        if not allowed:
            break
        assert matcher.accept(rng.choice(allowed))
    assert matcher.is_accepting()


def test_alternatives_with_bounds_of_their_own_make_no_state_for_each_length(vocabulary: Vocabulary) -> None:
    parts = [(r"^(\S+ )*\S+$", 90), (r"^[^,]+$", 60), (r"^([^,]*,){0,20}$", 70), (r"^a*$", 5)]
    schema = {"anyOf": [{"type": "string", "pattern": p, "maxLength": n} for p, n in parts]}
    grammar = Compiler(vocabulary).compile(GrammarSpec("json_schema", json.dumps(schema)))
    texts = [f"{word * n}{end}" for word in ("a", "a ", "a,", "aa", " ") for n in range(91) for end in ("", "a", ",")]
    for text in texts:
        valid = any(re.search(p, text) and len(text) <= n for p, n in parts)
        assert takes(grammar, f'"{text}"') == valid, text
    matcher = Compiler(vocabulary).compile(GrammarSpec("json_schema", json.dumps(schema))).matcher()
    machine, made = matcher.grammar.machine, []
    for text in ['"the', *[" the"] * 20]:
        before = machine.num_states
        for token in encode(vocabulary, text):
            assert is_set(matcher.mask(), token) and matcher.accept(token)
        made.append(machine.num_states - before)
    assert max(made[3:]) <= 4, made


@pytest.mark.parametrize("limits", [{}, {"maxLength": 120}, {"minLength": 10, "maxLength": 120}])
@pytest.mark.parametrize(
    ("pattern", "words"),
    [(r"^(\S+\s+){0,19}\S+$", " the"), (r"^([^,]+,){0,99}[^,]+$", ", the"), (r"^(\w+\s?){1,30}$", " the")],
)
def test_counting_makes_no_state_for_each_count(
    vocabulary: Vocabulary, pattern: str, words: str, limits: dict[str, int]
) -> None:
    schema = json.dumps({"type": "string", "pattern": pattern, **limits})
    grammar = Compiler(vocabulary).compile(GrammarSpec("json_schema", schema))
    machine, matcher = grammar.machine, grammar.matcher()
    made = []
    for text in ['"the', *[words] * 10]:
        before = machine.num_states, machine.fuel.spent
        for token in encode(vocabulary, text):
            assert is_set(matcher.mask(), token) and matcher.accept(token)
        made.append((machine.num_states - before[0], machine.fuel.spent - before[1]))
    assert all(states <= 12 and fuel < 400 for states, fuel in made[9:]), made


def test_what_is_asked_of_an_item_makes_no_state_for_each_length() -> None:
    vocabulary = Vocabulary([*(bytes([b]) for b in range(256)), b"one-long-token-of-many-words", b""], {257}, 257)

    def states_for_masks(limits: dict[str, int]) -> int:
        wanted = {"type": "string", "pattern": "--", **limits}
        schema = json.dumps({"type": "array", "maxItems": 9, "contains": wanted, "minContains": 2})
        grammar = Compiler(vocabulary).compile(GrammarSpec("json_schema", schema))
        matcher = grammar.matcher()
        before = grammar.machine.num_states
        for token in encode(vocabulary, '["the'):
            assert is_set(matcher.mask(), token) and matcher.accept(token)
        matcher.mask()
        return grammar.machine.num_states - before

    assert states_for_masks({"maxLength": 140}) < states_for_masks({}) + 20


@pytest.mark.parametrize("most", [0, 2_000])
def test_states_of_a_list_that_are_made_at_once_are_those_made_one_by_one(
    vocabulary: Vocabulary, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("phloem.constrained.json.scalars.MAX_LISTED_BYTES", most)
    listed = {"enum": ["a", "aba", "name", "na", "the", "return acc", "", "é", "éa"]}
    schema = {
        "properties": {"kind": listed},
        "patternProperties": {"^n": {"type": "integer"}},
        "propertyNames": {"enum": ["kind", "na", "name", "the"]},
        "if": {"properties": {"kind": {"pattern": "^a"}}, "required": ["kind"]},
        "then": {"required": ["na"]},
    }
    fresh = Vocabulary(vocabulary.tokens, vocabulary.special, vocabulary.eos)
    grammar = compile("json_schema", json.dumps(schema), fresh, property_order="any", whitespace="flexible")
    for kind in ("a", "aba", "name", "", "é", "éa"):
        for rest in ("", ', "na": 3', ', "name": 1', ', "na": "a"', ', "the": "a"', ', "x": 1'):
            needs = kind.startswith("a") and '"na": 3' not in rest
            valid = not needs and rest not in (', "na": "a"', ', "x": 1')
            assert takes(grammar, f'{{"kind": "{kind}"{rest}}}') == valid, (kind, rest)
    assert not takes(grammar, '{"kind": "ab"}') and not takes(grammar, '{"kind": "acc"}')


def test_a_list_for_which_the_machine_has_no_room_left_is_followed_state_by_state(vocabulary: Vocabulary) -> None:
    words = [f"{i:04}" for i in range(300)]
    fresh = Vocabulary(vocabulary.tokens, vocabulary.special, vocabulary.eos)
    compiler = Compiler(fresh, max_states=250)  # 1,000 states at most, of which the trie of the words would take 333
    spec = GrammarSpec("json_schema", json.dumps({"enum": words}), {})
    machine = compiler.compile(spec).machine
    while machine.num_states < 700:
        machine.add_state(None)
    grammar = compiler.compile(GrammarSpec("json_schema", json.dumps({"enum": words}), {"whitespace": "compact"}))
    assert takes(grammar, '"0299"') and not takes(grammar, '"0300"') and machine.num_states < 1_000


def test_lengths_that_are_asked_again_are_counted_beside_the_state(vocabulary: Vocabulary) -> None:
    """Whether a string is in a language that it has to be in anyway needs no states."""
    bounded = {"type": "string", "maxLength": 64}
    schema = {"properties": {"a": bounded}, "if": {"properties": {"a": bounded}}, "then": {"required": ["b"]}}
    fresh = Vocabulary(vocabulary.tokens, vocabulary.special, vocabulary.eos)
    grammar = compile("json_schema", json.dumps(schema), fresh)
    num_states = []
    for size in (1, 60):
        assert takes(grammar, json.dumps({"a": "x" * size, "b": 1}))
        num_states.append(grammar.machine.num_states)
    assert num_states[0] == num_states[1]
    assert not takes(grammar, json.dumps({"a": "x" * 65, "b": 1})) and not takes(grammar, json.dumps({"a": "x"}))


@pytest.mark.parametrize(
    "schema",
    [
        {"if": {"pattern": "b"}, "then": {"maxLength": 1}},
        {"if": {"maxLength": 2}, "then": {"pattern": "a"}, "else": {"not": {"pattern": "ab"}}},
        {"anyOf": [{"not": {"pattern": "bb"}}, {"maxLength": 2}]},
        {"anyOf": [{"not": {"pattern": "b"}}, {"pattern": "^.?$"}]},
        {"anyOf": [{"not": {"pattern": "b"}}, {"maxLength": 1}, {"pattern": "^a", "maxLength": 3}]},
        {"anyOf": [{"not": {"pattern": "b"}, "minLength": 2}, {"pattern": "x", "maxLength": 3}]},
        {"oneOf": [{"not": {"pattern": "b|x"}}, {"maxLength": 2}]},
        {"oneOf": [{"not": {"pattern": "b"}, "maxLength": 3}, {"pattern": "a", "maxLength": 2}]},
    ],
)
def test_texts_outside_a_pattern_beside_a_length_are_judged_as_by_the_reference(
    vocabulary: Vocabulary, schema: dict[str, object]
) -> None:
    """A pattern's complement has no greatest length, and no text of the other alternatives bounds it."""
    grammar = compile("json_schema", json.dumps({"type": "string"} | schema), vocabulary)
    validator = jsonschema.Draft202012Validator(schema)
    for length in range(5):
        for letters in itertools.product("abx", repeat=length):
            text = "".join(letters)
            assert takes(grammar, json.dumps(text)) == validator.is_valid(text), text


@pytest.mark.parametrize("pattern", [r"[^\p{L}]x*", "[é-ʯ]a|[一-龥😀-😏]{2}", "(a|é|ꯍ.){2}", "[^a]*", "[a-z]", "."])
def test_what_follows_some_characters_is_what_follows_each(vocabulary: Vocabulary, pattern: str) -> None:
    grammar = Compiler(vocabulary).compile(GrammarSpec("json_schema", '{"type": "string"}'))
    ex = grammar.machine.expressions
    scalars, rng = Scalars(grammar.machine), random.Random(pattern)
    expr = compile_regex(pattern, ex, anchored=True)

    def after(code: int) -> int:
        to = expr
        for byte in chr(code).encode():
            to = ex.derive(to, byte)
        return to

    for _ in range(60):
        first = rng.choice([rng.randrange(0x400), rng.randrange(0xD000), rng.randrange(0xE000, 0x10F000)])
        last = first + rng.choice([0, 15, 255, 700])
        each = {code: to for code in range(first, last + 1) if (to := after(code)) != NOTHING}
        pieces = [*scalars.after_chars(expr, first, last)]
        assert {code: to for a, b, to in pieces for code in range(a, b + 1)} == each
        assert [a for a, _, _ in pieces] == sorted(a for a, _, _ in pieces)
        found = {each.get(code, NOTHING) for code in range(first, last + 1)}
        assert scalars.same_after(expr, first, last) == (found.pop() if len(found) == 1 else -1)
        least = min(((ex.shortest(to) or 0) + 1 for to in each.values()), default=NO_TEXT)
        assert scalars.left_after(expr, ((first, last),)) == least
