"""A whole model on TRITON, in Triton's interpreter, against CPU: the kernels meet each other's real inputs."""

import pytest
import torch

from kernels.triton_ops import TRITON
from tests.transformers_model import load_ours, oracle, our_logits

# Sums of some hundred fp32 products in another order, through three layers: as of chunking, audits/plain-parity.md.
BOUND = 2e-5


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tiny")
    oracle((0, 4, 128), index_topk=1).save_pretrained(folder)
    return folder


def test_logits_of_prefill_and_decode_are_those_of_the_blocked_ops(directory):
    """Windows of 4 close in a call and between calls; of the two entries one is selected."""
    tokens = torch.randint(0, 320, (9,), generator=torch.Generator().manual_seed(0))
    want = our_logits(load_ours(directory), tokens)
    ours = our_logits(load_ours(directory, TRITON), tokens, [6, 2, 1])
    assert want.std() > 0.5
    torch.testing.assert_close(ours, want, rtol=0, atol=BOUND)
