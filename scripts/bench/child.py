"""One measured run in a process of its own: `python -m scripts.bench.child JSON`, started by `scripts.bench.children`.

A process of its own so that its peak memory, its load time and the state of its allocator are this run's alone. The
result is the last line of stdout, as JSON; logits go to a file.
"""

import gc
import importlib
import json
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kernels.ops import CPU
from runtime.tensorfile import write_safetensors
from scripts.bench.clock import Clock
from scripts.bench.sides import Ours, Side, Theirs
from scripts.cli import run

FIELDS = ("VmHWM", "VmRSS", "RssAnon", "RssFile", "RssShmem")


def memory(process: str = "self") -> dict[str, int]:
    """Bytes that a process holds, by `/proc`: its peak (VmHWM), and what it holds now, file-backed or not."""
    lines = Path(f"/proc/{process}/status").read_text(encoding="ascii", errors="replace").splitlines()
    held = {name: rest for name, _, rest in (line.partition(":") for line in lines)}
    return {field: 1024 * int(held[field].split()[0]) for field in FIELDS if field in held}


def drawn_tokens(vocabulary: int, count: int, seed: int) -> Tensor:
    """Token ids [count] that both sides read."""
    return torch.randint(0, vocabulary, (count,), generator=torch.Generator().manual_seed(seed))


def measure(spec: dict[str, Any]) -> dict[str, Any]:
    """Load, read a prompt, decode; see `scripts.bench.children.Spec` for what `spec` holds."""
    torch.set_num_threads(spec["threads"])
    directory = Path(spec["model"])
    vocabulary = json.loads((directory / "config.json").read_text(encoding="utf-8"))["vocab_size"]
    tokens = drawn_tokens(vocabulary, spec["context"] + spec["decode"], spec["seed"])
    clock = Clock() if spec["components"] else None
    if spec["side"] == "theirs":  # imports are not loading
        importlib.import_module("transformers.models.deepseek_v4.modeling_deepseek_v4")
    found: dict[str, Any] = {"memory_before": memory()}
    began = time.perf_counter()
    ops = CPU if clock is None else clock.watch(CPU)
    side: Side = Ours(directory, spec["chunk"], ops) if spec["side"] == "ours" else Theirs(directory, spec["dtype"])
    found["load_s"] = time.perf_counter() - began
    found["memory_loaded"] = memory()
    gc.collect()
    logits, prefill = _prefill(side, tokens[: spec["context"]], spec, clock)
    found |= prefill
    more, decode = _decode(side, tokens[spec["context"] :], clock)
    found |= decode | {"memory": memory()}
    every = torch.stack([logits, *more])
    found["argmax"] = every.argmax(1).tolist()
    write_safetensors(Path(spec["logits"]), {"logits": every})
    return found


def _prefill(side: Side, prompt: Tensor, spec: dict[str, Any], clock: Clock | None) -> tuple[Tensor, dict[str, Any]]:
    if clock is not None:
        clock.start()
    began, chunks, logits = time.perf_counter(), [], prompt
    side.start(spec["context"] + spec["decode"])
    for part in prompt.split(spec["chunk"]):
        at = time.perf_counter()
        logits = side.read(part)
        chunks.append(time.perf_counter() - at)
    found: dict[str, Any] = {"prefill_s": time.perf_counter() - began, "chunk_s": chunks}
    return logits, found if clock is None else found | {"prefill_components": clock.stop()}


def _decode(side: Side, tokens: Tensor, clock: Clock | None) -> tuple[list[Tensor], dict[str, Any]]:
    """Take the tokens one by one. They are given and not chosen, so that both sides go on from the same text."""
    if clock is not None:
        clock.start()
    logits, times = [], []
    for token in tokens.split(1):
        at = time.perf_counter()
        logits.append(side.read(token))
        times.append(1e3 * (time.perf_counter() - at))
    found: dict[str, Any] = {"decode_ms": times}
    return logits, found if clock is None else found | {"decode_components": clock.stop()}


def main() -> int:
    """Measure what the first argument asks for; returns the exit status."""
    found = measure(json.loads(sys.argv[1]))
    print(json.dumps(found))
    return 0


if __name__ == "__main__":
    sys.exit(run(main))
