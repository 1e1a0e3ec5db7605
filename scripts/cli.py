"""What every script does with an error that is not the code's fault: one line on stderr and exit status 2."""

import os
import sys
from collections.abc import Callable

import torch

from model.errors import CapacityError, CheckpointError, ConfigError, StateError
from model.tripwire import Tripwire
from runtime.errors import PromptError

USER_ERRORS = (ConfigError, CheckpointError, CapacityError, StateError, PromptError)

TRIPPED = 1
# What a shell reports for a process that SIGINT or SIGPIPE ended.
INTERRUPTED, PIPE_CLOSED = 130, 141


def run(main: Callable[[], int]) -> int:
    """Run a script's `main` and return the exit status.

    Parameters
    ----------
    main : Callable[[], int]
        Returns 0 (done) or 1 (a probe failed or a tripwire fired).

    Returns
    -------
    int
        What `main` returned, or 2 when a file, tensor, prompt or flag is at fault, or what a shell reports for an
        interrupted process. An error of the code itself is raised as it is.
    """
    try:
        return main()
    except USER_ERRORS as error:
        message = str(error)
    except BrokenPipeError:  # whoever read our output has closed it, as `| head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return PIPE_CLOSED
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return INTERRUPTED
    except torch.OutOfMemoryError as error:
        message = f"out of memory on the device: {str(error).splitlines()[0]}"
    except Tripwire as error:
        print(f"tripwire: {error}", file=sys.stderr)
        return TRIPPED
    except OSError as error:
        message = str(error) if error.filename is None else f"{error.filename}: {error.strerror}"
    print("; ".join(message.splitlines()), file=sys.stderr)
    return 2
