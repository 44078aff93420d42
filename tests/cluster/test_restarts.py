"""Restarts of an engine: waits that double, a limit within a window, and the reset of both."""

import pytest
from phloem.cluster.restarts import RestartPolicy, Restarts
from phloem.protocol.errors import InvalidParams


def waits(restarts: Restarts, losses: list[tuple[float, float]]) -> list[float | None]:
    """``losses``: seconds served, and the time of the loss. The next engine starts at once after each wait."""
    found = []
    for served_s, now_s in losses:
        found.append(wait_s := restarts.after_loss(served_s=served_s, now_s=now_s))
        if wait_s is not None:
            restarts.started(now_s + wait_s)
    return found


def test_waits_double_up_to_their_limit_and_begin_anew_after_a_while_of_service():
    policy = RestartPolicy(backoff_s=1.0, max_backoff_s=5.0, max_restarts=100)
    losses = [(0.1, 0.0), (0.1, 1.0), (0.1, 2.0), (4.9, 3.0), (0.0, 4.0), (5.0, 50.0), (0.1, 60.0), (0.1, 70.0)]
    assert waits(Restarts(policy), losses) == [0.0, 1.0, 2.0, 4.0, 5.0, 0.0, 1.0, 2.0]


def test_the_limit_counts_restarts_within_the_window():
    restarts = Restarts(RestartPolicy(backoff_s=0.0, max_restarts=2, window_s=10.0))
    assert waits(restarts, [(1.0, 0.0), (1.0, 5.0), (1.0, 9.9)]) == [0.0, 0.0, None]
    assert restarts.num_recent(9.9) == 2 and restarts.total == 2
    assert waits(restarts, [(1.0, 10.1), (1.0, 10.2)]) == [0.0, None], "the first restart is out of the window"
    assert Restarts(RestartPolicy(max_restarts=0)).after_loss(served_s=1e9, now_s=0.0) is None


def test_a_very_long_row_of_losses_has_a_finite_wait():
    restarts = Restarts(RestartPolicy(max_restarts=10_000, window_s=1e9))
    assert waits(restarts, [(0.0, float(i)) for i in range(3000)])[-1] == 30.0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"step_timeout_s": 0.0}, "step_timeout_s=0.0: it must be above 0 seconds"),
        ({"window_s": float("nan")}, "window_s=nan: it must be above 0 seconds"),
        ({"max_restarts": -1}, "max_restarts=-1: it must be 0 or above"),
        ({"backoff_s": -0.5}, "backoff_s=-0.5: it must be 0 or above"),
    ],
)
def test_a_policy_that_makes_no_sense_is_named(options, message):
    with pytest.raises(InvalidParams, match=message):
        RestartPolicy(**options)
