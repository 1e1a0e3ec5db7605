"""`python -m probes.memory.peak`: what a process that does nothing but run a prompt takes; JSON in and JSON out.

A process of its own, because a peak never falls: another probe's past would hide it. It carries the run's checkpoint,
options, op set and a fault of `probes.faults`; an op set or fault without such a name it cannot carry.
"""

import ctypes
import gc
import json
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import torch

from kernels.ops import CPU, REFERENCE
from model.cache.entries import Entries
from model.errors import Tripwire
from model.state import State
from model.transformer import Transformer
from probes.faults import FAULTS
from probes.memory.live import live_bytes
from probes.subject import Subject
from runtime.load import load
from runtime.options import RunOptions
from runtime.report import peak_memory

OPS = {ops.name: ops for ops in (CPU, REFERENCE)}
BALLAST = 64 << 20  # bytes that the process takes at the end, to see that its peak shows them
DECODED = 4  # tokens after each prompt, one by one
NOISE = 4096  # rows of noise at once: less than a call takes, or it would be the peak
M_MMAP_THRESHOLD = -3  # malloc.h
STATUS, CLEAR_REFS = Path("/proc/self/status"), Path("/proc/self/clear_refs")


class Peak(NamedTuple):
    """Bytes, all of them."""

    steady: bool  # whether freed memory goes back to the system at once, so that differences of peaks mean something
    base: int  # peak after loading
    peaks: list[int]  # after each prompt, its own and all earlier states still there
    calls: list[int]  # at most held at once in one more call after each prompt, beyond what was there
    far: int  # the same at the far position
    ballast: int  # peak after `BALLAST` more


class Beyond(NamedTuple):
    """What a process took for one call, beyond what it held before and after everything was let go; bytes."""

    steady: bool
    base: int
    peak: int


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
    answer = _ask(subject, contexts=contexts, far=far)
    return answer if isinstance(answer, str) else Peak(**answer)


def beyond_base(subject: Subject, context: int, chunk: int) -> Beyond | str:
    """Load and run one call of `chunk` tokens at the end of `context` positions, in a new process, twice.

    The first time, the system and torch's libraries take what they keep; the second is measured. Returns the tripwire
    that ended it, in words, when one did.
    """
    answer = _ask(subject, context=context, chunk=chunk)
    return answer if isinstance(answer, str) else Beyond(**answer)


def _ask(subject: Subject, **what: Any) -> dict[str, Any] | str:
    request = {
        "directory": str(subject.directory.resolve()),
        "options": subject.options.to_json(),
        "ops": subject.ops.name,
        "fault": subject.fault and subject.fault.name,
        "seed": subject.seed,
        "prompt": subject.prompt,
        "threads": torch.get_num_threads(),
        **what,
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
        why = child.stderr.strip().rpartition("\n")[2]
        raise RuntimeError(f"probes.memory.peak ended with status {child.returncode}: {why}")
    answer: dict[str, Any] | str = json.loads(child.stdout)
    return answer


def main() -> None:
    """Answer the request on stdin."""
    steady = _give_back_at_once()
    request = json.load(sys.stdin)
    torch.set_num_threads(request["threads"])
    options, fault = RunOptions.from_json(request["options"]), FAULTS.get(request["fault"])
    directory, ops = Path(request["directory"]), OPS[request["ops"]]
    subject = Subject(directory, options, ops, fault, request["seed"], request["prompt"])
    try:
        answer: dict[str, Any] | str = (
            _run(subject, request["contexts"], request["far"], steady=steady)._asdict()
            if "contexts" in request
            else _run_twice(subject, request["context"], request["chunk"], steady=steady)._asdict()
        )
    except Tripwire as trip:
        answer = str(trip)
    json.dump(answer, sys.stdout)


def _run(subject: Subject, contexts: list[int], far: int, *, steady: bool) -> Peak:
    model, chunk, device = subject.model, subject.options.prefill_chunk, subject.options.device
    tokens = torch.tensor(subject.tokens(max(contexts) + DECODED + chunk), device=device)
    base, peaks, states = peak_memory(device), [], []
    for context in (contexts[0], *contexts):  # the first time, torch's libraries take what they keep
        state = model.new_state(context + DECODED + chunk, chunk)
        for part in (*tokens[:context].split(chunk), *tokens[context:][:DECODED].split(1)):
            model.logits(model(part, state)[-1:])
        states.append(state)
        peaks.append(peak_memory(device))
    ballast = torch.ones(BALLAST, dtype=torch.uint8, device=device)
    after = peak_memory(device)
    del ballast
    calls = [live_bytes(model, state, tokens[-chunk:]) for state in states[1:]]
    distant = live_bytes(model, _noise_up_to(model, far, chunk), tokens[-chunk:])
    return Peak(steady, base, peaks[1:], calls, distant, after)


def _run_twice(subject: Subject, context: int, chunk: int, *, steady: bool) -> Beyond:
    device = subject.options.device
    base = peak = 0
    for _ in range(2):
        # all that was held the time before is let go here
        base, model = _held_now(device), load(subject.directory, subject.options, subject.ops).model
        if subject.fault is not None:
            subject.fault.inject(model)
        state = _noise_up_to(model, context - chunk, chunk)
        tokens = torch.arange(chunk, device=device) % model.config.vocab_size
        model(tokens, state)
        peak = peak_memory(device)
        del model, state, tokens
        gc.collect()
    return Beyond(steady, base, peak)


def _held_now(device: str) -> int:
    """Bytes that this process holds at the moment; from here on, a peak is that of what comes."""
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
        return torch.cuda.memory_allocated()
    if sys.platform != "linux":
        return peak_memory(device)
    CLEAR_REFS.write_text("5", encoding="ascii")  # man proc_pid_clear_refs: resets the peak
    return 1024 * int(STATUS.read_text(encoding="ascii").partition("VmRSS:")[2].split()[0])


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
        for component in cache.components.values():
            if isinstance(component, Entries):  # by value: noise in a plane of scales would be NaN
                count, width = position // component.ratio, component.data.shape[1]
                for low in range(0, count, NOISE):
                    component.append(torch.randn(min(NOISE, count - low), width).to(model.device))
            else:
                shapes = component.shapes(position)
                component.restore(position, {name: torch.randn(shape) for name, shape in shapes.items()})
    state.position = position
    return state


if __name__ == "__main__":
    main()
