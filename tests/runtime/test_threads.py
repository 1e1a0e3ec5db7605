"""How many threads a run takes when nobody says: those that nothing else is using."""

from types import SimpleNamespace

import psutil
import pytest
import torch

from runtime import threads


@pytest.fixture(autouse=True)
def unchanged():
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize(
    ("cores", "own", "percent", "free"),
    [
        (2, 2, 0.0, 2),
        (2, 2, 50.0, 1),
        (2, 2, 100.0, 1),
        (64, 64, 0.5, 64),
        (64, 64, 50.0, 32),
        (64, 8, 25.0, 1),
        (1, 1, 90.0, 1),
    ],
)
def test_cores_that_others_use_are_left_to_them(monkeypatch, cores, own, percent, free):
    """Of `own` cores that the process may use; what is busy may be any of the machine's."""
    monkeypatch.setattr(threads.os, "cpu_count", lambda: cores)
    monkeypatch.setattr(threads.os, "sched_getaffinity", lambda _: set(range(own)), raising=False)
    monkeypatch.setattr(psutil, "cpu_percent", lambda interval: percent if interval else 0.0)
    assert threads.free_cores() == free


def test_small_models_take_one_thread_and_large_ones_what_is_free(monkeypatch):
    torch.set_num_threads(3)
    monkeypatch.setattr(threads, "free_cores", lambda: 2)
    monkeypatch.setattr(threads, "token_bytes", lambda loaded: loaded.bytes)
    threads.set_threads(None, SimpleNamespace(bytes=threads.SMALL))
    assert torch.get_num_threads() == 2
    threads.set_threads(None, SimpleNamespace(bytes=threads.SMALL - 1))
    assert torch.get_num_threads() == 1
    threads.set_threads(3, SimpleNamespace(bytes=1))
    assert torch.get_num_threads() == 3
