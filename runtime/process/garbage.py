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
PASSES_COUNTED = 50  # before the frozen objects are counted under load, which takes 10 ms for a million
IDLE_GROWTH = 1.25
BUSY_GROWTH = 6.0


class Garbage:
    """Freezes the objects that exist when it is made; ``after_step`` collects among later ones."""

    def __init__(self) -> None:
        self._thresholds = gc.get_threshold()
        gc.freeze()
        self._num_lasting = gc.get_freeze_count()
        self._passes = 0  # since the frozen objects were counted
        gc.set_threshold(*self._thresholds[:2], NEVER)
        gc.enable()

    def after_step(self, *, is_idle: bool) -> None:
        passes = gc.get_count()[2]
        if passes < PASSES:
            return
        self._passes += passes
        if is_idle or self._passes >= PASSES_COUNTED:
            self._passes = 0
            if gc.get_freeze_count() > (IDLE_GROWTH if is_idle else BUSY_GROWTH) * self._num_lasting:
                gc.unfreeze()
                gc.collect()
                gc.freeze()
                self._num_lasting = gc.get_freeze_count()
                return
        gc.collect()
        gc.freeze()

    def close(self) -> None:
        """Restore Python's own schedule."""
        gc.set_threshold(*self._thresholds)
        gc.unfreeze()
