"""`gpu`: every Triton kernel and whole layers at real dimensions on the GPU of this machine.

Without a GPU nothing is timed, and the page gives what is known without one: what each case must move and multiply at
least, and what kernels take when they are only compiled, for Hopper and Blackwell.
"""

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import product
from typing import Any, Final

import torch
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from fathom.kernels.triton_ops import TRITON
from fathom.model.state import State
from fathom.model.transformer import Transformer
from fathom.probes.child import call
from fathom.runtime.graph import Captured, Step
from fathom.scripts.bench import gpu_cases as kernels
from fathom.scripts.bench.command import GPU_PARTS
from fathom.scripts.bench.gpu_cases import MILLION, MODELS, RATIOS, ROOFS, Draw, layer_costs
from fathom.scripts.bench.gpu_layers import layer_floor, layers, limits, whole
from fathom.scripts.bench.gpu_read import read, room
from fathom.scripts.bench.sass import resources
from fathom.scripts.bench.turns import JSON, Case, Rounds

LAYERS, WHOLE = "layers", "whole"
CAPABILITIES: Final = (90, 100)  # H100 and H200; B200
TAKEN: Final = {"registers": "registers", "stack": "stack, bytes", "shared": "shared memory, bytes"}
SHARED: Final = 227 * 1024  # bytes of shared memory that a block may have on both: CUDA C++ Programming Guide
READING: Final = "reads as much"  # the side of a launch that only reads as many bytes
WARM: Final = 3  # calls before any is timed, which compile and allocate
COPIES: Final = 8  # calls in a graph, at most
AT_ONCE: Final = 120e6  # bytes beyond which one call of its own fills the caches
FLUSHED: Final = 1 << 28  # bytes written before each repetition, at least; twice L2 where that is more
CHUNK: Final = 4096  # tokens of a prefill of a whole layer
AFTER: Final = {"4K": 4096, "128K": 131072, "1M": MILLION - CHUNK}  # the last such that a chunk still fits


def gpu(args: argparse.Namespace) -> Iterator[Case]:
    """Every Triton kernel and whole layers on this machine's GPU.

    Whether each kernel is right, how long it takes from memory rather than from L2, and what share that is of what the
    device allows. Bytes are what must be read and written once, FLOPs those of the matrix products, both by formula
    (`scripts/bench/gpu_cases.py`). A floor is the longer of bytes / bandwidth and FLOPs / rate, at 4.3 TB/s and 790
    TFLOP/s in BF16 on an H200, 3.35 and 790 on an H100, 8 and 2250 (nominal) on a B200; all kernels multiply in BF16,
    Shard's in FP16, so that the FP8 rate of a device is no roof here. Every token of a chunk is counted as seeing what
    the last one sees: too much, where the chunk is not short beside its context. What is asked of the indexer's prefill
    is half of the FP8 rate.

    Beside each kernel stands a launch that only reads as many bytes, timed in the same way: what one launch can reach.

    A time is of the replay of a CUDA graph, which holds up to 8 calls, each with inputs of its own; before each replay
    a buffer larger than L2 is written. Where the call cannot be captured, its launches are timed, and its case says so.
    A case is apart from what it is held against by so many of its tolerance: up to 1 is right.

    Whole layers, one CSA and one HCA layer on the triton op set, as they are on one rank, after contexts of 4096,
    131072 and 1044480 tokens: a decoded token by the replay of a graph, as `--graph` runs it but for its tripwires; a
    chunk of 4096 tokens launched kernel by kernel, on the wall clock, with what it waits for. Weights are random, FP8
    and FP4 as published. Entries are FP8, index keys FP4. The floor adds up the parts of a layer, each at its own
    limit.

    The whole model is V4-Flash with drawn weights and as many layers as the memory plan finds room for, or --whole:
    calls of a prompt and decoded tokens of one sequence, on the wall clock, with all tripwires.

    Compiled ahead of time, one case or a few stand for each kernel; given is the most that one of them takes.
    """
    parts = args.only or GPU_PARTS
    if not torch.cuda.is_available():
        print("no CUDA device: nothing is measured, kernels are compiled", file=sys.stderr)
        return
    device, rounds = Gpu(), Rounds.exactly(args.replays)
    for case in kernels.cases(parts):
        yield timed(case, device, rounds)
        torch.cuda.empty_cache()
    for shape in MODELS:
        if LAYERS in parts and shape.name in args.of:
            yield from layers(shape, device, TRITON, rounds, AFTER, CHUNK)
            torch.cuda.empty_cache()
    if WHOLE in parts:
        yield from whole(device, TRITON, rounds, args.whole)


class Gpu:
    """The CUDA device of this process."""

    def __init__(self) -> None:
        self.device, self.name = torch.device("cuda"), torch.cuda.get_device_name()
        size = max(FLUSHED, 2 * torch.cuda.get_device_properties(self.device).L2_cache_size)
        self.buffer = torch.empty(size, dtype=torch.uint8, device=self.device)

    def captured(self, calls: list[Callable[[], Any]]) -> tuple[Callable[[], Any], str]:
        """What runs all calls: the replay of a graph, or the calls themselves, and why not a graph."""
        for run in calls:  # what Triton compiles and torch allocates is not captured
            for _ in range(WARM):
                run()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph):
                for run in calls:
                    run()
        except RuntimeError as error:  # what cannot be captured is timed as it is, and the page says so
            torch.cuda.synchronize()
            return lambda: [run() for run in calls], str(error).splitlines()[0]
        return graph.replay, ""

    def captured_step(self, model: Transformer, state: State) -> Callable[[int], Any]:
        """The next token of a state, run by a CUDA graph."""
        return Captured(Step(model, state))

    def reading(self, nbytes: int, copies: int) -> Callable[[], Any]:
        """What reads so many bytes, so many times, each time others, in as many launches."""
        size = room(nbytes)
        parts = torch.zeros(copies, size, dtype=torch.int32, device=self.device)
        work, why = self.captured([partial(read, part) for part in parts])
        assert not why, f"a launch that only reads cannot be captured: {why}"
        return work

    def us(self, work: Callable[[], Any]) -> float:
        """Microseconds between two events around `work`, with nothing of its inputs in L2."""
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        self.buffer.zero_()
        start.record()
        work()
        stop.record()
        torch.cuda.synchronize()
        return 1e3 * float(start.elapsed_time(stop))

    def wall_us(self, work: Callable[[], Any]) -> float:
        """Microseconds on the wall clock until all that `work` launches is done, with nothing of its inputs in L2."""
        self.buffer.zero_()
        torch.cuda.synchronize()
        began = time.perf_counter()
        work()
        torch.cuda.synchronize()
        return 1e6 * (time.perf_counter() - began)


def timed(case: kernels.Case, device: Gpu, rounds: Rounds) -> Case:
    """Check one call of a case, and take as many as make a time that is not the clock's own."""
    copies = min(COPIES, max(1, int(AT_ONCE // max(1, case.cost.bytes))))
    calls = [case.build(Draw(device.device, seed)) for seed in range(copies)]
    off = case.off(*calls[0](), Draw(device.device, 0))
    work, why = device.captured(calls)
    only_read = device.reading(case.cost.bytes, copies)
    sides = {
        "triton": lambda: ({"us": device.us(work) / copies}, off),
        **limits(device, case.cost.floor_us, case.us),
        READING: lambda: ({"us": device.us(only_read) / copies}, None),
    }

    def agree(off: float, *_: None) -> JSON:
        return {"same": off <= 1, "apart": [off], "bound": f"1 of {case.bound}"}

    label, asked = case.label + (why and f", launched: {why}"), {"us": 1.0} if "asked for" in sides else None
    return Case(case.part, label, sides, rounds, agree, asked)


# --- what is known without a device


def gpu_tables(args: argparse.Namespace, rows: list[JSON]) -> list[JSON]:
    """Floors; without a device also what kernels take when they are compiled."""
    del rows
    parts = args.only or GPU_PARTS
    costs: list[tuple[Any, ...]] = []
    for case in kernels.cases(parts):
        floors = [case.cost.floor_us(roof) for roof in ROOFS.values()]
        costs.append((case.part, case.label, *case.cost, *floors, case.us))
    for shape, kind, (after, context), tokens in product(MODELS, RATIOS, AFTER.items(), (1, CHUNK)):
        if LAYERS in parts and shape.name in args.of:
            cost = [sum(part) for part in zip(*layer_costs(shape, kind, context, tokens).values(), strict=True)]
            floors = [layer_floor(shape, kind, context, tokens, roof) for roof in ROOFS.values()]
            label = f"{shape.name}, {kind}, {tokens} tokens at {after}"
            costs.append(("whole layers", label, *cost, *floors, None))
    columns = ["part", "case", "MB", "GFLOP", *(f"floor on {name}, us" for name in ROOFS), "asked for on H200, us"]
    told = [
        [part, label, f"{size / 1e6:.4g}", f"{flops / 1e9:.3g}", *("" if us is None else f"{us:.3g}" for us in times)]
        for part, label, size, flops, *times in costs
    ]
    floors_table: JSON = {"title": "Floors", "columns": columns, "rows": told, "note": ""}
    compiled_too = [] if torch.cuda.is_available() else [compiled_table(parts)]
    return [*compiled_too, floors_table]


def compiled_table(parts: Sequence[str]) -> JSON:
    """Kernels of the cases that stand for these parts, with the most of each kind of memory that one of them takes."""
    with tempfile.TemporaryDirectory() as folder:
        found = call(compiled, parts, environment={"TRITON_INTERPRET": None, "TRITON_CACHE_DIR": folder})
    most: dict[tuple[str, str], dict[tuple[int, str], int]] = {}
    for kernel in found:
        taken = most.setdefault((kernel["part"], kernel["kernel"]), {})
        for kind in TAKEN:
            at = kernel["capability"], kind
            taken[at] = max(kernel[kind], taken.get(at, 0))
    fits = all(kernel["shared"] <= SHARED for kernel in found)
    spilled = {
        name for (_, name), taken in most.items() for (_, kind), size in taken.items() if kind == "stack" and size
    }
    places = list(product(CAPABILITIES, TAKEN))
    rows = [
        [f"{part}: `{name}`", *(str(taken.get(place, "NOT compiled")) for place in places)]
        for (part, name), taken in most.items()
    ]
    note = (
        f"{len(rows)} kernels {'fit' if fits else 'do NOT all fit'} in the {SHARED} bytes of shared memory that a block"
        f" may have. A stack is mostly of registers that were spilled: {len(spilled)} kernels have one"
        f" ({', '.join(f'`{name}`' for name in sorted(spilled))})."
    )
    columns = ["part: kernel", *(f"{TAKEN[kind]}, sm_{capability}" for capability, kind in places)]
    return {"title": "Compiled ahead of time", "columns": columns, "rows": rows, "note": note}


class NoDevice:
    """As much of a driver as compiling asks for; a device of its own for each target, for which kernels are kept."""

    def __init__(self, capability: int) -> None:
        self.target = GPUTarget("cuda", capability, 32)

    def get_current_target(self) -> GPUTarget:
        """What to compile for."""
        return self.target

    def get_current_device(self) -> int:
        """Under which kernels are kept."""
        return int(self.target.arch)

    def get_current_stream(self, device: int | None = None) -> int:
        """None that anything runs on."""
        del device
        return 0

    def get_active_torch_device(self) -> torch.device:
        """Where arguments are."""
        return torch.device("cpu")


def only_compile(tell: Callable[[JSON], None], look: Callable[[Mapping[str, Any]], JSON] = resources) -> None:
    """Make every launch compile, down to a cubin, and tell what each kernel takes; nothing runs from now on.

    TRITON_INTERPRET must not be set, which would leave nothing to compile: so in a process of its own.

    Parameters
    ----------
    tell
        Is given, for each launch: kernel, shared (bytes), cubin (bytes), warps, and what `look` finds.
    look
        At what a kernel is compiled to, by name of the stage: of `scripts.bench.sass`, at the last, its cubin.

    """
    launch = JITFunction.run

    def compile_only(self: Any, *given: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        del warmup
        kernel = launch(self, *given, grid=grid, warmup=True, **options)
        cubin = kernel.asm["cubin"]
        taken = {"shared": kernel.metadata.shared, "warps": kernel.metadata.num_warps, "cubin": len(cubin)}
        tell({"kernel": self.__name__, **taken, "constants": _constants(kernel.src), **look(kernel.asm)})
        return kernel

    JITFunction.run = compile_only


def _constants(source: Any) -> JSON:
    """The constants that a launch gives a kernel, by name; of a tuple its members, and of dtypes their names."""
    told = {source.fn.arg_names[place[0]]: value for place, value in source.constants.items() if len(place) == 1}
    known: JSON = json.loads(json.dumps(told, default=str))
    return known


def compiled(parts: Sequence[str]) -> list[JSON]:
    """In a process of its own: compile the cases that stand for these parts, for every capability."""
    found: list[JSON] = []
    where: JSON = {}
    only_compile(lambda kernel: found.append(where | kernel))
    for capability in CAPABILITIES:
        driver.set_active(NoDevice(capability))
        for case in kernels.cases(parts):
            if case.compiled:
                where |= {"part": case.part, "case": case.label, "capability": capability}
                case.build(Draw(torch.device("cpu"), 0, values=False))()
    return found
