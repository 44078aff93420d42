"""The kernel calls of all layers of a model for one shape of step, made from the calls of a few layers.

Most layers make the same calls as another one, with other weights and other keys and values. Steps of another shape
make the same calls too, with other sizes. So once all layers have been recorded for a large step, a smaller one needs
only one layer of each kind:

    large step      0 | 1 | 2 | 3 | .. | 28 | last     all recorded; 1, 2, .. 28 repeat each other
    another step    0 | 1 |                 | last     recorded, one after the other
                          | 2 | 3 | .. | 28 |          the sizes of 1, and each layer's own addresses in the large step

Every tensor of a step lies where the large step has its own, which has room for it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from ...kernels.cpu.recording import Call, TensorPlaces

_LEAST_ADDRESS = 1 << 32  # smaller words of a call record are sizes and numbers


@dataclass(frozen=True, slots=True)
class LayerCalls:
    """The calls of one layer. ``words`` are their records one after the other. A word that is an address in the arena
    lies ``bases`` plus an offset, in a tensor of ``rooms`` bytes; of other words both are 0.

    ``kind`` is equal for layers that call the same kernels with equal sizes.
    """

    calls: tuple[Call, ...]
    words: np.ndarray  # int64 [W], as the next two
    bases: np.ndarray
    rooms: np.ndarray
    kind: bytes

    @classmethod
    def of(cls, calls: Sequence[Call], places: TensorPlaces) -> LayerCalls:
        """``places``: the tensors of the recording that the calls are from."""
        words = np.frombuffer(b"".join(call.block for call in calls), dtype=np.int64)
        bases, rooms = places.around(words)
        sizes = np.where(np.abs(words) < _LEAST_ADDRESS, words, 0)
        heads = [(call.function, len(call.block), call.threads) for call in calls]
        kind = np.array(heads, dtype=np.int64).tobytes() + sizes.tobytes() + (bases != 0).tobytes()
        return cls(tuple(calls), words, bases, rooms, kind)

    @property
    def kernels(self) -> list[tuple[int, int]]:
        """Which kernels are called, with the lengths of their records."""
        return [(call.function, len(call.block)) for call in self.calls]


@dataclass(frozen=True, slots=True)
class _Kind:
    """The layers of one kind, of which the first one's calls are recorded for every shape."""

    kernels: list[tuple[int, int]]
    layers: tuple[int, ...]
    words: np.ndarray  # int64 [layers, W]
    bases: np.ndarray  # int64 [layers, W]
    rooms: np.ndarray  # int64 [W]: the least of all layers
    is_own: np.ndarray  # bool [W]: words other than addresses in the arena in which the layers differ

    @classmethod
    def of(cls, numbers: tuple[int, ...], layers: Sequence[LayerCalls]) -> _Kind:
        words = np.stack([layer.words for layer in layers])
        bases = np.stack([layer.bases for layer in layers])
        rooms = np.min([layer.rooms for layer in layers], axis=0)
        is_own = (words != words[0]).any(axis=0) & (bases[0] == 0)
        return cls(layers[0].kernels, numbers, words, bases, rooms, is_own)

    def with_sizes(self, first: LayerCalls) -> np.ndarray | None:
        """The words [layers, W] of all layers for the shape in which the first one makes these calls."""
        if first.kernels != self.kernels:
            return None
        is_placed, is_own = first.bases != 0, self.is_own
        if (
            not np.array_equal(is_placed, self.bases[0] != 0)
            or (first.rooms > self.rooms).any()
            or not np.array_equal(first.words[is_own], self.words[0, is_own])
        ):
            return None
        return np.where(is_own, self.words, np.where(is_placed, self.bases + (first.words - first.bases), first.words))


class LayerPattern:
    """Which layers repeat which, and where their tensors lie, learnt from the calls of all layers for one shape.

    ``needed``: the layers that must be recorded for another shape, in order: the first of each kind, and the last.
    """

    def __init__(self, layers: Sequence[LayerCalls]) -> None:
        last = len(layers) - 1
        of_kind: dict[bytes, list[int]] = {}
        for i, layer in enumerate(layers[:last]):
            of_kind.setdefault(layer.kind, []).append(i)
        numbers = (*of_kind.values(), [last])  # what follows the last layer belongs to it
        self._kinds = [_Kind.of(tuple(each), [layers[i] for i in each]) for each in numbers]
        self.needed = tuple(sorted(each[0] for each in numbers))

    def complete(self, found: Mapping[int, LayerCalls]) -> tuple[list[Call], np.ndarray] | None:
        """All layers' calls, of which the records are the words int64 [N] beside them, one after the other. ``found``:
        the layers ``needed``, recorded for another shape.

        None where they do not follow: other kernels are called for this shape, a tensor has no room, or layers differ
        in something that also depends on the shape.
        """
        calls: dict[int, tuple[Call, ...]] = {}
        words: dict[int, np.ndarray] = {}
        for kind in self._kinds:
            first = found[kind.layers[0]]
            made = kind.with_sizes(first)
            if made is None:
                return None
            for i, line in zip(kind.layers, made, strict=True):
                calls[i], words[i] = first.calls, line
        order = range(len(calls))
        return [call for i in order for call in calls[i]], np.concatenate([words[i] for i in order])
