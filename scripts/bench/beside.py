"""`compare-transformers`: Fathom beside Hugging Face transformers, on the same files."""

import argparse
import importlib
import importlib.util
import math
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, Final, NamedTuple

import psutil
import torch
from torch import Tensor

from fathom.kernels.ops import CPU, Ops
from fathom.model.checkpoint.config_json import read_json
from fathom.model.errors import ConfigError
from fathom.probes.child import Child
from fathom.runtime.allocator import keep_memory
from fathom.runtime.arithmetic import DTYPES
from fathom.runtime.load import load
from fathom.runtime.options import RunOptions
from fathom.runtime.output import making
from fathom.runtime.report import peak_memory
from fathom.runtime.tensorfile import system_errors
from fathom.scripts.bench.turns import JSON, Case, Clock, Measures, Rounds

OURS: Final = "Fathom"
THEIRS: Final = "transformers"
THREADS: Final = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")
THP: Final = "THP_MEM_ALLOC_ENABLE"  # torch's allocator asks for huge pages
SAMPLED_S: Final = 0.02  # how often memory that no file backs is looked at: the system keeps no peak of it
SIZES: Final = ("hidden_size", "num_hidden_layers", "n_routed_experts", "vocab_size")  # told of the checkpoint
LOAD, PREFILL, DECODE = "load, s", "prefill, ms/token", "decode, ms/token"
PEAK, ANONYMOUS = "peak memory, GB", "of it not file-backed, GB"
WANTED: Final[dict[int, dict[str, float]]] = {8192: {PREFILL: 2.5, DECODE: 3.0}, 16384: {PREFILL: 3.5}}
WANTED_ANYWHERE: Final = {LOAD: 5.0, PEAK: 2.0}

# How far apart logits may be: the norm of the difference over that of theirs, for the logits after the prompt and after
# each decoded token. bf16 rounds with an error of 2^-9 / sqrt(3) of a value; 8 layers round some 130 times in series,
# on both sides, which adds up to sqrt(260) 2^-9 / sqrt(3) = 0.018. Where a rounding moves an expert or an entry across
# the threshold of a selection, a row is further off: so the median row is bounded with room, and every row well below
# the sqrt(2) of unrelated logits.
MEDIAN_APART: Final = 0.1
ROW_APART: Final = 0.5


def beside(args: argparse.Namespace) -> Iterator[Case]:
    """Load, prompt, decode and memory beside transformers.

    Without --checkpoint one of random weights is made, in the dialect that transformers writes and both runtimes read:
    515 million parameters of the published architecture, 1 GB in bf16, large enough that matrix products take their
    share, small enough for one CPU core. transformers makes it and is no dependency of this project: `make test`
    installs it.

    Each run is a process of its own, its files in the page cache. transformers reads a prompt in calls of --chunk
    tokens, with eager attention, its own cache (DynamicCache) and huge pages (THP_MEM_ALLOC_ENABLE=1), without which it
    is slower. Fathom, `plain` numerics and bf16, has no scores that grow with the call, and reads --our-chunk tokens at
    once: an expert then gets enough of them to pay for the decoding of its weights. Where a processor has no bf16
    instructions, transformers reads a prompt several times faster in fp32: `--theirs-dtype fp32` compares with that.

    * *load*: from the files to a model that runs, imports not counted; Fathom's weights stay mapped files.
    * *prefill*: the whole prompt in calls, caches allocated, logits of its last token.
    * *decode*: one token and its logits, the median; the tokens are drawn, the same on both sides.
    * *peak memory*: the peak resident set, mapped files included, which the system could take back; *not file-backed*:
      the peak of what no file backs, looked at every 20 ms.

    Fathom alone is run once at each of --ours-only; parts, by a clock around every op, are in ms/token.

    Logits after the prompt and after each decoded token are held side by side in every pair: the relative difference of
    the median row is at most 0.1, of every row at most 0.5, or nothing is timed.
    """
    transformers()
    with checkpoint(args.checkpoint, args.seed) as model:
        check_family(model)
        sizes, paged = (args.decode, args.threads, args.seed), args.ours_thp
        for n in dict.fromkeys(args.context):
            runs = {
                OURS: Run(OURS, model, n, args.our_chunk, *sizes, thp=paged),
                THEIRS: Run(THEIRS, model, n, args.chunk, *sizes, dtype=args.theirs_dtype, thp=True),
            }
            sides = {side: partial(measured, run) for side, run in runs.items()}
            table, asked = f"Beside transformers in {args.theirs_dtype}", WANTED.get(n, {}) | WANTED_ANYWHERE
            yield Case(table, f"{n} tokens", sides, Rounds.exactly(args.pairs), apart, asked, warm=False)
        runs = {
            f"{n} tokens": Run(OURS, model, n, args.our_chunk, *sizes, thp=paged, parts=True)
            for n in sorted({*args.ours_only})
        }
        if runs:
            sides = {context: partial(measured, run) for context, run in runs.items()}
            yield Case("Fathom alone", "after", sides, Rounds.exactly(1), warm=False, compared=False)


def apart(ours: Tensor, theirs: Tensor) -> JSON:
    """How far the logits [rows, vocab] of a pair are apart; the first row is the one after the prompt."""
    rows = ((ours - theirs).norm(dim=1) / theirs.norm(dim=1)).tolist()
    return {
        "same": median(rows) <= MEDIAN_APART and max(rows) <= ROW_APART,  # NaN is not
        "bound": f"{MEDIAN_APART} in the median row, {ROW_APART} in every row",
        "apart": rows,
        "argmax equal": int((ours.argmax(1) == theirs.argmax(1)).sum()),
    }


# --- one run, in a process of its own: its peak memory, its load time and the state of its allocator are its alone


class Run(NamedTuple):
    """What a run is."""

    side: str  # OURS | THEIRS
    model: Path  # the checkpoint
    context: int  # tokens of the prompt
    chunk: int  # tokens of a call
    decode: int  # tokens after it, one by one
    threads: int
    seed: int  # of the tokens
    thp: bool  # huge pages
    dtype: str = "bf16"  # of transformers: bf16 | fp32
    parts: bool = False  # of our side: time by op


def measured(run: Run) -> tuple[Measures, Tensor]:
    """Run it, its files in the page cache: what was measured, and the logits [1 + decode, vocab] float32.

    ConfigError with its line where a side refuses the checkpoint; `probes.child.ChildError` with what it said where it
    ends otherwise, also when the system kills it.
    """
    warm(run.model)
    environment = {name: str(run.threads) for name in THREADS} | {THP: "1" if run.thp else None}
    with Child(measure, run, environment=environment) as child:
        process, anonymous = psutil.Process(child.pid), 0
        while child.running:
            try:
                held = process.memory_info()
            except psutil.NoSuchProcess:  # it has just ended
                break
            anonymous = max(anonymous, held.rss - held.shared)
            time.sleep(SAMPLED_S)
        measures, logits = child.value()
    return {**measures, ANONYMOUS: anonymous / 1e9}, logits


def warm(folder: Path) -> int:
    """Read every file of a checkpoint, so that the page cache holds them; returns their bytes."""
    total, buffer = 0, bytearray(1 << 24)
    for path in sorted(folder.iterdir()):
        if path.is_file():
            with path.open("rb", buffering=0) as file:
                while count := file.readinto(buffer):
                    total += count
    return total


def measure(run: Run) -> tuple[Measures, Tensor]:
    """In the child: all but what no file backs; see `measured`."""
    torch.set_num_threads(run.threads)
    vocabulary = read_json(run.model / "config.json")["vocab_size"]
    tokens = torch.randint(
        0, vocabulary, (run.context + run.decode,), generator=torch.Generator().manual_seed(run.seed)
    )
    if run.side == THEIRS:  # imports are not loading
        importlib.import_module("transformers.models.deepseek_v4.modeling_deepseek_v4")
    clock, began = Clock(), time.perf_counter()
    side = Theirs(run) if run.side == THEIRS else Ours(run, clock.watch(CPU) if run.parts else CPU)
    measures = {LOAD: time.perf_counter() - began}
    clock.start()
    side.start(run.context + run.decode)
    logits = [[side.read(part) for part in tokens[: run.context].split(run.chunk)][-1]]
    parts = clock.stop("prefill", 1e3 / run.context)
    clock.start()
    times = []
    for token in tokens[run.context :].split(1):
        began = time.perf_counter()
        logits.append(side.read(token))
        times.append(1e3 * (time.perf_counter() - began))
    measures |= {PREFILL: parts["prefill: all"], DECODE: median(times), PEAK: peak_memory("cpu") / 1e9}
    parts |= clock.stop("decode", 1e3 / run.decode)
    return measures | (parts if run.parts else {}), torch.stack(logits)


class Ours:
    """Fathom: `plain` numerics, which are what transformers computes."""

    def __init__(self, run: Run, ops: Ops) -> None:
        keep_memory()
        self.chunk = run.chunk
        self.model = load(run.model, RunOptions("plain", "bf16", "cpu", run.chunk), ops).model
        self.state = self.model.new_state(1, 1)

    def start(self, context: int) -> None:
        """Begin a sequence of at most `context` tokens."""
        self.state = self.model.new_state(context, self.chunk)

    def read(self, tokens: Tensor) -> Tensor:
        """Take the next tokens [t]; returns the logits after the last, [vocab] float32."""
        return self.model.logits(self.model(tokens, self.state)[-1:])[0]


class Theirs:
    """transformers with its own cache and eager attention, the only one that its class for V4 has."""

    def __init__(self, run: Run) -> None:
        library = transformers()
        self.cache_of: Any = library.DynamicCache
        self.model: Any = library.DeepseekV4ForCausalLM.from_pretrained(
            run.model, dtype=DTYPES[run.dtype], attn_implementation="eager", local_files_only=True
        ).eval()
        self.cache: Any = None

    def start(self, context: int) -> None:
        """Begin a sequence; the cache grows with what it holds."""
        del context
        self.cache = self.cache_of(config=self.model.config)

    @torch.inference_mode()
    def read(self, tokens: Tensor) -> Tensor:
        """Take the next tokens [t]; returns the logits after the last, [vocab] float32."""
        out = self.model(tokens[None], past_key_values=self.cache, use_cache=True, logits_to_keep=1)
        logits: Tensor = out.logits[0, -1].float()
        return logits


# --- the checkpoint

RATIOS: Final = (0, 0, 4, 128, 4, 128, 4, 128)
LAYER_TYPES: Final = {0: "sliding_attention", 4: "compressed_sparse_attention", 128: "heavily_compressed_attention"}
MIDSIZE: Final[dict[str, Any]] = {
    "vocab_size": 32768,
    "hidden_size": 1024,
    "moe_intermediate_size": 512,
    "num_hidden_layers": len(RATIOS),
    "layer_types": [LAYER_TYPES[ratio] for ratio in RATIOS],
    "num_attention_heads": 16,
    "head_dim": 128,
    "qk_rope_head_dim": 32,
    "q_lora_rank": 512,
    "o_groups": 4,
    "o_lora_rank": 256,
    "index_n_heads": 16,
    "index_head_dim": 64,
    "index_topk": 256,
    "n_routed_experts": 32,
    "n_shared_experts": 1,
    "num_experts_per_tok": 4,
    "num_hash_layers": 3,
    "sliding_window": 128,
    "max_position_embeddings": 1 << 20,
    "rope_parameters": {  # as published
        "rope_type": "yarn",
        "factor": 16,
        "original_max_position_embeddings": 65536,
        "beta_fast": 32,
        "beta_slow": 1,
    },
    "num_nextn_predict_layers": 0,
}


def transformers() -> Any:
    """Import the library; ConfigError with one line where it is not installed."""
    if importlib.util.find_spec("transformers") is None:
        raise ConfigError("transformers is not installed, and is the other side here: `make test` installs it")
    return importlib.import_module("transformers")


def check_family(folder: Path) -> None:
    """Refuse a checkpoint that is not of DeepSeek-V4: ConfigError."""
    config = read_json(path := folder / "config.json")
    if missing := [name for name in SIZES if name not in config]:
        raise ConfigError(f"{path}: {missing[0]}: missing; only checkpoints of DeepSeek-V4 are compared")


@contextmanager
def checkpoint(folder: Path | None, seed: int) -> Iterator[Path]:
    """Yield the folder of a checkpoint: as it is, made and kept, or made for this run alone."""
    with tempfile.TemporaryDirectory() as temporary:
        place = Path(temporary) if folder is None else folder.resolve()
        if not (place / "config.json").exists():
            print(f"writing a checkpoint of random weights to {place}", file=sys.stderr)
            with making(place) as unfinished:
                write(unfinished, MIDSIZE, seed)
        yield place


@torch.no_grad()
def write(folder: Path, config: dict[str, Any], seed: int) -> None:
    """Write a checkpoint of this config, every parameter and table drawn from `seed`.

    Matrices are bf16; norms, sinks, biases and mHC are float32, as DeepSeek publishes them and transformers keeps them.
    """
    library = transformers()
    with torch.device("meta"):
        model = library.DeepseekV4ForCausalLM(library.DeepseekV4Config(**config)).to(torch.bfloat16)
    g = torch.Generator().manual_seed(seed)
    for name, part in [*model.named_parameters(), *model.named_buffers()]:
        owner, leaf = model.get_submodule(name.rpartition(".")[0]), name.rpartition(".")[2]
        if "inv_freq" in leaf:  # made from the config when it is loaded
            continue
        value = _drawn(name, part, config["n_routed_experts"], g)
        if leaf in owner._parameters:  # noqa: SLF001 -- the only way to replace what is on the meta device
            setattr(owner, leaf, torch.nn.Parameter(value, requires_grad=False))
        else:
            setattr(owner, leaf, value)
    with system_errors(folder):
        model.save_pretrained(folder)
    for path in folder.glob("*.safetensors"):  # as readable as the files that safetensors did not write
        path.chmod((folder / "config.json").stat().st_mode)


def _drawn(name: str, part: Tensor, experts: int, g: torch.Generator) -> Tensor:
    """Values of a parameter, or rows of a table of experts: of a scale that gives logits of about unit scale."""
    leaf = name.rpartition(".")[2]
    if leaf == "tid2eid":
        return torch.rand(part.shape[0], experts, generator=g).argsort(-1)[:, : part.shape[1]].contiguous()
    noise = torch.randn(part.shape, generator=g)
    if "norm" in name:
        return 1 + 0.1 * noise
    if part.ndim == 1:  # sinks, biases, mHC's base and scale
        return 0.5 * noise
    if leaf == "position_bias":
        return noise
    if "hc" in name:
        return noise / math.sqrt(part.shape[-1])
    return (noise if "embed" in name else noise / math.sqrt(part.shape[-1])).bfloat16()
