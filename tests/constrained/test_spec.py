import pickle

import msgspec
from phloem.constrained import GRAMMAR_KINDS, GrammarError, GrammarSpec, GrammarTooComplex


def test_the_key_is_equal_for_equal_grammars_alone() -> None:
    spec = GrammarSpec("json_schema", "{}", {"whitespace": "compact", "numbers": "any"})
    same = GrammarSpec("json_schema", "{}", {"numbers": "any", "whitespace": "compact"})
    others = [GrammarSpec("json_schema", "{}"), GrammarSpec("regex", "{}"), GrammarSpec("json_schema", "{} ")]
    assert spec.key == same.key and len({spec.key, *(other.key for other in others)}) == 4


def test_a_spec_is_the_same_after_a_message() -> None:
    for kind in GRAMMAR_KINDS:
        spec = GrammarSpec(kind, "text", {"start": "root"})
        assert (
            msgspec.msgpack.decode(msgspec.msgpack.encode(spec), type=GrammarSpec)
            == spec
            == pickle.loads(pickle.dumps(spec))
        )


def test_errors_know_their_place() -> None:
    bare = GrammarTooComplex("too much")
    placed = bare.at("#/items")
    assert (str(placed), placed.where, type(placed)) == ("too much (at #/items)", "#/items", GrammarTooComplex)
    assert placed.at("#/elsewhere") is placed
    assert str(placed.within("#/tags/0/schema")) == "too much (at #/tags/0/schema/items)"
    twin = placed.twin()
    assert (str(twin), twin.where) == (str(placed), placed.where) and twin is not placed
    assert isinstance(twin, GrammarError) and twin.__traceback__ is None
