"""The kernel calls of all layers of a model, made from the calls of a few of them.

Most layers make the same calls as another one on the same memory for activations, with other weights and other keys and
values. So once all layers have been recorded for one shape of step, other shapes need only some of them:

    first shape     0 | 1 | 2 | 3 | 4 | .. | 26 | 27 | 28 | last     all recorded; 1, 3, .. 27 repeat each other,
                                                                     and so do 2, 4, .. 28
    another shape   0 | 1 | 2 | 3 |                   | 28 | last    recorded, one after the other
                                  | 4 | .. | 26 | 27 |               4: the calls of 2, with 4's weights and keys

Layers 3 and 28 are also made, from 1 and 2, and must be equal to what was recorded.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from ...kernels.cpu.recording import Arena, Call

_LEAST_ADDRESS = 1 << 32  # smaller words of a call record are sizes and numbers


@dataclass(frozen=True, slots=True)
class LayerCalls:
    """The calls of one layer, and their records one after the other in ``words``.

    ``kind`` is equal for layers that call the same kernels with equal sizes on the same memory of the arena.
    """

    calls: tuple[Call, ...]
    words: np.ndarray  # int64
    kind: bytes

    @classmethod
    def of(cls, calls: Sequence[Call], arena: Arena) -> LayerCalls:
        words = np.frombuffer(b"".join(call.block for call in calls), dtype=np.int64)
        kept = np.where((np.abs(words) < _LEAST_ADDRESS) | arena.covers(words), words, 0)
        heads = [(call.function, len(call.block), call.threads) for call in calls]
        return cls(tuple(calls), words, np.array(heads, dtype=np.int64).tobytes() + kept.tobytes())

    @property
    def kernels(self) -> list[tuple[int, int]]:
        """Which kernels are called, with the lengths of their records."""
        return [(call.function, len(call.block)) for call in self.calls]

    def with_words(self, words: np.ndarray) -> LayerCalls:
        """The same calls with other records."""
        data, calls, begin = words.tobytes(), [], 0
        for call in self.calls:
            end = begin + len(call.block)
            calls.append(replace(call, block=data[begin:end]))
            begin = end
        return LayerCalls(tuple(calls), words, self.kind)


class LayerPattern:
    """Which layers repeat which, learnt from the calls of all layers for one shape.

    ``needed``: the layers that must be recorded for another shape, in order. They have every kind of layer, and each
    pair of kinds that follow one another. So each layer that is made finds the activations where the one before it
    leaves them.
    """

    def __init__(self, layers: Sequence[LayerCalls]) -> None:
        self._layers = tuple(layers)
        last = len(layers) - 1
        needed, pairs, i = [0], set[tuple[bytes, bytes]](), 0
        while i < last:
            known = i
            while known + 1 < last and (layers[known].kind, layers[known + 1].kind) in pairs:
                known += 1
            before = max(j for j in range(i, known + 1) if layers[j].kind == layers[i].kind)
            i = before + 1
            pairs.add((layers[before].kind, layers[i].kind))
            needed.append(i)
        self.needed = tuple(needed)
        first_of: dict[bytes, int] = {}
        self._model_of = {i: first_of.setdefault(layers[i].kind, i) for i in range(last)}

    def complete(self, found: Mapping[int, LayerCalls]) -> list[LayerCalls] | None:
        """The calls of all layers, from those of the layers ``needed``.

        None where they do not follow: the layers differ in something that also depends on the shape, or other kernels
        are called for this shape.
        """
        every = []
        for i in range(len(self._layers)):
            calls, model = found.get(i), self._model_of.get(i, i)
            if model != i:
                repeated = self._repeated(i, model, found[model])
                if repeated is None or (calls is not None and repeated.calls != calls.calls):
                    return None
                calls = repeated
            assert calls is not None, i
            every.append(calls)
        return every

    def _repeated(self, layer: int, model: int, calls: LayerCalls) -> LayerCalls | None:
        """The calls of ``layer``, which repeats ``model``, for the shape in which ``model`` makes ``calls``."""
        known, known_model = self._layers[layer].words, self._layers[model].words
        if calls.kernels != self._layers[model].kernels:
            return None
        differs = known != known_model
        if not np.array_equal(calls.words[differs], known_model[differs]):
            return None
        return calls.with_words(np.where(differs, known, calls.words))
