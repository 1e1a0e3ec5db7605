"""`python -m scripts.logits`: the logits of every position of a token sequence, as one float32 tensor."""

import argparse
import contextlib
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich.progress import track

from fathom.runtime.options import checked_config, usual
from fathom.runtime.output import reserved
from fathom.scripts.cli import arguments, run_on_ranks
from fathom.scripts.console import Console
from fathom.scripts.flags import (
    add_model,
    add_op_set,
    add_rank_timeout,
    add_run_options,
    add_threads,
    add_variants,
    chunk_lengths,
    positive,
    run_options,
)
from fathom.scripts.paths import Reads, Writes
from fathom.scripts.prompts import read_tokens

if TYPE_CHECKING:
    from fathom.model.ranks.ranks import Group
    from fathom.runtime.group.watchdog import Watch


HEAD_ROWS = 64  # rows of logits at a time: those of a whole chunk would be the largest tensor of the run


def parser() -> argparse.ArgumentParser:
    """Return the command line."""
    p = argparse.ArgumentParser(prog="python -m scripts.logits", description=__doc__)
    add_model(p)
    p.add_argument("--tokens", action=Reads, required=True, help="JSON list of token ids")
    p.add_argument("--out", action=Writes, required=True, help="safetensors file: logits [tokens, vocab] float32")
    p.add_argument("--decode-from", type=positive, help="prefill this number of tokens, feed the rest one at a time")
    add_run_options(p)
    add_op_set(p)
    add_variants(p)
    add_threads(p)
    add_rank_timeout(p)
    return p


def main(argv: Sequence[str] | None = None, watch: "Watch | None" = None) -> int:
    """Run the command line, as one of several ranks where there is a watch; returns the exit status."""
    args = arguments(parser(), argv, watch)
    options = run_options(args)
    ids = read_tokens(args.tokens, checked_config(args.model, options).vocab_size)
    lengths = chunk_lengths(len(ids), options.prefill_chunk, args.decode_from)
    return run(args, ids, lengths, watch)


def run(args: argparse.Namespace, ids: Sequence[int], lengths: Sequence[int], watch: "Watch | None") -> int:
    """Run tokens in calls of these lengths, as one of several ranks where there is a watch; returns the exit status."""
    from fathom.runtime.group.processes import connected

    with connected(watch, args.device, args.rank_timeout) as group:
        return _logits(args, ids, lengths, watch, group)


def _logits(
    args: argparse.Namespace, ids: Sequence[int], lengths: Sequence[int], watch: "Watch | None", group: "Group"
) -> int:
    import torch

    from fathom.runtime.group.processes import leads, watched_load_any
    from fathom.runtime.load import read_any_config
    from fathom.runtime.memory import new_state
    from fathom.runtime.op_sets import op_set
    from fathom.runtime.plan.experts import Work
    from fathom.runtime.process import set_process

    options = run_options(args)
    config = read_any_config(args.model, options)
    ops = op_set(args.ops or usual(options.device), options, config)
    prompt = args.decode_from or len(ids)
    work = Work.of(len(ids), prompt)
    loaded = watched_load_any(watch, args.model, options, ops, group, context=len(ids), work=work)
    set_process(args.threads, loaded)
    model = loaded.model
    tokens = torch.tensor(ids, device=model.device)
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


if __name__ == "__main__":
    sys.exit(run_on_ranks(main))
