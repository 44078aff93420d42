"""All layers' calls follow from a few of them, or are refused."""

from itertools import pairwise

import numpy as np
import torch
from phloem.kernels.cpu.recording import Arena, Call
from phloem.runtime.executor.layer_calls import LayerCalls, LayerPattern

ARENA = Arena()
HELD = [ARENA.empty((64,), dtype=torch.uint8) for _ in range(2)]
PLACES = [place.data_ptr() for place in HELD]
WEIGHTS = 1 << 40


def layer(number: int, *, size: int, weight: int | None = None, kernel: int = 7) -> LayerCalls:
    """Two calls: a kernel on a weight and a place in the arena, and one on the place alone."""
    weight = WEIGHTS + number if weight is None else weight
    place = PLACES[number % 2]
    first = np.array([size, place, weight], np.int64).tobytes()
    second = np.array([place, size], np.int64).tobytes()
    return LayerCalls.of([Call(kernel, first, 2, 16), Call(9, second, 1, 0)], ARENA)


def layers(size: int) -> list[LayerCalls]:
    return [layer(i, size=size) for i in range(12)]


def test_a_few_layers_of_each_kind_give_all() -> None:
    pattern = LayerPattern(layers(3))
    assert len(pattern.needed) < 7 and pattern.needed[0] == 0 and pattern.needed[-1] == 11
    want = layers(8)
    made = pattern.complete({i: want[i] for i in pattern.needed})
    assert made is not None
    assert [one.calls for one in made] == [one.calls for one in want]


def test_needed_layers_have_each_pair_of_neighbours() -> None:
    kinds = [0, 1, 2, 1, 2, 2, 1, 2, 1, 2, 2, 1, 2, 1, 2, 3]
    known = [layer(i, size=3 + kind) for i, kind in enumerate(kinds)]
    pattern = LayerPattern(known)
    pairs = [(known[a].kind, known[b].kind) for a, b in pairwise(pattern.needed)]
    assert set(pairs) == {(a.kind, b.kind) for a, b in pairwise(known)}
    assert len(pattern.needed) < len(known)


def test_layers_that_differ_by_the_shape_too_are_refused() -> None:
    pattern = LayerPattern([layer(i, size=3, weight=WEIGHTS + 3 * i) for i in range(12)])
    assert pattern.complete({i: layer(i, size=4, weight=WEIGHTS + 4 * i) for i in pattern.needed}) is None


def test_other_kernels_are_refused() -> None:
    pattern = LayerPattern(layers(3))
    assert pattern.complete({i: layer(i, size=4, kernel=8) for i in pattern.needed}) is None


def test_a_recorded_layer_that_repeats_no_other_is_refused() -> None:
    pattern = LayerPattern(layers(3))
    found = {i: layer(i, size=4) for i in pattern.needed}
    found[pattern.needed[-2]] = layer(pattern.needed[-2], size=5)
    assert pattern.complete(found) is None


def test_models_of_few_layers_are_recorded_whole() -> None:
    for count in (1, 2, 3):
        known = layers(3)[:count]
        pattern = LayerPattern(known)
        assert pattern.needed == tuple(range(count))
        assert pattern.complete(dict(enumerate(known))) == known
