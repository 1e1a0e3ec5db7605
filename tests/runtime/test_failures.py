"""The rules by which a rank is blamed, on heartbeats that are made up: who, when, and above all when not."""

import pytest

from fathom.runtime.group.failures import (
    DEAD,
    DONE,
    FAILED,
    GONE,
    LOADING,
    LOADS,
    LONGEST,
    RUNNING,
    TERMINATED,
    Heartbeat,
    LastSeen,
    verdict,
)

TIMEOUT = 60.0


def seen(collectives, *, stood=0.0, silent=0.0, phase=RUNNING):
    """A rank whose last heartbeat came `silent` seconds ago and whose count has stood for `stood`."""
    seen = LastSeen()
    seen.heartbeat, seen.stood, seen.silent = Heartbeat(9, phase, 0, collectives, "gather"), max(stood, silent), silent
    return seen


def judged(*all_seen, own=0, failed=False, timeout=TIMEOUT):
    return verdict(own, all_seen, timeout, failed=failed)


def test_a_beat_survives_the_store():
    heartbeat = Heartbeat(3, LOADING, 2, 17, "attention.output of many words")
    assert Heartbeat.decode(heartbeat.encode()) == heartbeat


def test_a_look_counts_seconds_since_something_was_new():
    seen = LastSeen()
    seen.look(None, 0.75)
    assert (seen.heartbeat, seen.silent, seen.stood) == (None, 0.75, 0.75)
    for number, collectives, silent, stood in [(1, 4, 0.0, 0.0), (2, 4, 0.0, 0.5), (2, 4, 0.5, 1.0), (3, 5, 0.0, 0.0)]:
        seen.look(Heartbeat(number, RUNNING, 0, collectives, "gather"), 0.5)
        assert (seen.silent, seen.stood) == (silent, stood)
    seen.look(Heartbeat(4, DONE, 0, 5, "gather"), 0.5)
    assert seen.stood == 0.0, "another phase is a step too"


def test_a_pause_of_this_process_is_no_silence_of_the_others():
    seen = LastSeen()
    seen.look(Heartbeat(1, RUNNING, 0, 4, "gather"), 0.5)
    seen.look(Heartbeat(1, RUNNING, 0, 4, "gather"), 3600.0)
    assert (seen.silent, seen.stood) == (LONGEST, LONGEST)


@pytest.mark.parametrize(
    "all_seen",
    [
        (seen(5), seen(5)),
        (seen(5, stood=1e4), seen(5, stood=1e4)),  # all compute, for hours
        (seen(6, stood=59), seen(5, stood=59)),
        (seen(6, stood=59), seen(5, stood=1e4)),  # it was slow to get there, but the others have just come
        (seen(6, stood=1e4), seen(5, stood=59)),
        (seen(5), seen(5, silent=1e4)),  # no heartbeats, but nobody waits for it
        (seen(5, stood=9), seen(5, silent=1e4)),
        (seen(6, stood=1e4), seen(5, stood=599, phase=LOADING)),
        (seen(6, stood=1e4, phase=DONE), seen(6, silent=1e4, phase=DONE)),  # gone, as it should be
        (seen(6, stood=1e4), seen(5, stood=1e4, phase=FAILED)),  # it will say by itself
        (seen(5), LastSeen()),  # not started yet
    ],
)
def test_no_reason_to_blame_anybody(all_seen):
    assert judged(*all_seen) is None


def test_a_silent_rank_is_dead_once_this_one_stands():
    told = "rank 1 died or was stopped, last seen at collective 5 (gather): no heartbeat for 10 s"
    assert judged(seen(5, stood=DEAD), seen(5, silent=DEAD)) == told
    assert judged(seen(5, stood=9.9), seen(5, silent=DEAD)) is None
    assert judged(seen(5, stood=DEAD), seen(5, silent=9.9)) is None


def test_a_failed_collective_makes_silence_count_sooner():
    assert judged(seen(5), seen(5, silent=GONE), failed=True).endswith("no heartbeat for 4 s")
    assert judged(seen(5), seen(5, silent=3.9), failed=True) is None


def test_a_short_timeout_shortens_both():
    assert judged(seen(5, stood=3), seen(5, silent=3), timeout=3).endswith("no heartbeat for 3 s")
    assert judged(seen(5), seen(5, silent=3), failed=True, timeout=3).endswith("no heartbeat for 3 s")


def test_the_rank_that_fell_silent_first_is_blamed():
    assert judged(seen(5, stood=20), seen(5, silent=11), seen(5, silent=13)).startswith("rank 2 died")
    assert judged(seen(5, stood=20), seen(5, silent=13), seen(5, silent=13)).startswith("rank 1 died")


def test_one_that_was_terminated_followed_another():
    ended = seen(5, silent=15, phase=TERMINATED)
    assert judged(seen(5, stood=20), ended, seen(5, silent=11)).startswith("rank 2 died")
    assert judged(seen(5, stood=20), ended, seen(5)) == "rank 1 was terminated by a signal"


def test_one_that_never_came():
    late = LastSeen()
    late.silent = TIMEOUT
    assert judged(seen(0, phase=LOADING), late) == "rank 1 never came, 60 s after rank 0"
    early = LastSeen()
    early.silent = 59.0
    assert judged(seen(0, phase=LOADING), early) is None


def test_one_that_keeps_others_waiting_hangs():
    told = "rank 1 hangs: it did not reach collective 6 (gather), others have waited 60 s"
    assert judged(seen(6, stood=60), seen(5, stood=70)) == told
    assert judged(seen(5, stood=70), seen(6, stood=60), own=1).startswith("rank 0 hangs"), "also of itself"
    assert judged(seen(8, stood=70), seen(8, stood=60), seen(5, stood=70), seen(6, stood=70)) == (
        "rank 2 hangs: it did not reach collective 6, others have waited 60 s"
    ), "the one furthest behind; the name of a later collective says nothing of the sixth"
    assert judged(seen(6, stood=70), seen(5, stood=70, phase=DONE)).startswith("rank 1 hangs"), "it ended too soon"


def test_loading_may_take_longer():
    assert judged(seen(1, stood=1e4), seen(0, stood=TIMEOUT * LOADS, phase=LOADING)).startswith("rank 1 hangs")
    died = judged(seen(1, stood=20), seen(0, silent=20, phase=LOADING))
    assert died == "rank 1 died or was stopped, last seen while loading: no heartbeat for 20 s"
