"""Before a run each rank rehearses it alone, and the run launches no kernel that the rehearsal did not."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from fathom.kernels.ops import CPU
from fathom.model.checkpoint.census import census
from fathom.model.checkpoint.checkpoint import Checkpoint
from fathom.model.checkpoint.weights import open_weights
from fathom.model.config import ModelConfig
from fathom.model.observe.observer import PLACES, install
from fathom.model.ranks.ranks import Group, Ranks
from fathom.model.transformer import Transformer
from fathom.runtime import load as loading
from fathom.runtime.arithmetic import arithmetic
from fathom.runtime.kernels import prepare_kernels, sizes
from fathom.runtime.options import DEMO, RunOptions
from fathom.runtime.sharding import sharding_plan

HERE = Path(__file__).parent


def test_a_run_launches_nothing_that_was_not_rehearsed():
    """Of calls of many sizes and of 150 decoded tokens, on one rank and on two."""
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = str(HERE.parents[1])
    command = [sys.executable, str(HERE / "rehearsal_program.py")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    told = [json.loads(line) for line in done.stdout.splitlines()]
    assert [one["ranks"] for one in told] == [1, 1, 2, 2]
    assert all(one["rehearsed"] > 50 for one in told)
    assert [one["missing"] for one in told] == [[]] * 4


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rehearsal_waits_for_nobody_and_leaves_nothing(rank, capfd):
    """Its processes are none: an exchange would fail."""
    config, checkpoint, options = ModelConfig.from_file(DEMO / "config.json"), Checkpoint.open(DEMO), RunOptions()
    sharding = sharding_plan(config, 2)
    ranks = Ranks(Group(rank, 2, object()), sharding.ranks[rank])
    ranks.calls["all"] = 7
    counted = census(checkpoint.shapes(), config)
    weights = open_weights(checkpoint, counted, only=(), held=lambda name, rows: sharding.rows(name, rows, rank))
    numerics = arithmetic(options, CPU, ranks, config)
    numerics.ran["linear"] = "somewhere"
    model = Transformer(config, weights, numerics)
    install(model, PLACES)
    prepare_kernels(model, 300, 700, say=True)
    assert capfd.readouterr().err == (
        "compiling kernels for this GPU, minutes where none are kept of an earlier run:"
        " calls of 300, 128, 64, 32, 16, 8, 4, 2, 1 tokens\n"
    )
    assert (ranks.collectives, ranks.at, ranks.calls) == (0, "start", {"all": 7, "own": 0})
    assert numerics.ran == {"linear": "somewhere"}
    ranks.verify()  # nothing was recorded
    with pytest.raises((TypeError, AttributeError, ValueError)):  # and from now on exchanges are real ones
        model(torch.arange(3), model.new_state(10, 10))


@pytest.mark.parametrize(
    ("chunk", "context", "found"),
    [
        (512, 1000, [512, 128, 64, 32, 16, 8, 4, 2, 1]),
        (512, 400, [145, 128, 64, 32, 16, 8, 4, 2, 1]),
        (100000, 1 << 20, [4096, 128, 64, 32, 16, 8, 4, 2, 1]),
        (32, 1000, [32, 16, 8, 4, 2, 1]),
        (512, 3, [2, 1]),
        (512, 1, [1]),
        (1, 9, [1]),
    ],
)
def test_calls_of_a_rehearsal_fit_the_context(chunk, context, found):
    assert sizes(chunk, context) == found
    assert sum(found) <= context


def test_a_cpu_rehearses_nothing(monkeypatch):
    monkeypatch.setattr(loading, "prepare_kernels", lambda *_, **__: pytest.fail("there is nothing to compile"))
    loading.load(DEMO, RunOptions())
