import pytest
import torch

from kernels.norm import reference as norm
from kernels.norm.triton import rms_norm


@pytest.mark.parametrize("shape", [(1, 1), (3, 5), (2, 3, 64), (4, 1000), (0, 64)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("weighted", [True, False])
def test_rows_are_normed_as_in_the_reference(shape, dtype, weighted):
    generator = torch.Generator().manual_seed(0)
    x = (torch.randn(shape, generator=generator) * 10).to(dtype)
    weight = torch.randn(shape[-1], generator=generator) if weighted else None
    want = norm.rms_norm(x, weight, 1e-6)
    ulp = 2**-8 if dtype == torch.bfloat16 else 2**-21  # one of bf16; four of fp32, for the order of the sum
    torch.testing.assert_close(rms_norm(x, weight, 1e-6), want, rtol=ulp, atol=0)


def test_rows_that_do_not_lie_in_order_are_read_as_they_are():
    x = torch.randn(8, 6, generator=torch.Generator().manual_seed(1)).T
    torch.testing.assert_close(rms_norm(x, None, 1e-6), norm.rms_norm(x, None, 1e-6))


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_what_is_not_finite_stays_in_its_row(bad):
    x = torch.ones(3, 8)
    x[1, 2] = bad
    assert (
        rms_norm(x, None, 1e-6).isfinite().all(dim=1).tolist()
        == norm.rms_norm(x, None, 1e-6).isfinite().all(dim=1).tolist()
        == [True, False, True]
    )
