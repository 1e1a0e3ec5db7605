"""Which kernels a run of the demo launches that its rehearsal did not: `python tests/runtime/rehearsal_program.py`.

On one rank and as the second of two, whose exchanges are left out. Launches compute the key under which Triton keeps
what it compiles, for a driver that only names a GPU, and end there: results are what the memory held, but the experts
of a token. One JSON line
for each: kernels rehearsed, and those of the run that were not. It must run without TRITON_INTERPRET, so in a process
of its own.
"""

import json
from typing import Any

import torch
from triton.runtime import driver
from triton.runtime.jit import JITFunction, compute_cache_key

from fathom.kernels.triton_ops import TRITON
from fathom.model.checkpoint.census import census
from fathom.model.checkpoint.checkpoint import Checkpoint
from fathom.model.checkpoint.weights import open_weights
from fathom.model.config import ModelConfig
from fathom.model.observe import observer
from fathom.model.observe.observer import PLACES, install, observed
from fathom.model.ranks.ranks import ALONE, Group, Ranks
from fathom.model.transformer import Transformer
from fathom.runtime.arithmetic import arithmetic
from fathom.runtime.kernels import prepare_kernels
from fathom.runtime.options import DEMO, RunOptions
from fathom.runtime.sharding import sharding_plan
from fathom.scripts.bench.gpu import NoDevice

CONTEXT = 2000
CALLS = (512, 512, 300, 77, 30, 9, 3, *[1] * 150)

launched: set[tuple[str, Any]] = set()


def note(self: Any, *given: Any, grid: Any, warmup: bool, **options: Any) -> None:
    """Compute the key of a launch as `JITFunction.run` does, and launch nothing."""
    del grid, warmup
    options |= {"debug": False, "instrumentation_mode": "", "fpsan_homomorphic_casts": False}
    _, key_cache, _, _, binder = self.device_caches[driver.active.get_current_device()]
    _, specialisation, found = binder(*given, **options)
    launched.add((self.__name__, compute_cache_key(key_cache, specialisation, found)))
    if self.__name__ in {"_route", "_gate"}:  # experts are looked up by what it finds
        ids = given[2]
        ids.copy_(torch.arange(ids.shape[1]))


def built(group: Group, options: RunOptions) -> Transformer:
    """The demo, or a rank's part of it."""
    config, checkpoint = ModelConfig.from_file(DEMO / "config.json"), Checkpoint.open(DEMO)
    sharding = sharding_plan(config, group.size)
    ranks = Ranks(group, sharding.ranks[group.rank])
    weights = open_weights(
        checkpoint,
        census(checkpoint.shapes(), config),
        only=(),
        held=lambda name, rows: sharding.rows(name, rows, group.rank),
    )
    model = Transformer(config, weights, arithmetic(options, TRITON, ranks, config))
    install(model, PLACES)
    return model


@torch.inference_mode()
def main() -> None:
    driver.set_active(NoDevice(90))
    JITFunction.run = note
    observer.on_host = lambda _: False  # what must never happen is measured as on a GPU
    for group in (ALONE, Group(1, 2, object())):
        for forms in (("dtype", "dtype"), ("fp8", "fp4")):
            launched.clear()
            options = RunOptions(entry_format=forms[0], key_format=forms[1])
            model = built(group, options)
            prepare_kernels(model, options.prefill_chunk, CONTEXT, say=False)
            rehearsed = set(launched)
            assert model.arithmetic.ranks.collectives == 0
            with observed(model).rehearsing(), model.arithmetic.ranks.apart():  # results mean nothing
                state = model.new_state(CONTEXT, options.prefill_chunk)
                for size in CALLS:
                    model.logits(model(torch.arange(size), state)[-1:])
            missing = sorted(name for name, _ in launched - rehearsed)
            print(json.dumps({"ranks": group.size, "rehearsed": len(rehearsed), "missing": missing}))


if __name__ == "__main__":
    main()
