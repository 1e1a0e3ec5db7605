"""Compiling what a GPU runs, before the run: Triton compiles a kernel when it is first launched."""

import sys
from typing import Final

import torch

from fathom.model.architectures import Model
from fathom.model.observe.observer import observed
from fathom.runtime.memory import new_state

# Tokens of calls, after those of a chunk, which launch what calls of other sizes do: tiles of attention and of products
# follow powers of two up to 128 tokens, and a compressor has a way for fewer tokens than its window, and one for more.
SIZES: Final = (1, 2, 4, 8, 16, 32, 64, 128)
LONGEST: Final = 4096  # tokens of a chunk that is rehearsed, at most: beyond it nothing is cut up in another way


def prepare_kernels(model: Model, chunk: int, context: int | None, *, say: bool) -> None:
    """Rehearse a chunk of a prompt, the rest of one and a decoded token, by this rank alone: each kernel is compiled.

    Nothing that it computes ends a run, for it means nothing on several ranks; what looks at it is rehearsed too.
    Compiled later, kernel by kernel, is what a rehearsal cannot reach: rows of more than 16,384 index scores are split
    (65,536 positions of CSA), HCA has longer tiles beyond 262,144 positions, tiles of experts follow the tokens that
    other ranks send, banks of CoDA grow, and a graph has kernels for its tripwires, which its own warm-up compiles.
    CapacityError where its caches do not fit, which are no larger than those of a run.

    Parameters
    ----------
    model : Model
        On a GPU, not run before.
    chunk, context : int, int | None
        Tokens of a call, and positions of the run, at most; None: not known yet.
    say : bool
        Whether to tell stderr.
    """
    calls = sizes(chunk, min(context or model.config.max_position_embeddings, model.config.max_position_embeddings))
    if say:
        told = ", ".join(map(str, calls))
        print(
            f"compiling kernels for this GPU, minutes where none are kept of an earlier run: calls of {told} tokens",
            file=sys.stderr,
            flush=True,
        )
    ran = dict(model.arithmetic.ran)
    with observed(model).rehearsing(), model.arithmetic.ranks.apart(), torch.inference_mode():
        state = new_state(model, sum(calls), max(calls), sum(calls[:-1]))
        for size in calls:
            tokens = torch.arange(size, device=model.device) % model.config.vocab_size
            model.logits(model(tokens, state)[-1:])
    if model.device.type == "cuda":
        torch.cuda.synchronize()
    model.arithmetic.ran.clear()
    model.arithmetic.ran.update(ran)


def sizes(chunk: int, context: int) -> list[int]:
    """Tokens of the calls that are rehearsed, the longest first; together no more than the context."""
    found: list[int] = []
    for size in SIZES:
        if size < chunk and sum(found) + size < context:
            found.append(size)
    return [min(chunk, LONGEST, context - sum(found)), *reversed(found)]
