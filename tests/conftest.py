"""Triton kernels run in its interpreter, unless ``--device cuda`` says otherwise, before they are imported."""

import importlib.util
import os
import re
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

INTERPRETER, CUDA = "interpreter", "cuda"
BEGAN = time.monotonic()
ON_DEVICE = pytest.StashKey[dict[str, int]]()
LEFT_OUT = pytest.StashKey[int]()  # tests that were not begun in time
OUT_OF_TIME = 124  # what coreutils' timeout ends with
LONG = (  # files that take a minute or more of a core: begun first, as one that is begun last would hold the end
    "kernels/test_triton_compile.py",
    "scripts/test_verdicts.py",
    "runtime/test_captured_step.py",
    "scripts/test_compare.py",
    "probes/test_recall_probe.py",
    "kernels/test_experts.py",
)

if not any(argument.endswith(CUDA) for argument in sys.argv):  # options are read after a conftest of a folder is
    os.environ["TRITON_INTERPRET"] = "1"


def pytest_addoption(parser):
    parser.addoption("--device", choices=(INTERPRETER, CUDA), default=INTERPRETER, help="where Triton's kernels run")
    parser.addoption("--seconds", type=float, help="begin no test later than this; those left out are told as skipped")
    parser.addoption("--every", type=_positive, default=1, metavar="N", help="with --device cuda: each Nth test alone")


def _positive(text: str) -> int:
    if (number := int(text)) < 1:
        raise ValueError(text)
    return number


def pytest_configure(config):
    if config.getoption("--device") == INTERPRETER:
        os.environ["TRITON_INTERPRET"] = "1"
    else:
        os.environ.pop("TRITON_INTERPRET", None)


@pytest.hookimpl(trylast=True)  # when those that -m leaves out are gone
def pytest_collection_modifyitems(config, items):
    """On a device those of other op sets say nothing, nor do those of the interpreter."""
    place = {Path(__file__).parent / name: place for place, name in enumerate(LONG)}
    items.sort(key=lambda item: place.get(item.path, len(LONG)))
    if config.getoption("--device") == INTERPRETER:
        return
    left_out = [item for item in items if item.get_closest_marker("interpreted") or _of_another_op_set(item)]
    there = [item for item in items if item not in left_out]
    left_out += [item for number, item in enumerate(there) if number % config.getoption("--every")]
    items[:] = [item for item in items if item not in left_out]
    config.hook.pytest_deselected(items=left_out)


def _of_another_op_set(item) -> bool:
    if re.match(r"test_(the_)?cpu_", item.name):
        return True
    given = getattr(item, "callspec", None)
    return given is not None and any(re.match(r"(reference|cpu|bounds)\b", name) for name in given.id.split("-"))


def pytest_runtest_setup(item):
    limit = item.config.getoption("--seconds")
    if limit is not None and time.monotonic() - BEGAN > limit:
        item.config.stash[LEFT_OUT] = item.config.stash.get(LEFT_OUT, 0) + 1
        pytest.skip(f"not begun within {limit:g} s")


def pytest_sessionfinish(session, exitstatus):
    """A session that left tests out, or launched nothing on the device that it was given, is no passed one."""
    if exitstatus == pytest.ExitCode.OK and session.config.stash.get(LEFT_OUT, 0):
        session.exitstatus = OUT_OF_TIME
    elif exitstatus == pytest.ExitCode.OK and not session.config.stash.get(ON_DEVICE, {"": 1}):
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


@pytest.fixture(scope="session", autouse=True)
def patched_interpreter(request) -> Iterator[None]:
    """Before any test that runs kernels, so that none sees the other state."""
    if importlib.util.find_spec("triton") is None:  # not every platform has it
        yield
        return
    if request.config.getoption("--device") == CUDA:
        import torch  # noqa: PLC0415

        from tests.on_device import launches  # noqa: PLC0415 -- it imports Triton

        with launches(torch.device(CUDA)) as counted:
            request.config.stash[ON_DEVICE] = counted
            yield
        return
    from tests.interpreter import patched  # noqa: PLC0415 -- it imports Triton

    with patched():
        yield


def pytest_terminal_summary(terminalreporter, config):
    """What ran on the device: a session that launched nothing there has shown nothing."""
    if (counted := config.stash.get(ON_DEVICE, None)) is not None:
        kernels = ", ".join(sorted(counted)) or "NOTHING"
        terminalreporter.write_line(f"launched on {CUDA}, {sum(counted.values())} times: {kernels}")


@pytest.fixture(scope="session", autouse=True)
def _loops_are_compiled(request):
    """Compiled before the first test: what a command says while it compiles stands in a test of its own."""
    if request.config.getoption("--device") == CUDA:
        return
    import fathom.kernels.ops  # noqa: F401, PLC0415 (its loops are known then)
    from fathom.kernels import compiled  # noqa: PLC0415

    compiled.prepare(lambda *_: True)
