"""How many threads a run takes when nobody says: those that nothing else is using. Memory that it keeps."""

import platform
from types import SimpleNamespace

import psutil
import pytest
import torch

from fathom.probes.child import call
from fathom.runtime import process


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
    monkeypatch.setattr(process.os, "cpu_count", lambda: cores)
    monkeypatch.setattr(process.os, "sched_getaffinity", lambda _: set(range(own)), raising=False)
    monkeypatch.setattr(psutil, "cpu_percent", lambda interval: percent if interval else 0.0)
    assert process.free_cores() == free


def test_small_models_take_one_thread_and_large_ones_what_is_free(monkeypatch):
    torch.set_num_threads(3)
    monkeypatch.setattr(process, "keep_memory", lambda: None)  # of this process
    monkeypatch.setattr(process, "free_cores", lambda: 2)
    monkeypatch.setattr(process, "token_bytes", lambda loaded: loaded.bytes)
    process.set_process(None, SimpleNamespace(bytes=process.SMALL))
    assert torch.get_num_threads() == 2
    process.set_process(None, SimpleNamespace(bytes=process.SMALL - 1))
    assert torch.get_num_threads() == 1
    process.set_process(3, SimpleNamespace(bytes=1))
    assert torch.get_num_threads() == 3


NUMBERS = 5_000_000  # of a tensor: 20 MB, more than malloc keeps by itself


def held_after(keep):
    """Bytes that a process which held ten tensors, and freed them, has beyond what it had before."""
    if keep:
        process.keep_memory()
    before = psutil.Process().memory_info().rss
    held = [torch.ones(NUMBERS) for _ in range(10)]
    del held
    return psutil.Process().memory_info().rss - before


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another allocator is left as it is")
def test_memory_is_kept_for_the_next_call():
    """Seen in what is resident: not every system counts the pages that it hands out."""
    size = 10 * NUMBERS * 4
    assert call(held_after, True) > 0.9 * size
    assert call(held_after, False) < 0.1 * size
