"""Programs and pins with images go on at another engine when theirs is lost: with the same tokens."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from phloem.protocol import ops as o
from phloem.protocol.sampling import SamplingParams
from phloem.runtime.config import EngineConfig
from phloem.runtime.engine import EngineCore
from phloem.tests.cluster.hosts import Asked, fleet_of
from phloem.tests.runtime.vision.tiny_vision import hash_of, picture
from phloem.tests.runtime.wire import wait_until

CAT, DOG = picture(31), picture(32)
STREAMED = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True, speculative=False)


def image(op: int, seq: int, data: bytes, *, is_sent: bool = True) -> o.Image:
    return o.Image(op=op, seq=seq, hash=hash_of(data), data=data if is_sent else b"")


# The second branch shows a picture that the first one has sent, behind its generation.
PROGRAM: list[o.AnyOp] = [
    o.Text(op=0, seq=0, text="look: "),
    image(1, 0, CAT),
    o.Fork(op=2, seq=0, children=(1, 2)),
    o.Gen(op=3, seq=1, params=STREAMED, stream=True),
    image(4, 1, DOG),
    o.Gen(op=5, seq=1, params=STREAMED),
    image(6, 2, DOG, is_sent=False),
    image(7, 2, CAT, is_sent=False),
    o.Gen(op=8, seq=2, params=STREAMED, stream=True),
    *(o.Close(op=9 + seq, seq=seq) for seq in range(3)),
]
# The pinned sequence shows a picture that another one has sent.
PINNED: list[o.AnyOp] = [
    image(0, 0, CAT),
    o.Gen(op=1, seq=0, params=SamplingParams(max_tokens=0)),
    o.Text(op=2, seq=1, text="see "),
    image(3, 1, CAT, is_sent=False),
    image(4, 1, CAT, is_sent=False),
    o.Gen(op=5, seq=1, params=SamplingParams(max_tokens=0)),
    o.Pin(op=6, seq=1, ttl_s=600.0),
    o.Close(op=7, seq=0),
    o.Close(op=8, seq=1),
]


@pytest.fixture(scope="module")
def both(vision_folder: Path) -> Iterator[list[EngineCore]]:
    config = EngineConfig(model=str(vision_folder), precision="float32", num_slots=2048, num_threads=1)
    found = [EngineCore(config), EngineCore(config)]
    yield found
    for engine in found:
        engine.close()


@pytest.mark.parametrize("num_steps", [1, 8, 30])
def test_a_program_with_images_survives_the_loss_of_its_engine(
    both: list[EngineCore], tmp_path: Path, num_steps: int
) -> None:
    for engine in both:
        engine.cache.flush()
    with fleet_of(both, tmp_path) as fleet:
        fleet.add()
        want = Asked(fleet.client, PROGRAM).result()
        assert len(want) == len(PROGRAM) + 2 and not [value for value in want.values() if "Error" in str(value)]
    both[1].cache.flush()
    with fleet_of(both, tmp_path) as fleet:
        fleet.add(num_steps=num_steps)
        asked = Asked(fleet.client, PROGRAM)
        wait_until(lambda: bool(fleet.lost))
        num_before = both[0].images.num_encoded
        fleet.add()
        assert asked.result() == want
        assert both[0].images.num_encoded <= num_before + 2, "an image was encoded twice"


def test_a_pin_on_images_is_made_again_with_data_that_another_sequence_sent(
    both: list[EngineCore], tmp_path: Path
) -> None:
    for engine in both:
        engine.cache.flush()
    with fleet_of(both, tmp_path) as fleet:
        host = fleet.add()
        found = Asked(fleet.client, PINNED).result()
        assert not [value for value in found.values() if "Error" in str(value)]
        num_pinned = both[1].cache.num_pinned
        assert num_pinned > 40
        host.end()
        fleet.add()
        wait_until(lambda: both[0].cache.num_pinned >= num_pinned)


def test_an_image_is_shown_where_the_op_that_sends_it_waits_or_fails(both: list[EngineCore], tmp_path: Path) -> None:
    ops: list[o.AnyOp] = [
        image(0, 0, b"GIF89a" + bytes(30)),
        image(1, 0, DOG),
        image(2, 1, DOG, is_sent=False),
        o.Gen(op=3, seq=1, params=STREAMED),
        o.Close(op=4, seq=0),
        o.Close(op=5, seq=1),
    ]
    with fleet_of(both, tmp_path) as fleet:
        fleet.add()
        found = Asked(fleet.client, ops).result()
    assert "DependencyFailed" in str(found[1]) and "Error" not in str(found[3]) and found[3]
