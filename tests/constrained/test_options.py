import pytest
from phloem.constrained import GrammarError, GrammarSpec, Vocabulary, compile
from phloem.constrained.options import JSON_OPTIONS, option_values


def test_an_unknown_option_is_refused(vocabulary: Vocabulary) -> None:
    with pytest.raises(GrammarError, match="unknown option 'colour'"):
        compile("json_schema", "{}", vocabulary, colour="red")
    with pytest.raises(GrammarError, match="option property_order is 'up'; it can be 'schema' or 'any'"):
        compile("json_schema", "{}", vocabulary, property_order="up")
    with pytest.raises(GrammarError, match="unknown option 'start'; a grammar of kind regex takes none"):
        compile("regex", "a", vocabulary, start="root")
    with pytest.raises(GrammarError, match="unknown option 'numbers'; a grammar of kind json takes whitespace"):
        compile("json", "", vocabulary, numbers="any")


def test_options_that_are_not_given_have_their_defaults() -> None:
    assert option_values(GrammarSpec("json_schema", "{}")) == {name: values[0] for name, values in JSON_OPTIONS.items()}
    given = GrammarSpec("structural_tags", "{}", {"whitespace": "compact"})
    assert option_values(given)["whitespace"] == "compact" and option_values(given)["property_order"] == "schema"
    anything = option_values(GrammarSpec("json"))
    assert anything.keys() == JSON_OPTIONS.keys() and anything["property_order"] == anything["numbers"] == "any"
    assert option_values(GrammarSpec("ebnf", "")) == {"start": "root"}
    assert option_values(GrammarSpec("lark", "", {"start": "top"})) == {"start": "top"}
