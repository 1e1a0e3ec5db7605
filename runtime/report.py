"""What a run did, as data: speeds, memory, caches, and what it ran on."""

import resource
import shutil
import subprocess
import sys
from collections.abc import Iterable, Sequence
from functools import cache
from itertools import zip_longest
from pathlib import Path
from typing import Any, NamedTuple

import torch

from fathom.model.choices import EXACT, OF_CODES
from fathom.model.ranks.ranks import evenly
from fathom.model.state import State
from fathom.runtime.decoding import Decoding
from fathom.runtime.drafting import drafts_by
from fathom.runtime.generate import Generation
from fathom.runtime.hub import told
from fathom.runtime.load import AnyLoaded
from fathom.runtime.options import RunOptions
from fathom.runtime.plan.planner import Planner
from fathom.runtime.resident import touched_bytes

ROOT = Path(__file__).resolve().parents[1]


class Commit(NamedTuple):
    """What of this repository ran; both None where git cannot tell."""

    hash: str | None
    dirty: bool | None  # whether its files are others than the commit's, those that a run writes into audits/ aside

    def __str__(self) -> str:
        """As pages tell it."""
        return f"{self.hash[:12]}{' with local changes' if self.dirty else ''}" if self.hash else "unknown (no git)"


@cache
def commit() -> Commit:
    """The commit that is checked out, asked for once: what a run writes is of the files that it began with."""
    git = shutil.which("git")
    if git is None or not (ROOT / ".git").exists():
        return Commit(None, None)

    def told(*words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run([git, *words], cwd=ROOT, check=False, capture_output=True, text=True)  # noqa: S603

    head = told("rev-parse", "HEAD")
    status = told("status", "--porcelain", "--untracked-files=no", "--", ".", ":(exclude)audits")
    if head.returncode or status.returncode:  # a folder of another user, for one
        return Commit(None, None)
    return Commit(head.stdout.strip(), bool(status.stdout.strip()))


def cpuinfo(field: str) -> str:
    """What Linux says of the first processor, as its "model name" or "flags"; empty where the system does not tell."""
    path = Path("/proc/cpuinfo")
    lines = path.read_text(encoding="utf-8").splitlines() if path.is_file() else []
    return next((line.partition(":")[2].strip() for line in lines if line.partition(":")[0].strip() == field), "")


def peak_memory(device: str) -> int:
    """Peak bytes of this process: resident set on the CPU, allocated tensors on a GPU."""
    if device == "cuda":
        return torch.cuda.max_memory_allocated()
    if sys.platform == "linux":  # not ru_maxrss, which a process inherits from the one that started it
        status = Path("/proc/self/status").read_text(encoding="ascii")
        return 1024 * int(status.partition("VmHWM:")[2].split()[0])
    peak: int = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024  # macOS counts in bytes, others in KiB


def report(
    loaded: AnyLoaded, options: RunOptions, state: State, runs: Sequence[Generation], by: Decoding
) -> dict[str, Any]:
    """Return one run over `state`, or several of them added up, as JSON values; rates are None where nothing was timed.

    On several ranks all of them must ask, and each gets the same but for its own times.
    """
    prompt, prefill_s = sum(run.prompt for run in runs), sum(run.prefill_s for run in runs)
    decode_s = sum(run.decode_s for run in runs)
    decoded = sum(max(0, len(run.tokens) - 1) for run in runs)  # the first is chosen from the prefill's logits
    return {
        "prompt_tokens": prompt,
        "new_tokens": sum(len(run.tokens) for run in runs),
        "ended": runs[-1].ended,
        "prefill_s": prefill_s,
        "prefill_tokens_per_s": prompt / prefill_s if prefill_s else None,
        "decode_s": decode_s,
        "decode_tokens_per_s": decoded / decode_s if decoded and decode_s else None,
        "peak_memory_bytes": peak_memory(options.device),
        "planned_bytes": _planned(loaded, options, state),
        "ranks": _ranks(loaded, options),
        "cache_bytes": state.nbytes(),
        "banks": state.banks(),  # of each layer with a bounded cache
        "position": state.position,
        "max_context": state.max_context,
        "options": options.to_json(),
        "variants": [str(variant) for variant in loaded.model.arithmetic.formats.variants],  # of each layer
        "ops": loaded.model.arithmetic.ops.name,
        "fp8_products": OF_CODES if loaded.model.arithmetic.ran.keys() & {"linears_fp8", "experts_fp8"} else EXACT,
        "backends": dict(sorted(loaded.model.arithmetic.ran.items())),  # of `kernels`, of each op that ran
        "decode": by.how,  # "graph" or "eager"
        "drafts": _drafts(loaded, options, runs),
        "decode_eager_because": by.why_eager,  # None: by a graph
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "checkpoint": told(loaded.directory),
        "config_fingerprint": loaded.model.config.fingerprint,
        "weights_fingerprint": loaded.weights_fingerprint,
    }


def _drafts(loaded: AnyLoaded, options: RunOptions, runs: Sequence[Generation]) -> dict[str, Any] | None:
    """What was drafted, and what of it was accepted, by place in a draft; None where nothing was to be."""
    if (by := drafts_by(options, loaded.head)) is None:
        return None

    def by_place(parts: Iterable[Sequence[int]]) -> list[int]:
        return [sum(place) for place in zip_longest(*parts, fillvalue=0)]

    return {
        "drafter": by,
        "calls": sum(run.calls for run in runs),  # of the model, after the prompts
        "ring_bytes": 0 if loaded.head is None else loaded.head.new_state(options.draft_tokens).nbytes(),
        "drafted": by_place(run.drafted for run in runs),
        "accepted": by_place(run.accepted for run in runs),
    }


def _planned(loaded: AnyLoaded, options: RunOptions, state: State) -> dict[str, int]:
    """What the memory plan says of this rank: "needed" is the sum of all but "mapped_weights"."""
    model = loaded.model
    backend, rank = model.arithmetic.ops.name, model.arithmetic.ranks.rank
    planner = Planner(model.config, loaded.census, loaded.sharding, options, rank, backend)
    plan = planner.plan(state.max_context, state.chunk)
    return {
        "needed": plan.needed,
        "weights": plan.own_weights,
        "caches": plan.cache_bytes,
        "call": plan.call.nbytes,
        "graph": plan.graph,
        "beside_tensors": plan.host + plan.reserve,
        "mapped_weights": plan.mapped_weights,
    }


def _ranks(loaded: AnyLoaded, options: RunOptions) -> dict[str, Any]:
    """Who ran it: which tokens a rank had in how many calls, which axes every rank holds whole, and bytes by rank."""
    model, ranks = loaded.model, loaded.model.arithmetic.ranks
    touched = touched_bytes(loaded.directory)
    numbers = [sum(loaded.held.values()), peak_memory(options.device), -1 if touched is None else touched]
    own_numbers = torch.tensor([numbers], device=model.device)
    by_rank = ranks.whole(own_numbers, 0, evenly(ranks.size, ranks.rank, ranks.size))  # [ranks, 3]
    return {
        "count": ranks.size,
        "experts": loaded.experts and loaded.experts.way,
        "experts_because": loaded.experts and loaded.experts.why,
        "calls_by_tokens": dict(ranks.calls),
        "gathers": dict(ranks.gathers),
        "moves": dict(ranks.moves),
        "replicated": list(loaded.sharding.replicated),
        "weight_bytes": by_rank[:, 0].tolist(),
        "peak_memory_bytes": by_rank[:, 1].tolist(),
        "file_bytes_touched": None if touched is None else by_rank[:, 2].tolist(),
    }
