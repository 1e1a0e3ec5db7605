"""A kernel is compiled once for a decode at any position, and a few times for calls of every size."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
# Of more than 16,384 index keys, or 65,536 positions, first digits of scores are counted where these are computed.
DECODE = {("indexer bf16", "_scores"): 2, ("indexer fp4", "_scores"): 2}
# Tiles follow the size of a call: of 1 to 512 tokens these are as many. Up to 16 a linear decodes its rows for 1, 2 or
# 4 at once, and mHC has weights of each by itself; of more than 32 tokens experts have tiles of three sizes. Linears of
# codes have two, of which one splits. Attention has rows of up to 8 tokens, of more, and, of entries in FP8, of what is
# decoded ahead; of other entries, tiles that fill the machine alone or not.
PREFILL = {
    "_attend": 3,
    "_few": 3,
    "_linear": 3,
    "_product_of_codes": 3,
    "_gate_up_of_codes": 3,
    "_down_of_codes": 3,
    "_compress": 2,
    "_weigh": 2,
}
MORE = {("experts of codes", "_simulate"): 2}  # the inputs of both matrices have other groups


@pytest.fixture(scope="module")
def counted():
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    command = [sys.executable, str(HERE / "specialisations.py")]
    environment["PYTHONPATH"] = str(HERE.parents[1])
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_a_decode_at_any_position_compiles_each_kernel_once(counted):
    more = {(part, kernel): n for part, kernels in counted["decode"].items() for kernel, n in kernels.items() if n > 1}
    assert more == DECODE
    assert {"_attend", "_merge", "_scores", "_whole", "_count", "_collect", "_compress", "_few", "_few_up"} <= {
        kernel for kernels in counted["decode"].values() for kernel in kernels
    }


def test_calls_of_every_size_compile_a_kernel_a_few_times(counted):
    for part, kernels in counted["prefill"].items():
        assert kernels == {kernel: MORE.get((part, kernel), PREFILL.get(kernel, 1)) for kernel in kernels}
