"""`gpu`: every Triton kernel and whole layers at real dimensions on the GPU of this machine.

Without a GPU nothing is timed, and the page gives what is known without one: what each case must move and multiply at
least, and what kernels take when they are only compiled, for Hopper and Blackwell.
"""

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import product
from typing import Any, Final

import torch
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from fathom.kernels.formats.stored import Weight, member, stack
from fathom.kernels.ops import Ops
from fathom.kernels.triton_ops import TRITON
from fathom.model.block import Block
from fathom.model.cache.layers import CACHES
from fathom.model.call import Call
from fathom.model.checkpoint.names import parameters
from fathom.model.checkpoint.tensor_mapping import Form
from fathom.model.checkpoint.weights import Weights
from fathom.model.config import ModelConfig
from fathom.model.ranks.ranks import ALONE, Ranks
from fathom.model.rope import Rotation, layer_frequencies
from fathom.model.state import State
from fathom.model.transformer import Transformer
from fathom.probes.child import call
from fathom.runtime.arithmetic import arithmetic
from fathom.runtime.graph import Captured, Step
from fathom.runtime.options import RunOptions
from fathom.runtime.sharding import sharding_plan
from fathom.scripts.bench import gpu_cases as kernels
from fathom.scripts.bench.command import GPU_PARTS
from fathom.scripts.bench.gpu_cases import E4M3, E8M0, MILLION, MODELS, RATIOS, ROOFS, STREAMS, V4, Draw, layer_costs
from fathom.scripts.bench.gpu_read import read, room
from fathom.scripts.bench.sass import resources
from fathom.scripts.bench.turns import JSON, Case, Measures, Rounds, Side, constant
from fathom.scripts.make.values import E4M3_DEVIATION, moments

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
SCALES: Final = {"entries.scale": -7, "indexer_keys.scale": -2}  # powers of two that make rows of about unit size


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
    for shape in MODELS if LAYERS in parts else ():
        yield from layers(shape, device, TRITON, rounds, AFTER, CHUNK)
        torch.cuda.empty_cache()
    if WHOLE in parts:
        from fathom.scripts.bench.gpu_whole import whole  # which is made of what stands here

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


def limits(
    device: Gpu, floor_us: Callable[[tuple[float, float]], float], asked: float | None = None
) -> dict[str, Side]:
    """What a time is held against: what was asked for, on an H200; the floor, on a device whose roof is known."""
    found: dict[str, Side] = {}
    if asked is not None and kernels.ASKED_OF in device.name:
        found["asked for"] = constant(us=asked)
    roof = next((roof for part, roof in ROOFS.items() if part in device.name), None)
    return found if roof is None else found | {"floor": constant(us=floor_us(roof))}


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


# --- whole layers


class DrawnWeights(Weights):
    """Random parameters in their published forms, made when they are asked for."""

    def __init__(self, config: ModelConfig, draw: Draw) -> None:
        self.demanded, self.drawn = parameters(config), draw

    def forms(self, names: Iterable[str]) -> set[Form]:
        """FP4 for routed experts, FP8 for the rest."""
        return {Form.FP4 if ".ffn.experts." in name else Form.FP8 for name in names}

    def matrix(self, name: str) -> Weight:
        """Random, of the form that `forms` says."""
        form = "fp4" if self.forms([name]) == {Form.FP4} else "fp8"
        return self.drawn.weight(form, *self.demanded[name].shape)

    def matrices(self, names: Sequence[str], *, together: bool) -> list[Weight]:
        """As `matrix` each; `together`: one behind another in memory."""
        made = [self.matrix(name) for name in names]
        if not together:
            return made
        stacked = stack(made)
        return [member(stacked, index) for index in range(len(names))]

    def vector(self, name: str) -> Tensor:
        """As `scripts.make_checkpoint` draws it."""
        parameter = self.demanded[name]
        mean, deviation = moments(name, parameter.shape[-1])
        dtype = torch.float32 if parameter.kind == "f32" else torch.bfloat16
        return self.drawn.normal(*parameter.shape, dtype=dtype, scale=deviation).add_(mean)

    def operand(self, name: str) -> Tensor:
        """As `vector`."""
        return self.vector(name)


def layer_floor(shape: V4, kind: str, context: int, tokens: int, roof: tuple[float, float]) -> float:
    """Microseconds that a layer takes at least: parts one after the other, each at its own limit."""
    return sum(part.floor_us(roof) for part in layer_costs(shape, kind, context, tokens).values())


@torch.inference_mode()
def layers(
    shape: V4, device: Any, ops: Ops, rounds: Rounds, contexts: dict[str, int], chunk: int
) -> Iterator[Case]:  # fmt: skip
    """Time the two layers after every context; each call begins from the same cache."""
    config = ModelConfig.from_json(config_json(shape), shape.name)
    options = RunOptions(device=device.device.type, entry_format="fp8", key_format="fp4", prefill_chunk=chunk)
    numerics = arithmetic(options, ops, Ranks(ALONE, sharding_plan(config, 1).ranks[0]), config)
    draw, most = Draw(device.device, 0), max(contexts.values()) + chunk

    @torch.inference_mode()
    def side(given: Any, context: int, saved: dict[str, Tensor], time: Callable[[], float]) -> tuple[Measures, None]:
        given[2].restore(context, saved)
        return {"us": time()}, None

    for layer, kind in enumerate(RATIOS):
        rotation = Rotation(layer_frequencies(config, config.layer_kind(layer)).to(device.device))
        block = Block(config, layer, DrawnWeights(config, draw), numerics, rotation)
        for (after, context), tokens in product(contexts.items(), (1, chunk)):
            cache = CACHES[config.layer_kind(layer)](config, layer, most, chunk, numerics.formats, device.device)
            sizes, dtypes = cache.shapes(context), cache.dtypes()
            saved = {name: filling(name, size, dtypes[name], draw) for name, size in sizes.items()}
            cache.restore(context, saved)
            ids = torch.zeros(tokens, dtype=torch.int64, device=device.device)
            first = torch.tensor(context, device=device.device) if tokens == 1 else context  # on the device: captured
            given = (draw.normal(tokens, STREAMS, shape.hidden), Call(ids, first, numerics), cache)
            run, why = partial(block, *given), ""
            timed = partial(device.wall_us, run)
            if tokens == 1:
                work, why = device.captured([run])
                timed = partial(device.us, work)
            floor = limits(device, partial(layer_floor, shape, kind, context, tokens))
            label = f"{shape.name}, {kind}, {tokens} tokens at {after}" + (why and f", launched: {why}")
            sides: dict[str, Side] = {"triton": partial(side, given, context, saved, timed), **floor}
            yield Case("whole layers", label, sides, rounds)


def filling(name: str, shape: tuple[int, ...], dtype: torch.dtype, draw: Draw) -> Tensor:
    """Random content of a part of a cache, as a saved state would bring it."""
    if dtype == E8M0:
        return draw.scales(*shape, power=SCALES[name])
    if dtype == torch.uint8:
        return draw.bytes(*shape)
    return draw.normal(*shape, dtype=dtype, scale=E4M3_DEVIATION if dtype == E4M3 else 1.0)


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
        if LAYERS in parts:
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


def config_json(shape: V4) -> dict[str, Any]:
    """A config.json in DeepSeek's dialect: one CSA layer, then one HCA layer, and the experts that a GPU holds."""
    return {
        "model_type": "deepseek_v4", "attention_bias": False, "attention_dropout": 0.0, "hidden_act": "silu",
        "bos_token_id": 0, "eos_token_id": 1, "tie_word_embeddings": False, "vocab_size": kernels.VOCABULARY,
        "max_position_embeddings": MILLION, "hidden_size": shape.hidden, "num_hidden_layers": 2,
        "compress_ratios": list(RATIOS.values()), "compress_rope_theta": 160000, "rope_theta": 10000,
        "rope_scaling": {
            "beta_fast": 32, "beta_slow": 1, "factor": 16, "original_max_position_embeddings": 65536, "type": "yarn",
        },
        "head_dim": kernels.HEAD_DIM, "num_attention_heads": shape.heads, "num_key_value_heads": 1,
        "qk_rope_head_dim": kernels.ROPE, "q_lora_rank": shape.q_lora, "o_groups": shape.o_groups,
        "o_lora_rank": shape.o_lora, "sliding_window": kernels.WINDOW, "index_head_dim": kernels.INDEX_DIM,
        "index_n_heads": kernels.INDEX_HEADS, "index_topk": shape.index_topk, "rms_norm_eps": kernels.EPS,
        "hc_eps": kernels.EPS, "hc_mult": STREAMS, "hc_sinkhorn_iters": kernels.SINKHORN,
        "moe_intermediate_size": shape.intermediate, "n_routed_experts": shape.experts, "n_shared_experts": 1,
        "num_experts_per_tok": kernels.CHOSEN, "num_hash_layers": 0, "num_nextn_predict_layers": 0,
        "expert_dtype": "fp4", "norm_topk_prob": True, "routed_scaling_factor": shape.routed_scaling,
        "scoring_func": "sqrtsoftplus", "swiglu_limit": kernels.LIMIT, "topk_method": "noaux_tc",
    }  # fmt: skip
