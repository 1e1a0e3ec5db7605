"""Functions in processes of their own: values and errors come back, and nothing of a child stays."""

import os
import sys
import time

import pytest

from fathom.model.errors import ConfigError, RankDisagreement, Tripwire
from fathom.probes.child import Child, ChildError, call, call_together

TRIP = Tripwire("logits", None, 7, "nan", "finite")
RAISED = [TRIP, RankDisagreement("streams", 3, 1, (0, 2), 1.5, 1.25), ConfigError("config.json: no")]


def answer(what, wait=0.0):
    """What a child does in these tests: by what it is asked."""
    time.sleep(wait)
    if isinstance(what, Exception):
        raise what
    if what == "die":
        print("last words", flush=True)
        os.kill(os.getpid(), 9)
    return os.environ.get("ASKED"), what


def imported():
    return list(sys.modules)


def test_a_value_comes_back_from_a_process_of_its_own():
    assert call(os.getpid) != os.getpid()
    assert call(answer, list(range(100_000)), environment={"ASKED": "yes"}) == ("yes", list(range(100_000)))
    assert "ASKED" not in os.environ


def test_a_child_runs_where_its_parent_does_and_imports_nothing_from_there(tmp_path, monkeypatch):
    (tmp_path / "probes.py").write_text("raise SystemExit")
    monkeypatch.chdir(tmp_path)
    assert call(os.getcwd) == str(tmp_path)


def test_variables_of_the_environment_are_taken_away_too(monkeypatch):
    monkeypatch.setenv("ASKED", "here")
    assert call(answer, 1) == ("here", 1)
    assert call(answer, 1, environment={"ASKED": None}) == (None, 1)


@pytest.mark.parametrize("error", RAISED, ids=lambda error: type(error).__name__)
def test_a_diagnostic_is_raised_as_it_was(error):
    with pytest.raises(type(error)) as raised:
        call(answer, error)
    assert str(raised.value) == str(error)
    assert vars(raised.value) == vars(error)


@pytest.mark.parametrize(
    ("what", "message"),
    [
        (KeyError("x\ny"), r"test_child.answer: KeyError: .* \(at tests/probes/test_child.py:\d+\)$"),
        ("die", "test_child.answer: ended with status -9; it printed: last words$"),
    ],
)
def test_what_ends_a_child_is_told_in_one_line(what, message):
    with pytest.raises(ChildError, match=message) as raised:
        call(answer, what)
    assert "\n" not in str(raised.value)


def test_a_child_can_be_watched_and_ends_with_the_block():
    with Child(answer, 1, 60.0) as child:
        assert child.running
        os.kill(child.pid, 0)
        with pytest.raises(ChildError, match="no answer in time"):
            child.value(0.1)
    with pytest.raises(ProcessLookupError):
        os.kill(child.pid, 0)


def test_children_together_answer_each_for_itself_and_wait_no_longer_than_the_grace():
    began = time.monotonic()
    values = call_together(answer, [(1,), (TRIP,), (2, 60.0)], limit=60.0, grace=2.0)
    assert values[0] == (None, 1)
    assert str(values[1]) == str(TRIP)
    assert "no answer in time" in str(values[2])
    assert time.monotonic() - began < 30


def test_a_child_imports_nothing_that_it_is_not_asked_for():
    assert not {"torch", "numpy"} & set(call(imported))
