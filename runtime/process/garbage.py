"""When an engine's process runs Python's full garbage collection, which stops every sequence for as long as it takes.

Python itself runs it whenever the objects have grown by a quarter, over all of them. Here each collection freezes what
survives it, so the next one looks at newer objects only, and it runs before there are many of them: it takes a few
milliseconds. Cycles among frozen objects are freed by a collection over everything, once the frozen objects are so many
times as many as after the last one: ``IDLE_GROWTH`` in an idle moment, ``BUSY_GROWTH`` between two steps. Ended
programs leave no cycles, so under a steady load neither is reached. New grammars make objects that last: under a load
of them that never pauses, one step waits for the collection, about a second for each million objects.
"""

import gc

NEVER = 1 << 30
PASSES = 3  # over young objects, 7,000 more of them each
IDLE_GROWTH = 1.25
BUSY_GROWTH = 6.0


class Garbage:
    """Freezes the objects that exist when it is made; ``after_step`` collects among later ones."""

    def __init__(self) -> None:
        self._thresholds = gc.get_threshold()
        gc.freeze()
        self._num_lasting = self._most_frozen = 0  # not counted yet: that takes 18 ms
        gc.set_threshold(*self._thresholds[:2], NEVER)
        gc.enable()

    def after_step(self, *, is_idle: bool) -> None:
        passes = gc.get_count()[2]
        if passes < PASSES:
            return
        if not self._num_lasting:
            self._num_lasting = self._most_frozen = gc.get_freeze_count()
        most = (IDLE_GROWTH if is_idle else BUSY_GROWTH) * self._num_lasting
        if self._most_frozen > most:  # as if none of them had been freed since
            self._most_frozen = gc.get_freeze_count()
        if self._most_frozen > most:
            gc.unfreeze()
            gc.collect()
            gc.freeze()
            self._num_lasting = self._most_frozen = gc.get_freeze_count()
        else:
            gc.collect()
            # Not len(gc.get_objects()): that list has tuples which another thread is still filling, and breaks them.
            self._most_frozen += (passes + 1) * self._thresholds[0] * self._thresholds[1]
            gc.freeze()

    def close(self) -> None:
        """Restore Python's own schedule."""
        gc.set_threshold(*self._thresholds)
        gc.unfreeze()
