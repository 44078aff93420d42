"""All layers' calls for a shape follow from a few of them and from those of a larger shape, or are refused."""

from itertools import accumulate

import numpy as np
from phloem.kernels.cpu.recording import Call, TensorPlaces
from phloem.runtime.executor.layer_calls import LayerCalls, LayerPattern

BEGIN, WEIGHTS = 1 << 41, 1 << 40
LAST = 11


def spans(size: int) -> TensorPlaces:
    """Of a recording: the input and two tensors that the layers use in turns, each of ``size`` times 64 bytes."""
    begins = np.array(list(accumulate([64, 64 * size, 64 * size], initial=BEGIN)), np.int64)
    return TensorPlaces(begins[:3], begins[1:])


def layer(number: int, *, size: int, weight: int | None = None, kernel: int = 7) -> LayerCalls:
    """Two calls: a kernel on a weight and the second line of a tensor, and one on the tensor alone."""
    found = spans(size)
    place = int(found.begins[1 + number % 2])
    first = np.array([size, place + 4 * size, WEIGHTS + number if weight is None else weight], np.int64).tobytes()
    calls = [Call(kernel, first, 2, 16), Call(9, np.array([place, size], np.int64).tobytes(), 1, 0)]
    if number == LAST:
        calls.append(Call(3, np.array([place], np.int64).tobytes(), 1, 0))
    return LayerCalls.of(calls, found)


def layers(size: int) -> list[LayerCalls]:
    return [layer(i, size=size) for i in range(LAST + 1)]


def test_all_layers_follow_from_the_first_and_the_last() -> None:
    pattern = LayerPattern(layers(8))
    assert pattern.needed == (0, LAST)
    want = layers(3)
    made = pattern.complete({i: want[i] for i in pattern.needed})
    assert made is not None
    calls, words = made
    assert [(c.function, c.threads, c.num_outputs) for c in calls] == [
        (c.function, c.threads, c.num_outputs) for one in want for c in one.calls
    ]
    large = spans(8).begins.tolist()
    for i, got in enumerate(np.split(words, [5 * n for n in range(1, LAST + 1)])):
        place = large[1 + i % 2]  # where the larger step has it; the second line lies at the smaller step's length
        assert got.tolist() == [3, place + 12, WEIGHTS + i, place, 3, *([place] if i == LAST else [])]


def test_the_words_of_the_shape_itself_are_those_recorded() -> None:
    known = layers(8)
    made = LayerPattern(known).complete(dict(enumerate(known)))
    assert made is not None and (made[1] == np.concatenate([one.words for one in known])).all()


def test_one_layer_of_each_kind_is_needed() -> None:
    kernels = [4, 5, 6, 5, 6, 6, 5, 6, 5, 6, 6]
    pattern = LayerPattern([*(layer(i, size=8, kernel=kernel) for i, kernel in enumerate(kernels)), layer(11, size=8)])
    assert pattern.needed == (0, 1, 2, 11)


def test_a_larger_shape_is_refused() -> None:
    pattern = LayerPattern(layers(3))
    assert pattern.complete({i: layer(i, size=4) for i in pattern.needed}) is None


def test_layers_that_differ_by_the_shape_too_are_refused() -> None:
    pattern = LayerPattern([layer(i, size=8, weight=WEIGHTS + 8 * i) for i in range(LAST + 1)])
    found = {i: layer(i, size=4, weight=WEIGHTS + 4 * (i + 1)) for i in pattern.needed}
    assert pattern.complete(found) is None


def test_other_kernels_are_refused() -> None:
    pattern = LayerPattern(layers(8))
    assert pattern.complete({i: layer(i, size=4, kernel=8) for i in pattern.needed}) is None


def test_models_of_few_layers_are_recorded_whole() -> None:
    for count in (1, 2):
        assert LayerPattern(layers(8)[-count:]).needed == tuple(range(count))
