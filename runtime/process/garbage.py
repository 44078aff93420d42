"""When an engine's process runs Python's full garbage collection: while it is idle, not between two tokens.

Python itself runs it whenever the objects have grown by a quarter; with some hundreds of grammars in memory that
stops every sequence for a third of a second.
"""

import gc

NEVER = 1 << 30
IDLE_PASSES = 10  # over young objects, 7,000 more of them each
BUSY_PASSES = 500  # some hundred megabytes of garbage at the most


class Garbage:
    """Freezes the objects that exist when it is made; ``after_step`` collects among later ones."""

    def __init__(self) -> None:
        gc.collect()
        gc.freeze()
        self._thresholds = gc.get_threshold()
        gc.set_threshold(*self._thresholds[:2], NEVER)

    def after_step(self, *, is_idle: bool) -> None:
        if gc.get_count()[2] >= (IDLE_PASSES if is_idle else BUSY_PASSES):
            gc.collect()

    def close(self) -> None:
        """Restore Python's own schedule."""
        gc.set_threshold(*self._thresholds)
        gc.unfreeze()
