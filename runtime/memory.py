"""Whether a run fits this machine, asked before anything is allocated."""

from pathlib import Path
from typing import Final

import psutil
import torch

from fathom.model.architectures import Model
from fathom.model.cache.gqa import kv_heads
from fathom.model.errors import CapacityError
from fathom.model.llama.transformer import LlamaTransformer
from fathom.model.state import State
from fathom.runtime.plan.planner import Plan, Planner

GIB: Final = 1 << 30
CGROUP_LIMITS: Final = (  # of a container, versions 2 and 1; the file holds bytes, or "max"
    Path("/sys/fs/cgroup/memory.max"),
    Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"),
)


def machine_memory(device: torch.device) -> int:
    """Bytes of memory that the device has in all; of a CPU in a container, what the container may use."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    physical: int = psutil.virtual_memory().total
    limits = [path.read_text(encoding="ascii").strip() for path in CGROUP_LIMITS if path.is_file()]
    return min([physical, *(int(limit) for limit in limits if limit.isdigit())])


def check_fits(planner: Planner, context: int, where: str, *, processes: int = 1) -> Plan:
    """Plan a rank of a run, or refuse it because its device has less memory: before any weight is read.

    On the CPU the weights are mapped files, which need no memory of their own: a checkpoint larger than memory runs.

    Parameters
    ----------
    planner : Planner
        Of this rank, made from the config and the headers of the checkpoint's files.
    context : int
        Positions that the run holds.
    where : str
        What the message calls the checkpoint.
    processes : int
        Of this run on this machine: on the CPU they share its memory, a GPU is of one rank alone.

    Raises
    ------
    CapacityError
        With one line: what the context needs, what there is, and the largest context that fits. Or for a context
        beyond the model's positions.
    """
    if context > (most := planner.config.max_position_embeddings):
        raise CapacityError(f"{where}: a context of {context} positions, max_position_embeddings is {most}")
    device = torch.device(planner.options.device)
    memory = machine_memory(device) // (1 if device.type == "cuda" else processes)
    plan = planner.plan(context)
    if plan.needed <= memory:
        return plan
    largest = planner.largest_context(memory)
    instead = f"the largest context that fits is {largest}" if largest else "no context fits"
    per_process = f" for each of {processes} processes" if device.type == "cpu" and processes > 1 else ""
    raise CapacityError(
        f"{where}: a context of {context} positions in calls of {plan.chunk} tokens needs {_gib(plan.needed)}"
        f" ({_parts(plan)}); the {device.type} has {_gib(memory)}{per_process}: {instead}"
    )


def _parts(plan: Plan) -> str:
    parts = {
        "weights": plan.own_weights,
        "caches": plan.cache_bytes,
        "a call": plan.call.nbytes,
        **({"a captured token": plan.graph} if plan.graph else {}),
        "beside tensors": plan.host + plan.reserve,
    }
    return ", ".join(f"{name} {_gib(size)}" for name, size in parts.items())


def _gib(size: int) -> str:
    return f"{size / GIB:.2f} GiB" if size >= GIB else f"{size / (1 << 20):.1f} MiB"


def new_state(model: Model, max_context: int, chunk: int, prompt: int | None, rewind: int = 0) -> State:
    """Return an empty state, or raise CapacityError naming its size when the machine has less memory than that.

    `prompt`: of the positions, those of the prompt; `rewind`: tokens that can be taken back; see `State`.

    The size is that of the same state on torch's meta device, which allocates nothing.
    """
    formats, meta, heads = model.arithmetic.formats, torch.device("meta"), kv_heads(model.arithmetic.ranks)
    size = sum(State(model.config, max_context, chunk, formats, meta, prompt, heads, rewind).nbytes().values())
    if size > (memory := machine_memory(model.device)):
        raise CapacityError(
            f"caches for {max_context} positions in calls of {chunk} tokens take {size / GIB:.1f} GiB,"
            f" {model.device} has {memory / GIB:.1f} GiB"
        )
    if isinstance(model, LlamaTransformer):
        return model.new_state(max_context, chunk, prompt, rewind=rewind)
    return model.new_state(max_context, chunk, rewind=rewind)
