"""The harness itself: results by rank, and every way in which a rank can fail reaches the test."""

import os
import signal
import time

import pytest
import torch
import torch.distributed as dist

from model.errors import RankDisagreement
from tests import gloo


def summed(group, start):
    x = torch.full((3,), start + group.rank)
    dist.all_reduce(x, group=group.processes)
    return group.rank, group.size, x


def one_fails(group, how):
    if group.rank == 1:
        if how == "die":
            os.kill(os.getpid(), signal.SIGKILL)
        if how == "sleep":
            time.sleep(60)
        raise RankDisagreement("site", 3, 1, (0,), 1, 2)
    dist.barrier(group=group.processes)


def test_results_come_by_rank():
    results = gloo.run(2, summed, 5)
    assert [(rank, size, x.tolist()) for rank, size, x in results] == [(0, 2, [11] * 3), (1, 2, [11] * 3)]


def test_a_rank_that_raises_is_named():
    said = r"rank 1 raised RankDisagreement: site of layer 3, at \[0\]: 1 on rank 0, 2 on rank 1"
    with pytest.raises(AssertionError, match=said):
        gloo.run(2, one_fails, "raise")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("how", "said"), [("die", "rank 1 died without a word"), ("sleep", "rank 1 was still running")]
)
def test_a_rank_that_dies_or_hangs_is_named(how, said):
    with pytest.raises(AssertionError, match=said):
        gloo.run(2, one_fails, how, timeout=20.0 if how == "sleep" else 60.0)
