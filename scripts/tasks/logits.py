"""What `scripts.logits` does once its command line is known to be good."""

import argparse
import contextlib
import json
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import BinaryIO

import torch
from rich.progress import track
from torch import Tensor

from model.ranks import Group
from runtime.group import connected, leads, watched_load_any
from runtime.load import read_any_config
from runtime.memory import new_state
from runtime.op_sets import op_set
from runtime.options import usual
from runtime.output import replacing
from runtime.threads import set_threads
from runtime.watch import Watch
from scripts.console import Console
from scripts.flags import run_options

HEAD_ROWS = 64  # rows of logits at a time: those of a whole chunk would be the largest tensor of the run


def run(args: argparse.Namespace, ids: Sequence[int], lengths: Sequence[int], watch: Watch | None) -> int:
    """Run tokens in calls of these lengths, as one of several ranks where there is a watch; returns the exit status."""
    with connected(watch, args.device, args.rank_timeout) as group:
        return _logits(args, ids, lengths, watch, group)


def _logits(
    args: argparse.Namespace, ids: Sequence[int], lengths: Sequence[int], watch: Watch | None, group: Group
) -> int:
    options = run_options(args)
    config = read_any_config(args.model, options)
    ops = op_set(args.ops or usual(options.device), options, config)
    loaded = watched_load_any(watch, args.model, options, ops, group, context=len(ids))
    set_threads(args.threads, loaded)
    model = loaded.model
    tokens = torch.tensor(ids, device=model.device)
    state = new_state(model, len(tokens), max(lengths), args.decode_from or len(tokens))
    console, start, shape = Console(stderr=True), 0, [len(tokens), config.vocab_size]
    with written(args.out, *shape) if leads(watch) else contextlib.nullcontext(lambda _: None) as write:
        for length in track(lengths, "logits", console=console, transient=True, disable=not console.is_terminal):
            hidden = model(tokens[start : start + length], state)
            for part in hidden.split(HEAD_ROWS):
                write(model.logits(part))
            start += length
    console.say(f"{args.out}: logits {shape} float32 from {len(lengths)} calls")
    return 0


@contextlib.contextmanager
def written(path: Path, tokens: int, vocab: int) -> Iterator[Callable[[Tensor], None]]:
    """Yield what takes rows of logits, in order; the safetensors file is there after the ``with``.

    Its bytes are reserved before the first row comes: OSError, naming the file, on a disk that has no room for them.
    """
    nbytes = tokens * vocab * torch.float32.itemsize
    header = json.dumps({"logits": {"dtype": "F32", "shape": [tokens, vocab], "data_offsets": [0, nbytes]}})
    padded = header.encode().ljust(-(-len(header) // 8) * 8)
    with replacing(path) as partial, partial.open("r+b") as file:
        if sys.platform == "linux":  # elsewhere a full disk is found when it is full
            os.posix_fallocate(file.fileno(), 0, 8 + len(padded) + nbytes)
        file.write(len(padded).to_bytes(8, "little") + padded)
        yield lambda rows: _append(file, rows)
        assert file.tell() == 8 + len(padded) + nbytes, "a row of every token"


def _append(file: BinaryIO, rows: Tensor) -> None:
    file.write(rows.cpu().contiguous().numpy().data)
