"""What a decode step leaves for the host to look at: sums, of which one that is not finite names a place."""

import math

import pytest
import torch

from kernels import rows
from model import sites
from model.errors import Tripwire
from model.step_checks import Sums

CPU = torch.device("cpu")


@pytest.mark.parametrize("make", [
    lambda: rows.fp8_entries(3, 80, 16, CPU),
    lambda: rows.fp8_keys(3, 64, CPU),
    lambda: rows.fp4_keys(3, 64, CPU),
    lambda: torch.zeros(3, 64),
])  # fmt: skip
def test_a_row_that_was_stored_with_a_nan_trips_when_its_window_closes(make):
    kept = make()
    for value, wrong in ((1.0, False), (math.nan, True), (math.inf, True)):
        new = torch.ones(1, rows.width(kept))
        new[0, 5] = value
        rows.write(kept, 1, new)
        for index in (0, 1, 2):
            sums = Sums(2, CPU)
            sums.add_row(sites.ENTRY, 4, kept, torch.tensor([index]), 4)
            for position in (4, 5, 6, 8):
                sums.look(position)  # no window closes here: the row is none of this step's
            if wrong and index == 1 and not (value == math.inf and isinstance(kept, rows.Fp4Keys | rows.Fp8Keys)):
                with pytest.raises(Tripwire, match=r"attention\.entry of layer 4 at position 7"):
                    sums.look(7)
    kept = make()
    if isinstance(kept, rows.Fp8Entries):
        kept.rope[1, 3] = math.inf
        sums = Sums(2, CPU)
        sums.add_row(sites.ENTRY, 4, kept, torch.tensor([1]), 4)
        with pytest.raises(Tripwire):
            sums.look(7)


def test_sums_of_the_last_step_count_alone():
    sums = Sums(2, CPU)
    sums.add(sites.LOGITS, None, torch.tensor([math.inf]))
    sums.begin()
    sums.add(sites.LOGITS, None, torch.ones(2, 2, dtype=torch.bfloat16))
    sums.look(0)
    sums.add(sites.STREAMS, 1, torch.tensor([3.0e38, 3.0e38]))
    with pytest.raises(Tripwire, match=r"streams of layer 1 at position 9: values whose sum is inf"):
        sums.look(9)
