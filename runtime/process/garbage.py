"""When an engine's process looks through all its objects for garbage: while nobody waits, not between two tokens.

Left to itself Python does so whenever they have grown by a quarter, which holds up every sequence for a third of a
second once some hundreds of grammars lie there. Never touches what reference counts free by themselves.
"""

import gc

NEVER = 1 << 30
IDLE_PASSES = 10  # over young objects, 7,000 more of them each
BUSY_PASSES = 500  # by then some hundred megabytes may be garbage


class Garbage:
    """From now on what is there is taken to stay, and ``after_step`` says when to look through the rest."""

    def __init__(self) -> None:
        gc.collect()
        gc.freeze()
        self._thresholds = gc.get_threshold()
        gc.set_threshold(*self._thresholds[:2], NEVER)

    def after_step(self, *, is_idle: bool) -> None:
        if gc.get_count()[2] >= (IDLE_PASSES if is_idle else BUSY_PASSES):
            gc.collect()

    def close(self) -> None:
        """Python decides again."""
        gc.set_threshold(*self._thresholds)
        gc.unfreeze()
