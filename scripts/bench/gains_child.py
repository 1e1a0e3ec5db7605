"""One profile of one commit: `python -P gains_child.py JSON`, started by `scripts.bench.gains`.

It runs beside the `kernels`, `model` and `runtime` of the commit that is first on PYTHONPATH, which may be older than
this file, and so asks little of them: `load`, `RunOptions`, the op set. Checks (`model.observe.invariants`, once
`model.tripwire`) are clocked as one component more. The result is the last line of stdout, as JSON.
"""

import importlib.util
import json
import sys
from pathlib import Path
from typing import Any

import torch

from kernels.ops import CPU
from runtime.load import load
from runtime.options import RunOptions

CHECKS = ("finite", "width", "count", "room", "columns", "routing", "selection", "stored")


def measure(spec: dict[str, Any], clock: Any) -> dict[str, Any]:
    """Read a prompt and decode; seconds by component of each."""
    torch.set_num_threads(spec["threads"])
    newer = importlib.util.find_spec("model.observe")
    invariants = importlib.import_module("model.tripwire" if newer is None else "model.observe.invariants")
    for name in CHECKS:
        setattr(invariants, name, clock.around("checks", getattr(invariants, name)))
    options = RunOptions(numerics=spec["numerics"], dtype="bf16", device="cpu", prefill_chunk=spec["chunk"])
    model = load(Path(spec["model"]), options, clock.watch(CPU)).model
    draw, vocabulary = torch.Generator().manual_seed(spec["seed"]), model.config.vocab_size
    prompt = torch.randint(0, vocabulary, (spec["context"],), generator=draw)
    state = model.new_state(spec["context"] + spec["decode"] + 1, spec["chunk"])
    clock.start()
    for part in prompt.split(spec["chunk"]):
        hidden = model(part, state)
    model.logits(hidden[-1:])
    found = {"prefill": clock.stop()}
    for step, token in enumerate(torch.randint(0, vocabulary, (spec["decode"] + 1, 1), generator=draw)):
        if step == 1:  # the first does not count
            clock.start()
        model.logits(model(token, state))
    return found | {"decode": clock.stop()}


def main() -> None:
    """Measure what the first argument asks for."""
    spec = json.loads(sys.argv[1])
    found = importlib.util.spec_from_file_location("clock", Path(__file__).with_name("clock.py"))
    assert found is not None
    assert found.loader is not None
    clock = importlib.util.module_from_spec(found)
    found.loader.exec_module(clock)
    print(json.dumps(measure(spec, clock.Clock())))


if __name__ == "__main__":
    main()
