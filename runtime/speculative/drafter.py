"""The interface of a drafter, and the values that it takes and returns."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import numpy as np

from ..scheduler import Draft

if TYPE_CHECKING:
    from ...constrained import Matcher
    from ...protocol.sampling import SamplingParams


@dataclass(frozen=True, slots=True, eq=False)
class Want:
    """A sequence whose next token is computed in this step, and that can have a draft of at most ``limit`` tokens.

    ``tokens`` (int32, a view) are all its tokens; the first ``num_cached`` were in the cache. ``is_first`` marks the
    first request of a generation, before which tokens may have been replaced. ``ends`` would end the text, so drafting
    them gains nothing. The next token is drawn by ``params`` with the random number of ``seed`` and its position.
    ``adapter`` is the model's number of the text's adapter, -1 for none.
    ``is_ready`` of some tokens says whether ``matcher`` takes them, and tells the masks between, without long work.
    """

    seq_id: int
    tokens: np.ndarray
    is_first: bool
    num_cached: int
    namespace: str
    limit: int
    ends: frozenset[int]
    matcher: "Matcher | None" = None
    is_ready: Callable[[Sequence[int]], bool] | None = None
    params: "SamplingParams | None" = None
    seed: int = 0
    adapter: int = -1


@dataclass(frozen=True, slots=True)
class Price:
    """What draft tokens are worth in this step, in seconds: an accepted one saves ``token_s``, each one that is run
    costs ``row_s``. ``gain_s`` is the expected gain of the best draft of the drafters asked before.
    """

    token_s: float
    row_s: float
    gain_s: float = 0.0

    def gain(self, reached: np.ndarray) -> float:
        """The expected gain of a draft, in seconds, if only the tokens that pay are run.

        ``reached``: each token's chance that it and every token before it are accepted.
        """
        each = reached * self.token_s - self.row_s
        return float(each[each > 0.0].sum())


@dataclass(frozen=True, slots=True, eq=False)
class Proposal:
    """A draft, and each token's chance (float64 [k]) to be accepted given that the tokens before it are."""

    draft: Draft
    chances: np.ndarray

    def reached(self) -> np.ndarray:
        """float64 [k]: each token's chance that it and all before it are accepted."""
        return np.multiply.accumulate(self.chances)


class Drafter(Protocol):
    """Proposes drafts. It is shown every token that sequences get, whichever drafter proposed it.

    ``source``: the name that its time is counted under; its drafts may have other names.
    """

    source: str

    def propose(self, want: Want, price: Price) -> Proposal | None:
        """A draft of at most ``want.limit`` tokens. The engine may run a part of it or none.

        A drafter that needs more than microseconds runs only if it expects to gain more than ``price.gain_s``.
        """
        ...

    def observe(self, seq_id: int, made: np.ndarray) -> None:
        """The tokens ``made`` (int32) followed those of the sequence's last ``Want``."""
        ...

    def rest(self, seq_id: int) -> None:
        """A generation of the sequence has ended."""
        ...

    def flush(self) -> None:
        """Forget all tokens; acceptance rates stay."""
        ...

    def forget(self, seq_id: int) -> None:
        """The sequence has ended."""
        ...
