"""Token healing and stop patterns in the engine, on the real vocabulary."""

import msgspec
import pytest
from phloem.constrained.spec import GrammarSpec
from phloem.protocol import ops as o
from phloem.protocol.sampling import SamplingParams
from phloem.runtime.config import EngineConfig
from phloem.runtime.engine import EngineCore
from phloem.runtime.engine.healing import Healer, HealMatcher
from phloem.tests.runtime.engine.driver import CLIENT, Driver, with_more

URL = 'The link is <a href="http:'


class Pieces:
    """The parts of a tokenizer that healing uses."""

    token_bytes = [b"a", b"ab", b"abc", b"b", b":", b"://", b"", b"\xc3", b"\xa9", b"\xc3\xa9x", b"c\xff", b"c\xffd"]
    special_ids = frozenset([6])


def bits(mask):
    return [i for i in range(32) if mask[0] >> i & 1]


def test_tokens_that_are_a_prefix_of_a_longer_token_are_given_back():
    healer = Healer(Pieces())
    assert healer.to_give_back([3, 0]) == (1, b"a")
    assert healer.to_give_back([0, 3]) == (2, b"ab")
    assert healer.to_give_back([4]) == (1, b":")
    assert healer.to_give_back([5]) == (0, b"")
    assert healer.to_give_back([0, 7, 8]) == (2, b"\xc3\xa9")
    assert healer.to_give_back([7]) == (0, b""), "half a character is no text"
    assert healer.to_give_back([]) == (0, b"")


def test_the_heal_mask_allows_only_tokens_that_continue_the_text():
    matcher = HealMatcher(Healer(Pieces()), b"ab")
    assert bits(matcher.mask()) == [0, 1, 2]
    assert matcher.accept(0) and bits(matcher.mask()) == [3]
    assert not matcher.accept(4) and "does not continue b'b'" in matcher.error
    assert bits(HealMatcher(Healer(Pieces()), b"c\xff").mask()) == [10, 11]


# -- stop patterns, on the tiny model ---------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tiny(tiny_model_path):
    engine = EngineCore(EngineConfig(model=str(tiny_model_path), precision="float32", num_slots=4096))
    yield Driver(engine)
    engine.close()


def test_a_stop_pattern_cuts_the_text_and_the_tokens_agree(tiny):
    plain = SamplingParams(temperature=0.0, max_tokens=60, ignore_eos=True)
    whole = tiny.run([o.Text(op=0, seq=0, text="sap"), o.Gen(op=1, seq=0, params=plain)]).value(1)[0]
    cut = whole[20:23]
    by_string, by_pattern = [
        tiny.run(with_more(o.Gen(op=1, seq=0, params=params), prompt="sap", text="!", after=plain))
        for params in (
            msgspec.structs.replace(plain, stop=(cut,)),
            msgspec.structs.replace(plain, stop_regex=(_escaped(cut),)),
        )
    ]
    kept = whole[: whole.index(cut)]
    assert by_pattern.value(1) == [kept] and "".join(d.text for d in by_pattern.deltas if d.op == 1) == kept
    meta = by_pattern.done[1].meta.candidates[0]
    assert meta.finish_reason == "stop" and meta.matched_stop == _escaped(cut)
    for op in (1, 3, 4):
        assert by_pattern.value(op) == by_string.value(op)
    assert meta.token_ids == by_string.done[1].meta.candidates[0].token_ids


def _escaped(text):
    return "".join(f"\\u{{{ord(c):x}}}" if ord(c) > 0xFFFF else f"\\u{ord(c):04x}" for c in text)


def test_an_invalid_stop_pattern_is_refused_by_name(tiny):
    out = tiny.run([o.Gen(op=0, seq=0, params=SamplingParams(stop_regex=("a*",)))])
    assert out.rejected.errors[0].kind == "InvalidParams"
    assert "stop_regex='a*': 'a*' matches the empty text" in out.rejected.errors[0].message


# -- healing, on the real model ---------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def real(smollm2_path):
    engine = EngineCore(EngineConfig(model=str(smollm2_path), num_slots=4096))
    yield Driver(engine)
    engine.drop_client(CLIENT)
    engine.check()
    engine.close()


def heal(driver, text, *, grammar=None, n=1, more=(), **params):
    params = SamplingParams(**{"temperature": 0.0, "max_tokens": 8, "heal": True, **params})
    ops = [o.Text(op=0, seq=0, text=text), o.Gen(op=1, seq=0, params=params, grammar=grammar, n=n, stream=True), *more]
    out = driver.run([*ops, o.Close(op=9, seq=0)])
    assert out.value(1) is not None
    assert "".join(d.text for d in out.deltas if d.op == 1 and d.index == 0) == out.value(1)[0]
    return out


@pytest.mark.model
def test_healing_moves_a_trailing_blank_into_the_next_word(real):
    out = heal(real, "The capital of France is ", return_logprob=True)
    meta = out.done[1].meta
    assert out.value(1)[0].startswith("Paris") and meta.healed == " "
    tokens = meta.candidates[0].logprobs
    assert tokens[0].text == " Paris" and len(tokens) == len(meta.candidates[0].token_ids) == 8
    assert out.value(9) == "The capital of France is " + out.value(1)[0]
    assert not heal(real, "The capital of France is ", heal=False).value(1)[0].startswith("Paris")


@pytest.mark.model
def test_healed_answers_equal_those_of_the_shortened_prompt(real):
    """For prompts whose removed text the model would write anyway, only the token boundaries change."""
    prompt = "The capital of France is"
    greedy = SamplingParams(temperature=0.0, max_tokens=8)
    base = real.run([o.Text(op=0, seq=0, text="The capital of France"), o.Gen(op=1, seq=0, params=greedy)])
    assert base.value(1)[0].startswith(" is")
    out = heal(real, prompt, max_tokens=7)
    assert " is" + out.value(1)[0] == base.value(1)[0]
    assert out.done[1].meta.candidates[0].token_ids == base.done[1].meta.candidates[0].token_ids
    assert out.done[1].meta.candidates[0].completion_tokens == 7


@pytest.mark.model
def test_a_grammar_starts_after_the_text_that_was_given_back(real):
    out = heal(real, URL, grammar=GrammarSpec("regex", r"//[a-z]{3}\.org"), max_tokens=20)
    assert out.value(1)[0].startswith("//") and out.value(1)[0].endswith(".org") and out.done[1].meta.healed == ":"
    schema = (
        '{"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"], "additionalProperties": false}'
    )
    out = heal(real, "As JSON: ", grammar=GrammarSpec("json_schema", schema, {"whitespace": "compact"}), max_tokens=20)
    assert out.value(1)[0] in ('{"a":1}', '{"a":2}') and out.done[1].meta.healed == " "
    assert heal(real, "I choose ", grammar=GrammarSpec("choices", '["oak", "elm"]')).value(1)[0] in ("oak", "elm")


@pytest.mark.model
@pytest.mark.parametrize("stop", [{"stop": ("//",)}, {"stop": ("/",)}, {"stop_regex": ("/+[a-z]",)}])
def test_a_stop_inside_the_first_token_leaves_the_prompt_whole(real, stop):
    more = (o.Text(op=2, seq=0, text="x"), o.Gen(op=3, seq=0, params=SamplingParams(temperature=0.0, max_tokens=4)))
    out = heal(real, URL, more=more, **stop)
    assert out.value(1) == [""] and out.value(9) == URL + "x" + out.value(3)[0]


@pytest.mark.model
def test_marks_rollbacks_and_forks_see_the_unhealed_text(real):
    params = SamplingParams(temperature=0.0, max_tokens=4, heal=True)
    out = real.run(
        [
            o.Text(op=0, seq=0, text=URL),
            o.Mark(op=1, seq=0),
            o.Gen(op=2, seq=0, params=params),
            o.Mark(op=3, seq=0, begin=1),
            o.Rollback(op=4, seq=0, to=1),
            o.Gen(op=5, seq=0, params=params),
            o.Rollback(op=6, seq=0, to=1),
            o.Fork(op=7, seq=0, children=(1, 2)),
            o.Gen(op=8, seq=1, params=params),
            o.Text(op=9, seq=2, text="x"),
            o.Join(op=10, seq=0, children=(1, 2), mode="concate_and_append"),
            o.Close(op=11, seq=0),
            o.Close(op=12, seq=1),
            o.Close(op=13, seq=2),
        ]
    )
    text = out.value(2)[0]
    assert text.startswith("//") and out.value(3) == text and out.value(5) == [text] and out.value(8) == [text]
    assert out.value(12) == URL + text and out.value(11) == URL + text + "x"
    assert out.done[8].meta.cached_tokens >= out.done[2].meta.prompt_tokens - 1


@pytest.mark.model
def test_every_candidate_is_healed_and_a_seed_decides(real):
    first = heal(real, URL, n=4, temperature=1.0, seed=3)
    again = heal(real, URL, n=4, temperature=1.0, seed=3)
    assert first.value(1) == again.value(1) and len(set(first.value(1))) > 1
    tokens = [candidate.token_ids[0] for candidate in first.done[1].meta.candidates]
    assert all(real.engine.tokenizer.token_bytes[token].startswith(b":") for token in tokens)


@pytest.mark.model
def test_a_prompt_that_does_not_end_in_text_is_not_healed(real):
    template = real.engine.template.info().roles["user"].prefix
    out = real.run(
        [
            o.Special(op=0, seq=0, ids=template),
            o.Gen(op=1, seq=0, params=SamplingParams(temperature=0.0, max_tokens=2, heal=True)),
            o.Gen(op=2, seq=0, params=SamplingParams(temperature=0.0, max_tokens=2, heal=True)),
            o.Close(op=3, seq=0),
        ]
    )
    assert out.done[1].meta.healed == out.done[2].meta.healed == ""


@pytest.mark.model
def test_a_cancelled_generation_leaves_the_prompt_s_text(real):
    params = SamplingParams(temperature=0.0, max_tokens=500, ignore_eos=True, heal=True)
    out = real.submit([o.Text(op=0, seq=0, text=URL), o.Gen(op=1, seq=0, params=params), o.Close(op=2, seq=0)])
    for _ in range(3):
        real.step()
    from phloem.protocol import messages as m

    real.say(m.Cancel(next(name for name, o_ in real.outcomes.items() if o_ is out), None, 1))
    real.run()
    assert 1 in out.failed and out.value(2).startswith(URL)
