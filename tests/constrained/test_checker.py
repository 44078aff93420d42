import json

import pytest
from phloem.constrained import GrammarError, GrammarTooComplex, Vocabulary, check
from phloem.constrained.checker import Overlap, Verdict
from phloem.constrained.regex_syntax import alternatives


def test_overlapping_alternatives_are_shown_with_a_text_of_both() -> None:
    report = check("regex", r"(cat|c[aeiou]t|dog)s?|\d{2,4}|20[0-9][0-9]")
    assert [(o.first, o.second) for o in report.overlaps] == [("cat", "c[aeiou]t"), (r"\d{2,4}", "20[0-9][0-9]")]
    assert report.overlaps[0].example == "cat" and report.overlaps[1].example.startswith("20")
    assert "overlap: cat overlaps with c[aeiou]t; both match 'cat'" in str(report)


@pytest.mark.parametrize(
    ("pattern", "groups"),
    [
        ("abc", []),
        ("a|b", [["a", "b"]]),
        (r"(a|b)c|d", [["a", "b"], ["(a|b)c", "d"]]),
        (r"[|)(]\|\(|[^]|]x", [[r"[|)(]\|\(", "[^]|]x"]]),
        ("(?i:a|b)(?P<n>c|d)", [["(?i:a)", "(?i:b)"], ["c", "d"]]),
        ("(?i)a|b(?s:c|d)", [["(?is:c)", "(?is:d)"], ["(?i)a", "(?i:b(?s:c|d))"]]),
        ("[[:alpha:]|]|b", [["[[:alpha:]|]", "b"]]),
        ("a||b", [["a", "", "b"]]),
    ],
)
def test_alternatives_of_each_group_are_cut_out(pattern: str, groups: list[list[str]]) -> None:
    assert alternatives(pattern) == groups


def test_a_pattern_that_interegular_cannot_read_is_named() -> None:
    report = check("regex", r"\p{L}+|x{300}|y")
    assert [entry.split(":")[0] for entry in report.not_compared] == [r"\p{L}+", "x{300}"]
    assert "a repeat of 300 is above 200" in report.not_compared[1] and report.overlaps == ()


def test_a_choice_that_begins_another_is_an_overlap() -> None:
    report = check("choices", json.dumps(["yes please", "no", "yes", "no"]))
    assert report.overlaps == (Overlap("yes", "yes please", "yes"), Overlap("no", "no", "no"))
    assert "overlap: 'yes' begins 'yes please'" in str(report)


def test_lark_terminals_are_compared_and_what_the_start_does_not_reach_is_named() -> None:
    text = 'start: NAME | KEYWORD\nNAME: /[a-z]+/\nKEYWORD: "if" | "IF"\nSPARE: "z"\nrest: "a"'
    report = check("lark", text)
    assert [(o.first.split()[0], o.second.split()[0], o.example) for o in report.overlaps] == [
        ("NAME", "KEYWORD", "if")
    ]
    assert report.unused == ("rest", "SPARE")


def test_rules_that_match_no_text_are_named() -> None:
    report = check("ebnf", 'root ::= "a" | dead\ndead ::= "x" dead\nspare ::= "q"')
    assert report.dead == ("dead",) and report.unused == ("spare",)
    assert check("regex", "a$b|c").dead == ("a$b",)


def test_properties_that_no_value_satisfies_are_named_by_their_place() -> None:
    schema = {
        "type": "object",
        "properties": {"a/b": {"$ref": "#/$defs/never"}, "ok": {"type": "integer"}, "forbidden": False},
        "$defs": {"never": {"type": "string", "enum": [1]}},
    }
    assert check("json_schema", json.dumps(schema)).dead == ("#/properties/a~1b", "#/$defs/never")
    named = {"properties": {"if": {"enum": []}}, "items": {"not": {"enum": []}}, "else": {"enum": []}}
    assert check("json_schema", json.dumps(named)).dead == ("#/properties/if",)


def test_an_example_text_is_judged_by_character() -> None:
    accepted, refused, cut = check("regex", "é[0-9]{2}", texts=["é12", "é1x", "é1"]).verdicts
    assert accepted == Verdict("é12", True, 3, "")
    assert refused == Verdict("é1x", False, 2, "'0' to '9'")
    assert cut == Verdict("é1", False, 2, "'0' to '9'")
    report = check("regex", "é[0-9]{2}", texts=["é1x", "é1"])
    assert not report.is_accepting
    assert "refused: 'é1x' stops after 2 of 3 characters; expected '0' to '9'" in str(report)
    assert "refused: 'é1' is not complete; expected '0' to '9'" in str(report)


def test_the_first_mask_is_counted_in_the_tokens_of_the_vocabulary(vocabulary: Vocabulary) -> None:
    report = check("regex", "(name|n)?", vocabulary)
    assert set(report.first_tokens) == {b"n", b"na", b"name"} and report.may_be_empty
    assert report.num_tokens == int(vocabulary.is_text.sum())
    assert f"first mask: 3 of {report.num_tokens:,} tokens: 'n' 'name' 'na'; the text may be empty" in str(report)


def test_what_is_used_of_each_limit_is_counted() -> None:
    small, large = check("regex", "ab"), check("regex", "(a|b){40}c[0-9]{3}")
    used = {limit.name: limit.used for limit in small.limits}
    more = {limit.name: limit.used for limit in large.limits}
    assert used["characters of grammar"] == 2
    assert 0 < used["automaton states"] < more["automaton states"] and used["expressions"] < more["expressions"]
    assert len(small.mask_s) == len(large.mask_s) > 0 and list(small.mask_s) == sorted(small.mask_s)


def test_a_grammar_that_cannot_be_compiled_is_refused_as_by_compile() -> None:
    with pytest.raises(GrammarError, match="is never closed"):
        check("regex", "(a")
    with pytest.raises(GrammarError, match="unknown option 'colour'"):
        check("json_schema", "{}", colour="red")
    with pytest.raises(GrammarTooComplex, match="the limit is"):
        check("regex", "a" * (5 << 20))


def test_example_texts_are_judged_in_any_white_space_unless_the_option_is_given() -> None:
    schema, text = '{"type": "array"}', "[1\n, 2 ]"
    assert check("json_schema", schema, texts=[text]).is_accepting
    assert not check("json_schema", schema, texts=[text], whitespace="neat").is_accepting
