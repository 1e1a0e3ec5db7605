"""`probe all` on healthy models that are not the demo: random weights, of other shapes, without a tokenizer.

And of the demo as a processor with AVX2 alone computes it, in another order of sums. Whatever fails is a false alarm.
"""

import os
import platform
import subprocess
import sys

import pytest

from fathom.probes.catalogue import FULL
from fathom.scripts import probe
from fathom.scripts.paths import ROOT
from tests.make_checkpoint import tiny_config, write_checkpoint

PLAIN = ("--numerics", "plain")
MODELS = {
    "narrow": (tiny_config(head_dim=64, qk_rope_head_dim=32, hidden_size=192), "bf16", PLAIN),  # plain numerics only
    "wide": (tiny_config(head_dim=128, qk_rope_head_dim=64, index_head_dim=64), "official", ()),
    "far": (  # window and top-k of V4-Flash: a token chooses among its entries from the 2053rd on
        tiny_config(
            sliding_window=128,
            index_topk=512,
            hidden_size=128,
            compress_ratios=[4, 128],
            num_hidden_layers=2,
            num_attention_heads=2,
            n_routed_experts=4,
        ),
        "official",
        (),
    ),
}
OF_FATHOM = ["memory", "variants", "ranks"]


QUICKLY = "narrow"  # the others take half a minute each


@pytest.fixture(
    scope="module",
    params=[name if name == QUICKLY else pytest.param(name, marks=pytest.mark.slow) for name in MODELS],
)
def model(request, tmp_path_factory):
    config, formats, flags = MODELS[request.param]
    directory = tmp_path_factory.mktemp(request.param)
    write_checkpoint(directory, config, seed=1, formats=formats)
    return request.param, ["--model", str(directory), *flags]


def passed(name, flags, capsys, *more):
    """Run all and return what was left out beside what the model lacks; all others passed."""
    status = probe.main(["all", *more, *flags])
    out, _ = capsys.readouterr()
    assert status == 0, out
    assert "vacuous" not in out
    left = [line.split()[2] for line in out.splitlines() if line.startswith("left out ")]
    assert len(out.splitlines()) == len(FULL) + 1, "a line for each, and how it came out"
    lacking = {*(["quantisation"] if name == "narrow" else []), "needle", "text"}
    assert set(left[: len(lacking)]) == lacking
    return set(left[len(lacking) :])


def test_quick_probes_pass(model, capsys):
    assert passed(*model, capsys, "--quick") == set(OF_FATHOM)


@pytest.mark.slow
def test_full_probes_pass(model, capsys):
    assert passed(*model, capsys) == set(OF_FATHOM)


@pytest.mark.slow
def test_probes_of_fathom_itself_pass_where_they_are_named(model, capsys):
    _, flags = model
    assert probe.main([*OF_FATHOM, *flags]) == 0, capsys.readouterr().out


# What torch, the compiled loops and OpenBLAS take it for, which ask the processor otherwise.
AVX2 = {
    "ATEN_CPU_CAPABILITY": "avx2",
    "NUMBA_CPU_NAME": "haswell",
    "NUMBA_CPU_FEATURES": "+avx2,+fma,+bmi,+bmi2,+f16c,+lzcnt,+popcnt",
    "OPENBLAS_CORETYPE": "Haswell",
}
TOLD = """
import torch
from numba.core.registry import cpu_target
print(torch.backends.cpu.get_cpu_capability(), *cpu_target.target_context.codegen().magic_tuple()[1:])
"""


@pytest.mark.slow
@pytest.mark.skipif(platform.machine() not in {"x86_64", "AMD64"}, reason="AVX2 is of x86")
@pytest.mark.parametrize("flags", [(), ("--quick",)], ids=["whole", "quick"])
def test_probes_pass_on_a_processor_that_has_avx2_alone(flags, tmp_path):
    def ran(*command):
        environment, words = {**os.environ, **AVX2}, [sys.executable, *command]
        return subprocess.run(words, check=False, cwd=ROOT, env=environment, capture_output=True, text=True)

    assert ran("-c", TOLD).stdout.split() == ["AVX2", "haswell", AVX2["NUMBA_CPU_FEATURES"]]
    out = () if flags else ("--out", str(tmp_path / "pages"))
    result = ran("-m", "scripts.probe", "all", *flags, *out)
    assert result.returncode == 0, result.stdout
    assert f"{len(FULL)} of {len(FULL)} probes passed" in result.stdout
