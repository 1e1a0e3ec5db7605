"""`python -m probes.memory.peak`: what a process that does nothing but run a prompt takes; JSON in and JSON out.

A process of its own, because a peak never falls: another probe's past would hide it. It carries the run's checkpoint,
options, op set and a fault of `probes.faults`; an op set or fault without such a name it cannot carry.
"""

import ctypes
import itertools
import json
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.profiler import profile

from kernels.ops import BLOCKED, REFERENCE
from model.state import State
from model.transformer import Transformer
from model.tripwire import Tripwire
from probes.faults import FAULTS
from probes.subject import Subject
from runtime.options import RunOptions
from runtime.report import peak_memory

OPS = {ops.name: ops for ops in (BLOCKED, REFERENCE)}
BALLAST = 64 << 20  # bytes that the process takes at the end, to see that its peak shows them
DECODED = 4  # tokens after each prompt, one by one
M_MMAP_THRESHOLD = -3  # malloc.h


class Peak(NamedTuple):
    """Bytes, all of them."""

    steady: bool  # whether freed memory goes back to the system at once, so that differences of peaks mean something
    base: int  # peak after loading
    peaks: list[int]  # after each prompt, its own and all earlier states still there
    calls: list[int]  # at most held at once in one more call after each prompt, beyond what was there
    far: int  # the same at the far position
    ballast: int  # peak after `BALLAST` more


def cannot_carry(subject: Subject) -> str | None:
    """Why another process cannot run this subject; None when it can."""
    if OPS.get(subject.ops.name) != subject.ops:
        return f"the op set {subject.ops.name} has no name that another process knows"
    if subject.fault is not None and FAULTS.get(subject.fault.name) != subject.fault:
        return f"the fault {subject.fault.name} has no name that another process knows"
    return None


def measure(subject: Subject, contexts: tuple[int, ...], far: int) -> Peak | str:
    """Run prompts of `contexts` tokens, ascending, one after the other in a new process; then a call at `far`.

    Returns the tripwire that ended it, in words, when one did.
    """
    request = {
        "directory": str(subject.directory.resolve()),
        "options": asdict(subject.options),
        "ops": subject.ops.name,
        "fault": subject.fault and subject.fault.name,
        "seed": subject.seed,
        "prompt": subject.prompt,
        "contexts": contexts,
        "far": far,
        "threads": torch.get_num_threads(),
    }
    child = subprocess.run(
        [sys.executable, "-m", "probes.memory.peak"],
        input=json.dumps(request),
        capture_output=True,
        text=True,
        check=False,
        cwd=Path(__file__).resolve().parents[2],
    )
    if child.returncode:
        raise RuntimeError(f"probes.memory.peak ended with status {child.returncode}: {child.stderr[-2000:]}")
    answer: dict[str, Any] | str = json.loads(child.stdout)
    return answer if isinstance(answer, str) else Peak(**answer)


def main() -> None:
    """Answer the request on stdin."""
    steady = _give_back_at_once()
    request = json.load(sys.stdin)
    torch.set_num_threads(request["threads"])
    options, fault = RunOptions(**request["options"]), FAULTS.get(request["fault"])
    directory, ops = Path(request["directory"]), OPS[request["ops"]]
    subject = Subject(directory, options, ops, fault, request["seed"], request["prompt"])
    try:
        answer: dict[str, Any] | str = _run(subject, request["contexts"], request["far"], steady=steady)._asdict()
    except Tripwire as trip:
        answer = str(trip)
    json.dump(answer, sys.stdout)


def _run(subject: Subject, contexts: list[int], far: int, *, steady: bool) -> Peak:
    model, chunk, device = subject.model, subject.options.prefill_chunk, subject.options.device
    tokens = torch.tensor(subject.tokens(max(contexts) + DECODED + chunk), device=device)
    base, peaks, states = peak_memory(device), [], []
    for context in contexts:
        state = model.new_state(context + DECODED + chunk, chunk)
        for part in (*tokens[:context].split(chunk), *tokens[context:][:DECODED].split(1)):
            model.logits(model(part, state)[-1:])
        states.append(state)
        peaks.append(peak_memory(device))
    ballast = torch.ones(BALLAST, dtype=torch.uint8, device=device)
    after = peak_memory(device)
    del ballast
    calls = [_call_bytes(model, state, tokens[-chunk:]) for state in states]
    distant = _call_bytes(model, _noise_up_to(model, far, chunk), tokens[-chunk:])
    return Peak(steady, base, peaks, calls, distant, after)


def _give_back_at_once() -> bool:
    """Let glibc map every large tensor on its own, so that freeing it lowers the resident set; whether that worked.

    Otherwise it keeps what was freed for later, more of it or less from run to run (7 MiB in the demo).
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    return mallopt is not None and mallopt(M_MMAP_THRESHOLD, 1 << 16) == 1


def _noise_up_to(model: Transformer, position: int, chunk: int) -> State:
    """A state at `position` whose caches hold noise: what a call takes there depends on how much, not on what."""
    state = model.new_state(position + chunk, chunk)
    for cache in state.layers:
        cache.restore(position, {name: torch.randn(shape) for name, shape in cache.shapes(position).items()})
    state.position = position
    return state


def _call_bytes(model: Transformer, state: State, part: Tensor) -> int:
    """The largest sum of tensors alive at one moment of a call, beyond those from before."""
    if model.device.type == "cuda":
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        model(part, state)
        return torch.cuda.max_memory_allocated() - before
    with profile(profile_memory=True) as profiler:
        model(part, state)
    assert profiler.kineto_results is not None
    events = [event for event in profiler.kineto_results.events() if event.name() == "[memory]"]
    events.sort(key=lambda event: event.start_ns())
    sizes: list[int] = [event.nbytes() for event in events]
    return max(itertools.accumulate(sizes))


if __name__ == "__main__":
    main()
