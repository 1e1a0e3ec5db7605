"""How a run on several ranks ends, with processes started by hand: no launcher takes the blame or does the killing.

The program is `tests.rank_program`; its ranks meet in ten collectives and fail as they are told.
"""

import signal
import time

import pytest

from fathom.runtime.group.failures import GONE
from tests.by_hand import ByHand

MODULE = "tests.rank_program"
STARTS = 60.0  # seconds that the processes may take to start, on a busy machine


def ended(folder, n, *flags, **how):
    """Run to the end; returns statuses and the console."""
    with ByHand(folder, n, MODULE, *flags, **how) as run:
        statuses, _ = run.statuses(STARTS)
        return statuses, run.console, run


@pytest.mark.slow
def test_all_goes_well_and_rank_0_alone_speaks(tmp_path):
    statuses, console, run = ended(tmp_path, 2)
    assert statuses == [0, 0]
    assert console == [f"progress {turn}" for turn in range(10)]
    assert run.out(0).splitlines() == [f"round {turn}" for turn in range(10)]
    assert run.out(1) == ""


@pytest.mark.slow
def test_a_user_error_that_all_ranks_find_is_told_once(tmp_path):
    statuses, console, _ = ended(tmp_path, 2, "--how", "early")
    assert len(console) == 1
    assert console[0][:5] + console[0][6:] == "rank : prompt: is empty"
    assert statuses.count(2) >= 1
    assert set(statuses) <= {1, 2}


def test_a_rank_that_is_killed_is_named_by_another(tmp_path):
    """Blocked in a collective that fails at once, the others still wait until they know whose heartbeats stopped."""
    with ByHand(tmp_path, 2, MODULE, "--seconds", "0.5", "--rank-timeout", "4", store="test") as run:
        run.until(lambda: "round 2" in run.out(0))
        run.send(signal.SIGKILL, 1)
        statuses, seconds = run.statuses()
        assert statuses == [1, -signal.SIGKILL]
        assert 3 < seconds < 8  # from the last heartbeat, which was before the signal
        told = [line for line in run.console if not line.startswith("progress")]
        assert len(told) == 1
        assert told[0].startswith("rank 1 died or was stopped, last seen at collective ")
        assert "(gather): no heartbeat for 4 s" in told[0]


def test_a_rank_that_dies_in_a_dispatch_ends_all_of_them(tmp_path):
    with ByHand(tmp_path, 3, MODULE, "--how", "dispatch", "--rank", "1", "--rank-timeout", "4", store="test") as run:
        statuses, seconds = run.statuses()
    assert statuses == [1, -signal.SIGKILL, 1]
    assert seconds < 30  # and not the minutes of a collective that nobody ends
    told = [line for line in run.console if not line.startswith("progress")]
    assert len(told) == 1
    assert told[0].startswith("rank 1 died or was stopped, last seen at collective 6 (experts.dispatch): no heartbeat")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("flags", "statuses", "told"),
    [
        (("--what",), [2, 2], ["rank_program: unrecognized arguments: --what"]),
        (("--help",), [0, 0], []),
        (("--how", "early", "--rank", "1"), [1, 2], ["rank 1: prompt: is empty"]),
        (("--how", "trip", "--rank", "0"), [1, 1], ["rank 0: tripwire: hidden of layer 3 at position 7: NaN"]),
        (("--how", "disagree"), [1, 1], ["ranks disagree: sampled token, at [0]: 5 on rank 0, 6 on rank 1"]),
        (("--how", "late", "--rank", "0"), [2, 1], ["rank 0: out.json: no space left"]),
        (("--how", "late", "--rank", "1"), [1, 2], ["rank 1: out.json: no space left"]),
        (("--how", "status", "--rank", "1"), [1, 1], []),
        (("--how", "raise", "--rank", "1"), [1, 1], ["rank 1:", "Traceback", "KeyError: 'a bug'"]),
        (("--how", "raise"), [1, 1], ["rank ", "Traceback", "KeyError: 'a bug'"]),
        (("--how", "collective", "--rank", "1"), [1, 1], ["rank 1:", "Traceback", "RuntimeError: "]),
        (("--how", "hang", "--rank", "1", "--rank-timeout", "3"), [1, 1], ["rank 1 hangs: it did not reach collect"]),
        (("--how", "hang", "--rank", "0", "--rank-timeout", "3"), [1, 1], ["rank 0 hangs: it did not reach collect"]),
        (("--how", "spin", "--rank", "1", "--rank-timeout", "3"), [1, 1], ["rank 1 hangs: it did not reach collect"]),
        (("--how", "slow-load", "--rank", "1", "--rank-timeout", "3"), [0, 0], []),
    ],
)
def test_the_first_cause_is_told_once(tmp_path, flags, statuses, told):
    found, console, run = ended(tmp_path, 2, *flags)
    assert found == statuses
    shown = [line for line in console if not line.startswith(("progress", " "))]
    assert len(shown) == len(told)
    for line, start in zip(shown, told, strict=True):
        assert start in line, console
    assert run.out(1) == ""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("store", "number", "ranks", "statuses", "told"),
    [
        ("rank 0", signal.SIGKILL, (1,), [1, -9], "rank 1 died or was stopped, last seen at collective "),
        ("rank 0", signal.SIGKILL, (0,), [-9, 1], "rank 0 died: the store that it kept is gone; it was last seen at"),
        ("test", signal.SIGKILL, (0,), [-9, 1], "rank 0 died or was stopped, last seen at collective "),
        ("test", signal.SIGSTOP, (1,), [1, -9], "rank 1 died or was stopped, last seen at collective "),
        ("rank 0", signal.SIGSTOP, (0,), [-9, 1], "rank 0 died: the store that it kept did not answer for "),
        ("rank 0", signal.SIGTERM, (1,), [1, 143], "rank 1 was terminated by a signal"),
        ("rank 0", signal.SIGINT, (0, 1), [130, 130], "interrupted"),
    ],
)
def test_a_signal_ends_the_run_in_time(tmp_path, store, number, ranks, statuses, told):
    timeout = 5
    flags = ("--seconds", "0.5", "--rank-timeout", str(timeout))
    with ByHand(tmp_path, 2, MODULE, *flags, store=store) as run:
        run.until(lambda: "round 2" in run.out(0))
        run.send(number, *ranks)
        found, seconds = run.statuses(stopped=ranks if number == signal.SIGSTOP else ())
        assert found == statuses
        assert seconds < timeout + 3
        shown = [line for line in run.console if not line.startswith("progress")]
        assert len(shown) == 1
        assert shown[0].startswith(told)


@pytest.mark.slow
def test_ctrl_c_while_blocked_in_a_collective(tmp_path):
    with ByHand(tmp_path, 2, MODULE, "--how", "hang", "--rank", "1", store="test") as run:
        run.until(lambda: "round 4" in run.out(0))
        time.sleep(1)  # rank 0 is in the next collective, where no exception reaches it; rank 1 sleeps
        run.send(signal.SIGINT, 0, 1)
        statuses, seconds = run.statuses()
        assert statuses == [130, 130]
        assert seconds < 8
        assert [line for line in run.console if not line.startswith("progress")] == ["interrupted"]


@pytest.mark.slow
def test_two_of_four_die_at_once(tmp_path):
    with ByHand(tmp_path, 4, MODULE, "--seconds", "0.3") as run:
        run.until(lambda: "round 2" in run.out(0))
        run.send(signal.SIGKILL, 2, 3)
        statuses, seconds = run.statuses()
        assert statuses == [1, 1, -9, -9]
        assert seconds < GONE + 3
        shown = [line for line in run.console if not line.startswith("progress")]
        assert len(shown) == 1
        assert shown[0].startswith(("rank 2 died", "rank 3 died"))


@pytest.mark.slow
def test_the_launcher_that_keeps_the_store_is_gone(tmp_path):
    with ByHand(tmp_path, 2, MODULE, "--seconds", "0.5", store="test") as run:
        run.until(lambda: "round 2" in run.out(0))
        run.store = None  # ends the store
        statuses, seconds = run.statuses()
        assert statuses == [1, 1]
        assert seconds < 5
        shown = [line for line in run.console if not line.startswith("progress")]
        assert shown == ["the launcher's store is gone"]


@pytest.mark.slow
def test_one_that_never_comes(tmp_path):
    """Two are told of a third that nobody starts."""
    with ByHand(tmp_path, 2, MODULE, "--rank-timeout", "4", WORLD_SIZE="3") as run:
        statuses, _ = run.statuses()
        assert statuses == [1, 1]
        assert len(run.console) == 1
        assert "rank 2 never came, 4 s after rank " in run.console[0]


@pytest.mark.slow
def test_own_pause_is_no_silence_of_the_others(tmp_path):
    """As when a laptop sleeps: nobody is blamed for the hours in which nobody ran."""
    with ByHand(tmp_path, 2, MODULE, "--seconds", "0.5", "--rank-timeout", "3", store="test") as run:
        run.until(lambda: "round 2" in run.out(0))
        run.send(signal.SIGSTOP, 0, 1)
        time.sleep(8)
        run.send(signal.SIGCONT, 0, 1)
        assert run.statuses()[0] == [0, 0]
        assert len(run.console) == 10
