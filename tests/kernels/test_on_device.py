"""What `pytest --device cuda` does to a launch, with copies on the host in place of a device."""

import os
import subprocess
import sys
from typing import NamedTuple

import pytest
import torch

from tests.by_hand import ROOT
from tests.on_device import HOST, Copies, on


class Given(NamedTuple):
    x: torch.Tensor
    size: int


def test_what_a_call_writes_into_its_tensors_comes_back():
    data = torch.arange(12.0)
    column = data.view(3, 4)[:, 1]
    seen = []

    def call(whole, given, out, *, scale):
        seen.append((whole.data_ptr(), given.x.data_ptr() - whole.data_ptr(), given.x.stride(), given.size))
        given.x.mul_(scale)  # a view of `whole`, there as here
        out.copy_(whole)
        assert data.tolist() == list(range(12)), "only copies are written"

    out = torch.zeros(12)
    on(HOST, call)(data, Given(column, 3), out, scale=10)
    assert data.tolist() == out.tolist() == [0, 10, 2, 3, 4, 50, 6, 7, 8, 90, 10, 11]
    address, offset, stride, size = seen[0]
    assert address != data.data_ptr()
    assert (offset, stride, size) == (4, (4,), 3)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.int64, torch.float8_e4m3fn, torch.float8_e8m0fnu])
def test_copies_are_the_same_bytes(dtype):
    x = torch.arange(48, dtype=torch.uint8).view(dtype)[1:]
    copies = Copies(HOST)
    there = copies(x)
    assert there.dtype == dtype
    assert torch.equal(there.view(torch.uint8), x.view(torch.uint8))
    assert copies(torch.empty(0, dtype=dtype)).shape == (0,)
    assert copies(3) == 3


TESTS = """
import pytest

@pytest.mark.parametrize("ops", ["reference", "cpu, small tiles", "bounds", "triton"])
def test_a(ops):
    import os
    assert "TRITON_INTERPRET" not in os.environ

@pytest.mark.interpreted
def test_b():
    raise AssertionError

def test_cpu_has_a_test_of_its_own():
    raise AssertionError
"""


def test_on_a_device_the_tests_of_triton_alone_run_and_none_after_its_time(tmp_path):
    (tmp_path / "conftest.py").write_text("from tests.conftest import *\n")
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers =\n  interpreted: x\n  slow: x\n")
    (tmp_path / "test_some.py").write_text(TESTS)

    def run(code, *more):
        command = [sys.executable, "-m", "pytest", "-rs", "-p", "no:cacheprovider", "--device", "cuda", *more]
        environment = os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": str(ROOT)}
        done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == code, done.stdout
        return done.stdout

    assert "1 passed, 5 deselected" in (told := run(1)), "but launched nothing there"
    assert "launched on cuda, 0 times: NOTHING" in told
    assert "1 skipped, 5 deselected" in (told := run(124, "--seconds", "0"))
    assert "not begun within 0 s" in told
    (tmp_path / "test_some.py").write_text("\n".join(f"def test_{n}(): ..." for n in range(7)))
    assert "3 passed, 4 deselected" in run(1, "--every", "3")
    slow = "import pytest\n" + "\n".join(f"@pytest.mark.slow\ndef test_s{n}(): ..." for n in range(2))
    (tmp_path / "test_a_slow.py").write_text(slow)
    assert "3 passed, 6 deselected" in run(1, "--every", "3", "-m", "not slow"), "slow ones are not counted"
    run(4, "--every", "0")
