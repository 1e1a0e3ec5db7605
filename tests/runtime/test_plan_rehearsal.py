"""What a rehearsal counts: shapes as torch makes them, tensors while they are alive, and scratch beside them."""

import pytest
import torch

from fathom.runtime.plan.alive import SLACK, Alive
from fathom.runtime.plan.shapes import empty

OPERATIONS = {
    "add": lambda x, _: x + x[:, :1].float(),
    "compared": lambda x, i: (x > 0) & (i[:, None] >= 2),
    "where": lambda x, _: torch.where(x > 0, x, -1),
    "whole numbers": lambda _, i: (i // 3, i % 3, i * 2, i.clamp(0, 3)),
    "angles": lambda x, i: (i[:, None] * x.float()[0]).cos(),
    "indexed": lambda x, i: (x[i], x[i, i % 4]),
    "sorted": lambda x, _: x.argsort(1),
    "joined": lambda x, _: torch.cat((x, x.new_zeros(5, 2)), dim=1),
    "repeated": lambda x, _: x[:, None].repeat(1, 3, 1),
    "reduced": lambda x, _: (x[:, None].mean(1), (x > 0).any(1)),
    "counted": lambda x, _: torch.arange(3, 17, 4, device=x.device),
    "made": lambda x, _: (torch.zeros_like(x), x.new_empty(7)),
    "in place": lambda x, i: torch.zeros(5, 4, device=x.device).index_add_(0, i, x.float()),
}


@pytest.mark.parametrize("name", OPERATIONS)
def test_operations_make_what_torch_makes(name):
    def given(device):
        return torch.zeros(5, 4, dtype=torch.bfloat16, device=device), torch.zeros(5, dtype=torch.int64, device=device)

    def outlines(made):
        return [(one.shape, one.dtype) for one in (made if isinstance(made, tuple) else (made,))]

    with torch.inference_mode():
        wanted = outlines(OPERATIONS[name](*given("cpu")))
        x, i = given("meta")
        with Alive({}).counting():
            assert outlines(OPERATIONS[name](x, i)) == wanted


def test_a_tensor_counts_until_its_last_view_ends():
    alive = Alive({})
    with torch.inference_mode(), alive.counting():
        one = empty(100)
        view = one[:10]
        del one
        assert alive.total == 400
        alive.take(1000)
        del view
        assert alive.total == 0
        two = empty(200)
        assert (alive.total, alive.peak) == (800, 1400), "what was alive together"
        del two
    assert alive.largest.nbytes == 1400 + SLACK
    assert alive.largest.parts["scratch"] == 1000 + SLACK
