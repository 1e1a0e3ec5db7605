"""How many threads a run takes when nobody says: those that nothing else is using. Memory that it keeps."""

import mmap
import platform
import resource
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


PAGES = 200_000_000 // mmap.PAGESIZE


def faults_of_tensors(keep):
    """Pages that the system hands out for 200 MB which were held, and freed, before."""
    if keep:
        process.keep_memory()
    for _ in range(4):
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        held = [torch.ones(5_000_000) for _ in range(10)]
        found = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
        del held
    return found


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another allocator is left as it is")
def test_memory_is_kept_for_the_next_call():
    assert 10 * call(faults_of_tensors, True) < min(PAGES, call(faults_of_tensors, False))
