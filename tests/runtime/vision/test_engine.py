"""Images in an engine: reuse by content, limits, hostile files, cancelling, tiers and block names."""

import threading
from pathlib import Path
from typing import Literal

import numpy as np
import pytest
import torch
from phloem.protocol import messages as m
from phloem.protocol import ops as o
from phloem.protocol.errors import Unsupported
from phloem.protocol.sampling import SamplingParams
from phloem.radix_cache import FIRST_CONTENT_ID
from phloem.runtime.config import EngineConfig
from phloem.runtime.engine import EngineCore
from phloem.runtime.vision.decoding import decode_pixels, open_image
from phloem.runtime.vision.tiles import normalised, tiles_of
from phloem.tests.runtime.engine.driver import GREEDY, Driver, Outcome
from phloem.tests.runtime.vision.tiny_vision import IMAGE_TOKEN, hash_of, picture

CAT, DOG = picture(1), picture(2)


def image(op: int, data: bytes, *, seq: int = 0) -> o.Image:
    return o.Image(op=op, seq=seq, hash=hash_of(data), data=data)


def program(*parts: str | bytes, params: SamplingParams = GREEDY) -> list[o.AnyOp]:
    """The parts, then a generation and a close, whose ops have the next two numbers."""
    ops: list[o.AnyOp] = [
        o.Text(op=i, seq=0, text=part) if isinstance(part, str) else image(i, part) for i, part in enumerate(parts)
    ]
    return [*ops, o.Gen(op=len(ops), seq=0, params=params), o.Close(op=len(ops) + 1, seq=0)]


def answer(outcome: Outcome) -> tuple[tuple[int, ...], int, int]:
    """The tokens, and how many of the prompt's tokens were found in the cache, of how many."""
    (meta,) = [done.meta for done in outcome.done.values() if isinstance(done.meta, m.GenMeta)]
    return meta.candidates[0].token_ids, meta.cached_tokens, meta.prompt_tokens


def test_greedy_text_is_that_of_transformers(driver: Driver, reference: torch.nn.Module) -> None:
    ours, _, prompt_len = answer(driver.run(program("look: ", CAT, " then ", DOG, " what?")))
    images, tokenizer = driver.engine.images, driver.engine.tokenizer
    ids: list[int] = []
    pixels = []
    for part in ("look: ", CAT, " then ", DOG, " what?"):
        if isinstance(part, str):
            ids += tokenizer.encode(part)
            continue
        ids += images.token_ids(images.hold(hash_of(part), part), images.grid_of(hash_of(part))).tolist()
        pixels.append(tiles_of(decode_pixels(open_image(part)), images.form)[1])
    assert len(ids) == prompt_len
    shown = torch.tensor([[IMAGE_TOKEN if i >= FIRST_CONTENT_ID else i for i in ids]])
    values = torch.from_numpy(normalised(np.concatenate(pixels), images.form))[None]
    for token in ours:
        with torch.no_grad():
            assert reference(shown, pixel_values=values).logits[0, -1].argmax() == token
        shown = torch.cat((shown, torch.tensor([[token]])), 1)


def test_the_same_image_in_another_program_is_found_and_another_image_never(driver: Driver) -> None:
    num_before, cat, dog = driver.engine.images.num_encoded, picture(11), picture(12)
    first, num_cached, prompt_len = answer(driver.run(program("an image ", cat, " of?")))
    again = answer(driver.run(program("an image ", cat, " of?")))
    assert num_cached == 0 and again == (first, prompt_len - 1, prompt_len)
    other, num_cached, _ = answer(driver.run(program("an image ", dog, " of?")))
    marks = len("an image ") + 2  # the text and the marks before the first tile
    assert num_cached == marks and other != first
    assert driver.engine.images.num_encoded == num_before + 2


def test_an_image_that_the_cache_holds_is_not_even_decoded(driver: Driver) -> None:
    driver.run(program("x", CAT))
    num_before = driver.engine.images.num_encoded
    driver.engine.images.forget_vectors()
    _, num_cached, prompt_len = answer(driver.run(program("x", CAT, "y")))
    assert num_cached >= prompt_len - 2 and driver.engine.images.num_encoded == num_before
    driver.engine.cache.flush()
    assert answer(driver.run(program("x", CAT, "y")))[1] == 0
    assert driver.engine.images.num_encoded == num_before + 1


def test_answers_are_equal_chunked_batched_and_without_a_cache(driver: Driver, vision_folder: Path) -> None:
    prompts = [("a", CAT, "b"), ("a", DOG, "b"), ("a", CAT, DOG), ("no image",)]
    want = [answer(driver.run(program(*parts)))[0] for parts in prompts]
    options = {"prefill_chunk": 7, "max_step_tokens": 24, "prefix_cache": False, "max_running": 3}
    engine = EngineCore(
        EngineConfig(model=str(vision_folder), precision="float32", num_slots=2048, num_threads=1, **options)
    )
    together = Driver(engine)
    outcomes = [together.submit(program(*parts)) for parts in prompts]
    together.run()
    assert [answer(outcome)[0] for outcome in outcomes] == want
    engine.close()


def test_preempted_images_are_computed_again(vision_folder: Path, driver: Driver) -> None:
    """A pool that holds one and a half of the sequences."""
    params = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)
    want = [answer(driver.run(program(f"{i}", CAT, DOG, params=params)))[0] for i in range(3)]
    engine = EngineCore(EngineConfig(model=str(vision_folder), precision="float32", num_slots=320, num_threads=1))
    small = Driver(engine)
    outcomes = [small.submit(program(f"{i}", CAT, DOG, params=params)) for i in range(3)]
    small.run()
    assert [answer(outcome)[0] for outcome in outcomes] == want
    engine.close()


def test_forks_joins_marks_and_rollbacks_keep_images(driver: Driver) -> None:
    ops = [
        o.Text(op=0, seq=0, text="see "),
        image(1, CAT),
        o.Fork(op=2, seq=0, children=(1, 2, 3)),
        image(3, DOG, seq=1),
        o.Text(op=4, seq=2, text="alone"),
        o.Join(op=5, seq=0, children=(1, 2), mode="concate_and_append"),
        o.Gen(op=6, seq=0, params=GREEDY),
        o.Mark(op=7, seq=3),
        image(8, DOG, seq=3),
        o.Rollback(op=9, seq=3, to=7),
        o.Gen(op=10, seq=3, params=GREEDY),
        o.Close(op=11, seq=0),
        o.Close(op=12, seq=1),
        o.Close(op=13, seq=2),
        o.Close(op=14, seq=3),
    ]
    outcome = driver.run(ops)
    assert not outcome.failed and outcome.closed is not None
    joined, alone = outcome.done[6].meta, outcome.done[10].meta
    plain = answer(driver.run(program("see ", CAT, DOG, "alone")))
    assert joined.candidates[0].token_ids == plain[0] and joined.prompt_tokens == plain[2]
    assert alone.candidates[0].token_ids == answer(driver.run(program("see ", CAT)))[0]
    assert outcome.done[11].value.startswith("see <image><image>alone")


def test_sampling_scores_and_drafts_take_prompts_with_images(driver: Driver) -> None:
    params = SamplingParams(
        temperature=0.0, max_tokens=8, repetition_penalty=1.3, frequency_penalty=0.5, ignore_eos=True,
        return_logprob=True, logprob_start_len=0, top_logprobs_num=2,
    )  # fmt: skip
    for _ in range(2):
        outcome = driver.run(program("ab ", CAT, "ab ", CAT, "ab", params=params))
        assert not outcome.failed and len(answer(outcome)[0]) == 8
    ops = [image(0, CAT), o.Select(op=1, seq=0, choices=("cat", "dog")), o.Score(op=2, seq=0, text="!")]
    outcome = driver.run([*ops, o.Gen(op=3, seq=0, n=3), o.Close(op=4, seq=0)])
    assert not outcome.failed and outcome.value(1) in ("cat", "dog") and outcome.value(2) < 0


def test_later_ops_of_a_program_may_leave_out_the_data(driver: Driver) -> None:
    ops = program("a", CAT, "b", CAT)
    short = [*ops[:3], o.Image(op=3, seq=0, hash=hash_of(CAT)), *ops[4:]]
    assert answer(driver.run(ops))[0] == answer(driver.run(short))[0]


@pytest.mark.parametrize(
    ("op", "kind", "says"),
    [
        (o.Image(op=0, seq=0, hash=hash_of(CAT)), "InvalidRequest", "an image without data, and no earlier op"),
        (o.Image(op=0, seq=0, hash="0" * 64, data=CAT), "InvalidRequest", "is not the SHA-256 of the image's data"),
        (image(0, bytes((8 << 20) + 1)), "LimitExceeded", "an image of 8,388,609 bytes, but the limit is 8,388,608"),
    ],
)
def test_a_bad_image_op_is_refused_with_its_submit(driver: Driver, op: o.Image, kind: str, says: str) -> None:
    outcome = driver.run([op])
    assert outcome.rejected.errors[0].kind == kind and says in outcome.rejected.errors[0].message


def test_a_hostile_image_fails_its_op_alone(driver: Driver) -> None:
    good = driver.submit(program("fine ", CAT))
    bad = driver.run([image(0, b"GIF89a" + bytes(30)), o.Gen(op=1, seq=0), o.Close(op=2, seq=0)])
    assert bad.failed[0].error.kind == "InvalidRequest" and "image" in bad.failed[0].error.message
    assert bad.failed[1].error.kind == "DependencyFailed" and bad.closed is not None
    assert len(answer(good)[0]) == 12


def test_an_image_that_cannot_fit_the_context_is_not_encoded(driver: Driver) -> None:
    num_before = driver.engine.images.num_encoded
    wide = picture(5, size=(64, 64))
    outcome = driver.run(program("x" * 430, wide))
    assert outcome.failed[1].error.kind == "PromptTooLong"
    assert "an image of 64 x 64 pixels takes 108 tokens, but 82 are left" in outcome.failed[1].error.message
    assert driver.engine.images.num_encoded == num_before


def test_a_cancelled_image_ends_and_other_programs_go_on(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    images = driver.engine.images
    read, may_go_on, has_begun = images.read, threading.Event(), threading.Event()

    def slow(picture, *, num_left, is_wanted):
        has_begun.set()
        assert may_go_on.wait(60)
        return read(picture, num_left=num_left, is_wanted=is_wanted)

    monkeypatch.setattr(images, "read", slow)
    new = picture(77)
    waiting = driver.submit(program("w", new), program="waiting")
    other = driver.submit([o.Text(op=0, seq=0, text="hi"), o.Gen(op=1, seq=0, params=GREEDY)])
    while 1 not in other.done:
        driver.step()
    assert has_begun.wait(60) and not waiting.failed and 1 not in waiting.done
    driver.say(m.Cancel("waiting"))
    driver.step()
    assert waiting.failed[1].error.kind == "Cancelled" and waiting.closed is not None
    num_before = images.num_encoded
    may_go_on.set()
    driver.run()
    assert images.num_encoded == num_before


@pytest.mark.parametrize("kv_dtype", ["auto", "int8"])
def test_kv_of_images_comes_back_from_disk_by_content(
    vision_folder: Path, tmp_path: Path, kv_dtype: Literal["auto", "int8"]
) -> None:
    config = EngineConfig(
        model=str(vision_folder),
        precision="float32",
        num_slots=1024,
        num_threads=1,
        disk_cache=str(tmp_path),
        kv_dtype=kv_dtype,
    )
    engine = EngineCore(config)
    assert (engine.kv.dtype == torch.int8) == (kv_dtype == "int8")
    first = answer(Driver(engine).run(program("an image ", CAT)))
    answer(Driver(engine).run(program("an image ", DOG)))
    engine.close()
    engine = EngineCore(config)  # which gives DOG the ids that CAT had
    other = answer(Driver(engine).run(program("an image ", DOG)))
    again = answer(Driver(engine).run(program("an image ", CAT)))
    assert first[1] == 0 and again[0] == first[0] and other[0] != first[0]
    assert again[1] >= 64 and other[1] >= 64
    engine.close()


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"tensor_parallel": 2}, "tensor_parallel=2: vision models are not split; set it to 1"),
        ({"adapters": {"poet": "/nowhere"}}, "adapter 'poet': vision models take no adapters"),
        ({"draft_model": "self:1"}, "draft_model='self:1': it cannot read the images of a vision model"),
    ],
)
def test_options_that_would_ignore_images_are_refused(
    vision_folder: Path, options: dict[str, object], says: str
) -> None:
    with pytest.raises(Unsupported, match=says):
        EngineCore(EngineConfig(model=str(vision_folder), precision="float32", num_threads=1, **options))


def test_an_engine_says_that_it_takes_images(driver: Driver) -> None:
    welcome = driver.engine.welcome()
    assert "image" in welcome.capabilities and welcome.limits.max_image_bytes == 8 << 20
