"""What every script does with its command line, and with an error that is not the code's fault: one line, status 2.

A command line is parsed, and its files looked at, before torch is imported. On several ranks there is one line in all:
that of the first rank which failed, see `runtime.group.watchdog`.
"""

import argparse
import contextlib
import io
import os
import re
import shlex
import signal
import sys
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, NoReturn, Protocol

from fathom.model.architectures import config_from_file
from fathom.model.checkpoint.folder import read_headers
from fathom.model.errors import (
    CapacityError,
    CheckpointError,
    ConfigError,
    RankDisagreement,
    StateError,
    Tripwire,
    did_you_mean,
    one_line,
)
from fathom.runtime.errors import PromptError
from fathom.runtime.options import TIMEOUT
from fathom.runtime.output import NO_ROOM, discard_unfinished
from fathom.scripts import hub, paths
from fathom.scripts.launch import launched

if TYPE_CHECKING:
    from fathom.runtime.group.watchdog import Watch


class UsageError(ValueError):
    """A command line that argparse refused, in one line."""


class Terminated(BaseException):
    """SIGTERM or SIGHUP came: the run ends, and with it what it had begun to write."""


USER_ERRORS = (ConfigError, CheckpointError, CapacityError, StateError, PromptError, UsageError)
EXPECTED = (*USER_ERRORS, Tripwire, RankDisagreement, OSError, KeyboardInterrupt, Terminated)

# What a shell reports for a process that a signal ended.
INTERRUPTED = 128 + signal.SIGINT
PIPE_CLOSED = 128 + signal.SIGPIPE
TERMINATED = 128 + signal.SIGTERM


class RankedMain(Protocol):
    """The `main` of a script that runs on any number of ranks."""

    def __call__(self, argv: Sequence[str] | None = None, watch: "Watch | None" = None) -> int:
        """Run the command line on this rank; returns the exit status."""
        ...


def run(main: Callable[[], int]) -> int:
    """Run a script's `main` and return the exit status.

    Parameters
    ----------
    main : Callable[[], int]
        Returns 0 (done) or 1 (a probe failed or a tripwire fired).

    Returns
    -------
    int
        What `main` returned, or 2 when a file, tensor, prompt or flag is at fault, or what a shell reports for a
        process that a signal ended. An error of the code itself is raised as it is.
    """
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is signal.SIG_DFL:  # not where a launcher, or nohup, has its own way
            signal.signal(number, _terminate)
    try:
        status = main()
        sys.stdout.flush()  # a reader that is gone is noticed here, or never
    except (*EXPECTED, RuntimeError) as error:
        if not _expected(error):
            raise
        status, line = _told(error)
        if line is not None:
            print(line, file=sys.stderr)
    return status


def run_alone(main: Callable[[], int]) -> int:
    """`run` for a script that knows no ranks: where a launcher started several, they would all do the same work."""

    def once() -> int:
        launch = launched()
        if launch is None or launch.size == 1:
            return main()
        if launch.rank > 0:
            return 2
        raise ConfigError(f"this script runs alone, and torchrun started {launch.size} of it")

    return run(once)


def run_on_ranks(main: RankedMain) -> int:
    """Run a script's `main` as one of the ranks that a launcher started, or alone where none did; see `run`.

    Only rank 0 has a stdout and a stderr to write to. A rank that fails tells why on the console if it was the first
    one, and ends with the status that it would have alone; the others end with 1. None of them returns.
    """
    return run(lambda: _on_ranks(main))


def _on_ranks(main: RankedMain) -> int:
    launch = launched()
    if launch is None or launch.size == 1:
        return main()
    from fathom.runtime.group.store import open_store
    from fathom.runtime.group.watchdog import Watch

    watch = Watch(launch, open_store(launch, TIMEOUT, keep=launch.keeps_store))
    watch.start()
    if launch.rank > 0:
        sys.stdout = sys.stderr = Path(os.devnull).open("w", encoding="utf-8")  # noqa: SIM115 -- until the process ends
    try:
        return watch.close(_ended(main, watch))
    except BaseException as error:
        if _expected(error):
            status, line = _told(error)
            alike = isinstance(error, (UsageError, KeyboardInterrupt))  # on all ranks
            watch.end(status, line if line is None or alike else f"rank {launch.rank}: {line}")
        watch.end(1, f"rank {launch.rank}:\n{''.join(traceback.format_exception(error)).rstrip()}")
        raise


def _ended(main: RankedMain, watch: "Watch") -> int:
    """The status of `main`; does not return when it failed because another rank did."""
    try:
        return main(None, watch)
    except SystemExit as end:  # of --help
        if end.code:
            raise
        return 0
    except RuntimeError as error:
        if _in_collective(error):
            watch.someone_else_failed()
        raise


def _in_collective(error: RuntimeError) -> bool:
    """Whether torch.distributed raised this, as it does when a peer is gone."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    return trace is not None and str(trace.tb_frame.f_globals["__name__"]).startswith("torch.distributed")


def arguments(
    parser: argparse.ArgumentParser, argv: Sequence[str] | None, watch: "Watch | None" = None
) -> argparse.Namespace:
    """Parse the command line, get a model that the hub has, and look at the files named, and into them.

    ConfigError or CheckpointError, naming the file, for what is seen there without torch.

    On several ranks rank 0 writes all files. The result's `command_line` is the command line as pages tell it.
    """
    args = parsed(parser, argv)
    given = sys.argv[1:] if argv is None else argv
    words = [paths.told(Path(word)) if Path(word).is_absolute() else word for word in given]
    start = ["python"] if watch is None else ["torchrun", "--nproc-per-node", str(watch.launch.size)]
    args.command_line = shlex.join([*start, *parser.prog.split()[1:], *words])
    if "hub_needs" in args:
        hub.locate(args, watch)
    if watch is None or watch.launch.rank == 0:
        paths.check(args)
        _check_models(args)
    return args


def _check_models(args: argparse.Namespace) -> None:
    """Refuse models with a damaged config.json, or whose files have a damaged header: ConfigError, CheckpointError.

    They are read again when torch is there. That is cheap beside loading: the headers of V4-Pro, 142,773 tensors, take
    1.3 s of one core.
    """
    partial = getattr(args, "hub_needs", None) == hub.INDEX
    for _, path, *_ in getattr(args, paths.Models.kind, []):
        config_from_file(path / "config.json")
        if getattr(args, "headers", None) is None:  # of a model on the hub, whose files are not here
            read_headers(path, partial=partial)


def parsed(
    parser: argparse.ArgumentParser, argv: Sequence[str] | None, into: argparse.Namespace | None = None
) -> argparse.Namespace:
    """Parse a command line alone; UsageError with what argparse says of a bad one, without the usage before it."""
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said):
            return parser.parse_args(argv, into)
    except SystemExit as end:
        if not end.code:
            raise
        (line,) = re.findall(r"^[^\n]*: error: .*", said.getvalue(), re.MULTILINE | re.DOTALL)
        unknown = re.search(r"unrecognized arguments: (--\S+)", line)
        flags = [flag for action in parser._actions for flag in action.option_strings]  # noqa: SLF001 -- no other way
        hint = "" if unknown is None else did_you_mean(unknown[1].partition("=")[0], flags)
        raise UsageError(one_line(line.strip().replace(": error: ", ": ", 1)) + hint) from end


def _terminate(number: int, frame: FrameType | None) -> NoReturn:
    del number, frame
    raise Terminated


def _expected(error: BaseException) -> bool:
    return isinstance(error, EXPECTED) or _out_of_memory(error)


def _out_of_memory(error: BaseException) -> bool:
    """Whether a device has no memory left; only torch can say so, and it may not be there yet."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(error, torch.OutOfMemoryError)


def _drop_stdout() -> None:
    """Let go of what cannot be written, so that nothing tries again when the process ends."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _told(error: BaseException) -> tuple[int, str | None]:
    """The exit status for an error that is expected, and the line for the console."""
    if isinstance(error, BrokenPipeError):  # whoever read our output has closed it, as `| head` does
        _drop_stdout()
        return PIPE_CLOSED, None
    if isinstance(error, KeyboardInterrupt):
        return INTERRUPTED, "interrupted"
    if isinstance(error, Terminated):
        discard_unfinished()  # exceptions have done it, but in threads
        return TERMINATED, "terminated"
    if isinstance(error, UsageError):
        return 2, str(error)
    message, status = str(error), 2
    if isinstance(error, Tripwire):
        message, status = f"tripwire: {error}", 1
    elif isinstance(error, RankDisagreement):
        message, status = f"ranks disagree: {error}", 1
    elif _out_of_memory(error):
        message = f"out of memory on the device: {message.splitlines()[0]}"
    elif isinstance(error, OSError) and error.filename is None and error.errno in NO_ROOM:
        _drop_stdout()  # `runtime.output` names every other file
        message = f"standard output: {error.strerror}"
    elif isinstance(error, OSError) and error.filename is not None:
        message = f"{os.fsdecode(error.filename)}: {error.strerror}"
    return status, one_line(message)
