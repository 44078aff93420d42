"""Beam search against a slow search that computes every prefix anew."""

import asyncio
import threading

import pytest
from phloem import beam, function, gen
from phloem.lang.backend.base_backend import BaseBackend
from phloem.lang.beam import SglBeam
from phloem.protocol import errors, ops
from phloem.protocol.messages import Done
from phloem.protocol.program_call import ProgramCall
from phloem.protocol.sampling import SamplingParams

PROMPT = "The quick brown"


def next_tokens(engine, ids, count):
    """[(log-probability, token)] after the prompt and ``ids``, of a program of its own."""
    found = []
    params = SamplingParams(max_tokens=1, temperature=0, ignore_eos=True, return_logprob=True, top_logprobs_num=count)
    program = [
        ops.Text(op=0, seq=0, text=PROMPT),
        *([ops.Special(op=1, seq=0, ids=tuple(ids))] if ids else []),
        ops.Gen(op=2, seq=0, params=params),
        ops.Close(op=3, seq=0),
    ]
    over = threading.Event()

    def take(message):
        if isinstance(message, Done) and message.op == 2:
            found.extend((value, token) for token, value, _ in message.meta.candidates[0].logprobs[0].top)
            over.set()

    ProgramCall(engine.client, take).submit(program)
    assert over.wait(30)
    return found


def slow_beam(engine, width, num_tokens):
    live = [((), 0.0)]
    for _ in range(num_tokens):
        nexts = [
            ((*ids, token), total + value)
            for ids, total in live
            for value, token in next_tokens(engine, ids, 2 * width)
        ]
        live = sorted(nexts, key=lambda item: -item[1])[:width]
    return live


@function
def search(s, width, num_tokens, penalty=0.0):
    s += PROMPT + beam("x", width=width, max_tokens=num_tokens, length_penalty=penalty) + "." + gen("y", max_tokens=2)


def ends_early(engine, beams):
    return any(b["finish_reason"]["type"] != "length" for b in beams)


@pytest.mark.parametrize("width", [1, 2, 5])
def test_beam_search_finds_the_same_texts_as_a_slow_search(engine, width):
    s = search.run(width, 5, backend=engine)
    beams = s.get_meta_info("x")["beams"]
    assert not ends_early(engine, beams)
    slow = slow_beam(engine, width, 5)
    assert [tuple(t for _, t, _ in b["output_token_logprobs"]) for b in beams] == [ids for ids, _ in slow]
    assert [b["logprob"] for b in beams] == pytest.approx([total for _, total in slow], abs=1e-3)
    assert s["x"] == beams[0]["text"] and s.text() == PROMPT + s["x"] + "." + s["y"]
    assert s.stats()["messages"] <= 5 + 2


def test_a_beam_of_one_is_greedy(engine):
    greedy = function(lambda s: s.__iadd__(PROMPT + gen("x", max_tokens=6, temperature=0, heal=False))).run(
        backend=engine
    )
    assert search.run(1, 6, backend=engine)["x"] == greedy["x"]


def test_a_stop_string_ends_a_text_before_it(engine):
    free = search.run(2, 6, backend=engine)["x"]
    stop = next(char for char in free[1:] if char != "\ufffd")
    s = function(lambda s: s.__iadd__(PROMPT + beam("x", width=2, max_tokens=6, stop=stop, length_penalty=0.0))).run(
        backend=engine
    )
    beams = s.get_meta_info("x")["beams"]
    assert all(stop not in b["text"] for b in beams) and s.text() == PROMPT + s["x"]
    assert any(b["finish_reason"] == {"type": "stop"} for b in beams)


def test_an_async_program_appends_a_beam_search_without_blocking(engine):
    @function
    async def body(s):
        await s.append_async(PROMPT + beam("x", width=2, max_tokens=4, length_penalty=0.0))

    s = asyncio.run(body.run(backend=engine))
    assert s["x"] == search.run(2, 4, backend=engine)["x"]


def test_a_backend_without_tokens_refuses_beam_search(connect):
    class Api(BaseBackend):
        pass

    with pytest.raises(errors.Unsupported, match=r"beam\('x', width=4\): Api generates whole texts"):
        function(lambda s: s.__iadd__(beam("x"))).run(backend=Api())
    with pytest.raises(errors.InvalidRequest, match=r"beam\(width=51\): must be between 1 and 50"):
        beam("x", width=51)
    assert isinstance(beam("x"), SglBeam)
