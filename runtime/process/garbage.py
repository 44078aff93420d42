"""When an engine's process runs Python's full garbage collection, which stops every sequence for as long as it takes.

Python itself runs it whenever the objects have grown by a quarter, over all of them. Here each collection freezes what
survives it, so the next one looks at newer objects only: over 300 real schemas and their masks the longest took 102
instead of 196 ms, and all together 167 instead of 611 ms. Cycles among frozen objects are freed by a collection over
everything, once the frozen objects are so many times as many as after the last one: ``IDLE_GROWTH`` in an idle moment,
``BUSY_GROWTH`` between two steps. Ended programs leave no cycles, so under a steady load neither is reached.
"""

import gc

NEVER = 1 << 30
IDLE_PASSES = 10  # over young objects, 7,000 more of them each
BUSY_PASSES = 50
IDLE_GROWTH = 1.25
BUSY_GROWTH = 2.0


class Garbage:
    """Freezes the objects that exist when it is made; ``after_step`` collects among later ones."""

    def __init__(self) -> None:
        self._thresholds = gc.get_threshold()
        gc.freeze()
        self._num_lasting = 0  # not counted yet: that takes 18 ms
        gc.set_threshold(*self._thresholds[:2], NEVER)
        gc.enable()

    def after_step(self, *, is_idle: bool) -> None:
        if gc.get_count()[2] < (IDLE_PASSES if is_idle else BUSY_PASSES):
            return
        self._num_lasting = self._num_lasting or gc.get_freeze_count()
        if gc.get_freeze_count() > (IDLE_GROWTH if is_idle else BUSY_GROWTH) * self._num_lasting:
            self._collect_all()
        else:
            gc.collect()
            gc.freeze()

    def close(self) -> None:
        """Restore Python's own schedule."""
        gc.set_threshold(*self._thresholds)
        gc.unfreeze()

    def _collect_all(self) -> None:
        gc.unfreeze()
        gc.collect()
        gc.freeze()
        self._num_lasting = gc.get_freeze_count()
