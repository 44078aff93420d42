"""When an engine's process runs Python's full garbage collection, which stops every sequence for as long as it takes.

Python itself runs it whenever the objects have grown by a quarter, over all of them. Here each collection freezes what
survives it, so the next one looks at newer objects only, and it runs before there are many of them: it takes a few
milliseconds. Cycles among frozen objects are freed by a collection over everything, once the process has so many
times as many blocks of memory as after the last one: ``IDLE_GROWTH`` in an idle moment, ``BUSY_GROWTH`` between two
steps. Ended programs leave no cycles, so under a steady load neither is reached. New grammars make objects that last:
under a load of them that never pauses, one step waits for the collection, about a second for each million objects.
"""

import gc
import sys

NEVER = 1 << 30
PASSES = 3  # over young objects, 7,000 more of them each
IDLE_GROWTH = 1.25
BUSY_GROWTH = 6.0


class Garbage:
    """Freezes the objects that exist when it is made; ``after_step`` collects among later ones."""

    def __init__(self) -> None:
        self._thresholds = gc.get_threshold()
        gc.freeze()
        # Blocks, not objects: Python counts frozen objects one by one, 50 ms for each million of them.
        self._num_lasting = sys.getallocatedblocks()
        gc.set_threshold(*self._thresholds[:2], NEVER)
        gc.enable()

    def after_step(self, *, is_idle: bool) -> None:
        if gc.get_count()[2] < PASSES:
            return
        is_whole = sys.getallocatedblocks() > (IDLE_GROWTH if is_idle else BUSY_GROWTH) * self._num_lasting
        if is_whole:
            gc.unfreeze()
        gc.collect()
        gc.freeze()
        if is_whole:
            self._num_lasting = sys.getallocatedblocks()

    def close(self) -> None:
        """Restore Python's own schedule."""
        gc.set_threshold(*self._thresholds)
        gc.unfreeze()
