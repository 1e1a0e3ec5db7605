"""What `scripts.logits` does once its command line is known to be good."""

import argparse
import contextlib
from collections.abc import Sequence

import torch
from rich.progress import track

from fathom.model.ranks.ranks import Group
from fathom.runtime.group.processes import connected, leads, watched_load_any
from fathom.runtime.group.watchdog import Watch
from fathom.runtime.load import read_any_config
from fathom.runtime.memory import new_state
from fathom.runtime.op_sets import op_set
from fathom.runtime.options import usual
from fathom.runtime.output import reserved
from fathom.runtime.plan.experts import Work
from fathom.runtime.process import set_process
from fathom.scripts.console import Console
from fathom.scripts.flags import run_options

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
    prompt = args.decode_from or len(ids)
    work = Work(prompt, 1 + len(ids) - prompt)  # one token more than steps
    loaded = watched_load_any(watch, args.model, options, ops, group, context=len(ids), work=work)
    set_process(args.threads, loaded)
    model = loaded.model
    tokens = torch.tensor(ids, device=model.device)
    prompt = args.decode_from or len(tokens)
    state = new_state(model, len(tokens), max(lengths), prompt)
    if state.unread:  # which layers read one after the other
        lengths = [prompt, *[1] * (len(tokens) - prompt)]
    console, start, shape = Console(stderr=True), 0, [len(tokens), config.vocab_size]
    file = reserved(args.out, {"logits": ("F32", shape)}) if leads(watch) else contextlib.nullcontext(lambda *_: None)
    with file as write:
        for length in track(lengths, "logits", console=console, transient=True, disable=not console.is_terminal):
            hidden = model(tokens[start : start + length], state)
            for part in hidden.split(HEAD_ROWS):
                write("logits", model.logits(part).cpu().contiguous().numpy().data)
            start += length
    console.say(f"{args.out}: logits {shape} float32 from {len(lengths)} calls")
    return 0
