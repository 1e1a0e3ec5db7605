"""A function in a process of its own, started afresh: its value, or its error in one line with what it printed.

For what a process alone can show: a peak of memory, which never falls; ranks; how a library behaves that is imported
under other variables of the environment. The function is named in an importable module, its arguments and its value
can be pickled, and tensors among them are copies. This module imports nothing heavy: a child has what it calls for, and
nothing of the program that started it (multiprocessing would run the main module of that once more).
"""

import contextlib
import os
import pickle
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.connection import Connection, wait
from types import MappingProxyType
from typing import Any, Self

from fathom.model.errors import (
    CapacityError,
    CheckpointError,
    ConfigError,
    RankDisagreement,
    StateError,
    Tripwire,
    one_line,
)
from fathom.probes.finding import ROOT, raised_at
from fathom.runtime.errors import PromptError

# Errors whose message says all: raised again as they are.
DIAGNOSTICS = (CapacityError, CheckpointError, ConfigError, PromptError, RankDisagreement, StateError, Tripwire)
AS_HERE: Mapping[str, str | None] = MappingProxyType({})
PRINTED = 500  # characters of what a child printed last that its error repeats


class ChildError(RuntimeError):
    """A child without a value: which function, what ended it and where, and what it printed last, in one line."""


class Child:
    """A function that runs in a process of its own, from here to the end of the ``with``, or to `value`.

    Parameters
    ----------
    function
        At the top level of a module.
    args
        Its arguments.
    environment
        Variables that differ in the child, set before it imports the function's module; None removes one.

    """

    def __init__(
        self, function: Callable[..., Any], *args: Any, environment: Mapping[str, str | None] = AS_HERE
    ) -> None:
        self.name = f"{function.__module__}.{function.__qualname__}"
        call, variables = pickle.dumps((function, args)), {**os.environ, **environment}
        variables["PYTHONPATH"] = os.pathsep.join(filter(None, (str(ROOT), variables.get("PYTHONPATH"))))
        self._printed = tempfile.TemporaryFile()  # noqa: SIM115 -- closed with the child
        reader, writer = os.pipe()
        self._process = subprocess.Popen(  # noqa: S603
            [sys.executable, "-P", "-m", __name__, str(writer)],  # -P: not beside what the folder it runs in may hold
            stdin=subprocess.PIPE,
            stdout=self._printed,
            stderr=self._printed,
            pass_fds=(writer,),
            env={name: value for name, value in variables.items() if value is not None},
        )
        os.close(writer)  # so that the end of the process is the end of the pipe
        self._answer = Connection(reader, writable=False)
        assert self._process.stdin is not None, "it is a pipe"
        with contextlib.suppress(BrokenPipeError), self._process.stdin as given:  # one that has ended: `value` says so
            given.write(call)

    @property
    def pid(self) -> int:
        """Of the process, for whoever watches it from outside."""
        return self._process.pid

    @property
    def running(self) -> bool:
        """Whether neither a value nor an error nor the end of the process has come yet."""
        return not self._answer.poll()

    def value(self, limit: float | None = None) -> Any:
        """What the function returned.

        Raises
        ------
        ChildError
            It raised, the process died, or nothing came in `limit` seconds. One of `DIAGNOSTICS` is raised as it
            was in the child.

        """
        if not self._answer.poll(limit):
            raise ChildError(f"{self.name}: no answer in time{self._last_words()}")
        try:
            done, answer = pickle.loads(self._answer.recv_bytes())  # noqa: S301 -- our own child's
        except EOFError:
            status = self._process.wait()
            raise ChildError(f"{self.name}: ended with status {status}{self._last_words()}") from None
        if done:
            return answer
        raise answer if isinstance(answer, DIAGNOSTICS) else ChildError(f"{self.name}: {answer}{self._last_words()}")

    def _last_words(self) -> str:
        self._printed.seek(0)
        text = self._printed.read().decode(errors="replace").strip()
        return f"; it printed: {one_line(text[-PRINTED:])}" if text else ""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.wait()
        self._answer.close()
        self._printed.close()


def call(function: Callable[..., Any], *args: Any, environment: Mapping[str, str | None] = AS_HERE) -> Any:
    """``function(*args)`` in a process of its own; see `Child`."""
    with Child(function, *args, environment=environment) as child:
        return child.value()


def call_together(
    function: Callable[..., Any], calls: Sequence[tuple[Any, ...]], limit: float, grace: float
) -> list[Any]:
    """``function(*args)`` for each of `calls`, all at once, each in a process of its own.

    Parameters
    ----------
    function, calls
        As `Child` takes them.
    limit
        Seconds for all of it.
    grace
        Seconds that the others still have once one has failed.

    Returns
    -------
    list[Any]
        Values in the order of `calls`, and in place of a value the error that `Child.value` raises.

    """
    children: list[Child] = []
    outcomes: list[Any] = [None] * len(calls)
    deadline = time.monotonic() + limit
    try:
        children += [Child(function, *args) for args in calls]
        waiting = {child._answer: n for n, child in enumerate(children)}  # noqa: SLF001 -- of this module
        while waiting:
            ended = wait(list(waiting), max(0.0, deadline - time.monotonic())) or list(waiting)
            for place in [waiting.pop(answer) for answer in ended if isinstance(answer, Connection)]:
                try:
                    outcomes[place] = children[place].value(0.0)
                except (ChildError, *DIAGNOSTICS) as error:
                    outcomes[place] = error
                    deadline = min(deadline, time.monotonic() + grace)
    finally:
        for child in children:
            child.__exit__()
    return outcomes


def _answer() -> None:
    """In the child: call what stdin says, and answer with whether it is a value, and the value or the error."""
    with Connection(int(sys.argv[1]), readable=False) as answer:
        try:
            function, args = pickle.load(sys.stdin.buffer)  # noqa: S301 -- our own parent's
            said = pickle.dumps((True, function(*args)))
        except DIAGNOSTICS as error:
            said = pickle.dumps((False, error))
        except Exception as error:  # noqa: BLE001 -- whatever it is, the parent raises it
            said = pickle.dumps((False, one_line(f"{type(error).__name__}: {error} (at {raised_at(error)})")))
        sys.stdout.flush()
        answer.send_bytes(said)


if __name__ == "__main__":
    _answer()
