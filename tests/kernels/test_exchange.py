"""Rows that are written into the memory of several ranks: tensors of this process stand for theirs."""

import pytest
import torch

push = pytest.importorskip("fathom.kernels.exchange.triton", reason="Triton is not on every platform").push

ROWS = 11  # of a rank's buffer
pytestmark = pytest.mark.interpreted  # whose kernels write where the host's tensors are


def drawn(seed, n, width):
    return torch.randint(0, 256, (n, width), generator=torch.Generator().manual_seed(seed), dtype=torch.uint8)


def places_of(n, ranks, dtype):
    """Rows for no rank, for one, and for several, at places of their own in each."""
    g = torch.Generator().manual_seed(n)
    places = torch.stack([torch.randperm(ROWS, generator=g)[:n] for _ in range(ranks)], 1)
    wanted = torch.rand(n, ranks, generator=g) < 0.6
    wanted[0], wanted[1] = False, True
    return torch.where(wanted, places, -1).to(dtype)


@pytest.mark.parametrize("places_dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize(
    ("width", "dtype"),
    [(7224, torch.uint8), (4096, torch.bfloat16), (6, torch.bfloat16), (1, torch.float32), (2052, torch.uint8)],
)
def test_rows_lie_where_each_rank_wants_them_and_nothing_else_is_written(width, dtype, places_dtype):
    """Words of eight bytes, and of four; in one part of a row and in several."""
    n, ranks = 8, 3
    rows = drawn(0, n, width * dtype.itemsize)
    buffers = [drawn(1 + rank, ROWS, rows.shape[1]) for rank in range(ranks)]
    wanted, places = [buffer.clone() for buffer in buffers], places_of(n, ranks, places_dtype)
    for row, rank in (places >= 0).nonzero().tolist():
        wanted[rank][places[row, rank]] = rows[row]
    before = rows.clone(), places.clone()
    assert push(rows.view(dtype), places, torch.tensor([buffer.data_ptr() for buffer in buffers])) is None
    assert all(map(torch.equal, buffers, wanted))
    assert torch.equal(rows, before[0])
    assert torch.equal(places, before[1])


def test_rows_that_begin_between_words_of_eight_bytes_are_written_in_fours():
    rows, buffer = torch.arange(9.0)[1:].view(2, 4), torch.zeros(2, 4)
    push(rows, torch.tensor([[1], [0]]), torch.tensor([buffer.data_ptr()]))
    assert torch.equal(buffer, rows.flip(0))


def test_no_rows_are_written_nowhere():
    push(torch.zeros(0, 4), torch.zeros(0, 3, dtype=torch.int32), torch.zeros(3, dtype=torch.int64))


def test_what_is_no_table_of_words_is_refused():
    addresses = torch.zeros(1, dtype=torch.int64)
    none = torch.full((2, 1), -1)
    with pytest.raises(AssertionError, match="rows of 6 bytes"):
        push(torch.zeros(2, 3).bfloat16(), none, addresses)
    with pytest.raises(AssertionError, match="rows lie"):
        push(torch.zeros(4, 2).T, none, addresses)
    with pytest.raises(AssertionError, match="2 rows and 1 ranks"):
        push(torch.zeros(2, 4), none.T, addresses)
    with pytest.raises(AssertionError, match="want int64"):
        push(torch.zeros(2, 4), none, addresses.int())
