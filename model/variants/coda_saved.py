"""Whether a saved CoDA cache is one that a run can have left: a checksum can be made up, so content is looked at.

What the banks compare tokens with follows from the slots' rows, but not bit by bit: one row at a time its norm is
summed in another order than many at a time. So what was saved is taken as it is, once it agrees with the rows.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from fathom.model.errors import StateError
from fathom.model.variants.coda_banks import Bank, ExactBank, SummaryBank
from fathom.model.variants.coda_settings import CodaSettings

# between norms of one row summed in two orders, relative; copies in BF16 have 2^-8 of rounding besides
CLOSE = {torch.float32: 1e-4, torch.bfloat16: 2**-7}


def check_saved(
    settings: CodaSettings, banks: tuple[ExactBank, SummaryBank], position: int, saved: Mapping[str, Tensor]
) -> None:
    """Refuse what no cache with these settings has at `position`: StateError naming it.

    Parameters
    ----------
    settings, banks
        Of the cache that is to take it; nothing of it is changed.
    position
        Tokens written.
    saved
        As `CodaCache.tensors`, of the right shapes and dtypes; the banks' targets may be left out.

    """
    for name in ("keys", "values"):
        if not bool(saved[name].isfinite().all()):
            raise StateError(f"coda: {name} of the state are not all finite")
    gates, counts = saved["gates"], saved["counts"]
    if not bool(((gates >= 0) & (gates <= 1)).all()):
        raise StateError("coda: gates of the state are not all between 0 and 1")
    if int(counts.min()) < 0:
        raise StateError(f"coda: a count of the state is {int(counts.min())}")
    used, window = saved["used"], settings.window
    active = [int(n) for n in saved["active"]]
    for name, bank, n in zip(("exact", "summary"), banks, active, strict=True):
        if not bank.start <= n <= bank.size:
            raise StateError(f"coda: {n} active {name} slots in the state, want {bank.start} to {bank.size}")
    if used[:window].tolist() != [slot < position for slot in range(window)]:
        raise StateError(f"coda: the ring of the state is not that of {position} tokens")
    exact, summary = used[window : window + banks[0].size], used[window + banks[0].size :]
    if bool(summary[active[1] :].any()) or (not settings.published_growth and bool(exact[active[0] :].any())):
        raise StateError("coda: slots of the state are in use that are not active")
    times = saved["last_used"][exact]
    if not bool(((times >= 0) & (times < position)).all()):
        raise StateError(f"coda: last_used of the state is not all between 0 and {position - 1}, its last position")
    _check_targets("exact_targets", banks[0], saved["values"][:, window : window + banks[0].size], saved)
    compared = saved["values" if banks[1].by_value else "keys"]
    _check_targets("summary_targets", banks[1], compared[:, window + banks[0].size :], saved)


def _check_targets(name: str, bank: Bank, rows: Tensor, saved: Mapping[str, Tensor]) -> None:
    """Refuse what a bank is said to compare with where it is not what follows from its rows [K, m, D]."""
    if name not in saved:
        return
    targets = bank.targets
    wanted, found = targets.of(rows.to(targets.mask.device)).float(), saved[name].to(targets.mask.device).float()
    close = CLOSE[targets.data.dtype]
    if not bool(((found - wanted).abs() <= close * wanted.abs().clamp(min=close)).all()):
        raise StateError(f"coda: {name} of the state are not those of its rows")
