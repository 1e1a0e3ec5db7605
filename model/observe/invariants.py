"""Tripwires: what must never happen in a run, looked at in every call, and ending it with exit status 1.

Each check is a few operations on tensors that are small beside the work they guard, and reads their outcome once
(`scripts.bench kernels --only tripwires` measures the cost in decode). They are exceptions and not assertions, because
`python -O` removes those. `model.observe.observer` says after which method each of them looks.
"""

import math

import torch
from torch import Tensor

from fathom.kernels.formats import coded_rows
from fathom.kernels.formats.basis_rows import expected_error
from fathom.kernels.formats.lloyd_max import distortion
from fathom.kernels.formats.rows import BasisRows, CodedRows, Rows, read
from fathom.model.cache.components import Components
from fathom.model.errors import Tripwire

# Of Sinkhorn's columns, whose last step divides by (sum + eps): eps = 1e-6, and fp32 rounding. Over a million random
# matrices, with logits of up to 50 sigma, 20 iterations leave at most 1.3e-6. (One or two may
# leave more than this bound; no published model takes so few.)
COLUMN_TOLERANCE = 1e-5
# Of a coded row's squared error, beside twice what its codebook makes of a normal distribution, or what its own columns
# lose to their codes where that is more, as in a row of which a few columns lie far beyond the last centroid.
CODED_TOLERANCE = 0.02
# Of a row's squared length that may be lost to a basis, whatever its columns lose to their codes: beyond, a row of
# zeros would be nearer, and the basis does not hold the row. Bases of the demo, fitted to 32768 tokens for contexts of
# 32K to 1M, lose of any entry of other documents of its language at most 0.049 at 4 bits and 0.0027 at 6; of what it
# was not trained on (English prose, Python, a table in Markdown, random ids, one id for ever) 0.61 and 0.067.
BASIS_SHARE = 1.0
SMALLEST_LENGTH = 2.0**-14  # of a coded row; below, float16 holds its length less and less well
CELLS = 32  # of measures of a layer at most, and of those outside of layers, where they are deferred
WEIGHT_TOLERANCE = 1e-5  # of the sum of routing weights, as a share of the route scale: fp32 rounding of k terms


def finite(site: str, layer: int | None, first: int | None, x: Tensor) -> None:
    """Trip where x [t, ...], of positions ``first ..`` (None: unknown), holds a NaN or an infinity.

    Streams are looked at after each sublayer: what is not finite inside of one is there by then. What only the
    selection reads (index queries, weights and keys) never gets there, and is looked at by itself.

    One pass: a sum is finite exactly when every term is, but for terms near the dtype's largest, and those are a fault
    too. bf16 is added up in fp32 whether that is asked for or not, but six times faster if not.
    """
    if math.isfinite(x.sum().item()):
        return
    bad = ~torch.isfinite(x).flatten(1)
    rows = bad.any(1).nonzero()
    at = int(rows[0]) if len(rows) else 0
    measured = f"{int(bad.sum())} of {bad.numel()} values not finite" if len(rows) else "values whose sum overflows"
    raise Tripwire(site, layer, _at(first, at), measured, "finite")


def _at(first: int | None, row: int) -> int | None:
    """Position of a row; None where a part of a model runs alone."""
    return None if first is None else first + row


def selection(
    layer: int, first: int, ratio: int, top_k: int, entries: int, selected: Tensor | None, evicted: int = 0
) -> Tensor:
    """Return the selection of a CSA layer, or trip.

    Parameters
    ----------
    layer, first
        Layer, and position of the first token.
    ratio, top_k, entries
        Tokens per entry, `index_topk`, and entries there are to select from.
    evicted
        Entries that are no longer among them: the first that can be selected is this one. A selection counts from it,
        a message names the entries of the sequence.
    selected
        [t, min(top_k, entries)] int32, see `kernels.indexer.reference.select`; None trips: a CSA layer without a
        selection sees its window alone, and still answers short prompts well.

    """
    selected = selection_shape(layer, first, top_k, entries, selected)
    width = selected.shape[1]
    if not width:
        return selected
    start = first - evicted * ratio  # where the first token would stand if the sequence began with these entries
    if selected.shape[0] == 1:
        seen = min((start + 1) // ratio, entries)  # decode: no tensor to build
        wanted = min(seen, width)
        row = selected[0].tolist()
        good = row[:wanted] == sorted(set(row[:wanted])) and row[wanted:] == [-1] * (width - wanted)
        good = good and (not wanted or 0 <= row[0] <= row[wanted - 1] < seen)
    else:
        good = bool(_in_order(selected, start, ratio, entries).all())
    if not good:
        _name_the_row(layer, first, ratio, top_k, entries, selected, evicted)
    return selected


def selection_shape(layer: int, first: int | None, top_k: int, entries: int, selected: Tensor | None) -> Tensor:
    """Return the selection, or trip where there is none, or one of another width or dtype."""
    site, width = "indexer.selected", min(top_k, entries)
    if selected is None:
        raise Tripwire(site, layer, first, "no selection", "one for every token of a CSA layer")
    if selected.ndim != 2 or selected.shape[1] != width or selected.dtype != torch.int32:
        found = f"{selected.dtype} {list(selected.shape)}"
        raise Tripwire(site, layer, first, found, f"int32 [t, {width}]: min(top-k {top_k}, {entries} entries)")
    return selected


def _in_order(selected: Tensor, first: int, ratio: int, entries: int) -> Tensor:
    """Which rows [t] of a selection [t, k] are min(k, visible) ascending visible entries, then -1; [t] bool."""
    t, width = selected.shape
    position = torch.arange(first + 1, first + t + 1, device=selected.device, dtype=torch.int32)
    seen = (position // ratio).clamp(max=entries)[:, None]  # [t, 1]
    filled = torch.arange(width, device=selected.device, dtype=torch.int32) < seen  # [t, k]
    inside = torch.where(filled, (selected >= 0) & (selected < seen), selected == -1).all(1)
    rising = ((selected[:, 1:] > selected[:, :-1]) | ~filled[:, 1:]).all(1)
    return inside & rising


def _name_the_row(layer: int, first: int, ratio: int, top_k: int, entries: int, selected: Tensor, evicted: int) -> None:
    """Raise for the first row at fault, saying which rule it breaks."""
    i = int((~_in_order(selected, first - evicted * ratio, ratio, entries)).nonzero()[0])
    position, row = first + i, selected[i].tolist()
    seen = min((position + 1) // ratio - evicted, entries)
    chosen = [entry for entry in row if entry != -1]
    site, wanted = "indexer.selected", min(top_k, seen)
    if outside := [entry for entry in chosen if not 0 <= entry < entries]:
        want = f"an entry of {evicted} .. {evicted + entries - 1}"
        number = outside[0] + (evicted if outside[0] >= 0 else 0)
        raise Tripwire(site, layer, position, f"entry {number}", want)
    if unfinished := [entry for entry in chosen if entry >= seen]:
        want = f"an entry below {evicted + seen}: later blocks are not finished"
        raise Tripwire(site, layer, position, f"entry {evicted + unfinished[0]}", want)
    if len(set(chosen)) < len(chosen):
        raise Tripwire(site, layer, position, f"{len(chosen) - len(set(chosen))} entries repeated", "distinct entries")
    if len(chosen) != wanted:
        want = f"{wanted}: min(top-k {top_k}, {seen} visible)"
        raise Tripwire(site, layer, position, f"{len(chosen)} entries selected", want)
    raise Tripwire(site, layer, position, "entries out of order", "ascending, then -1")


def stands(layer: int, cache: Components, position: int, first: int, coming: int) -> None:
    """Trip when a layer's cache does not stand where the position says, or has no room for `coming` more tokens.

    `first` is the earliest token whose window must still be there.
    """
    for where in cache.stands(position, first):
        count(where.site, layer, where.position, where.found, where.wanted)
    for site, frontier, rows, columns_wanted in cache.compressed():
        width(site, layer, rows.data, columns_wanted)
        closed = (position + coming) // frontier.ratio - position // frontier.ratio
        room(site, layer, position, rows.used + closed, rows.data.shape[0])


def width(site: str, layer: int, rows: Rows, wanted: int) -> None:
    """Trip when a cache [n, d] is not as wide as what the config says is stored there."""
    if rows.shape[-1] != wanted:
        raise Tripwire(site, layer, None, f"rows {rows.shape[-1]} wide", f"{wanted}")


def count(site: str, layer: int, position: int, found: int, wanted: int) -> None:
    """Trip when a cache does not stand where the position says: rows written, tokens in the open window."""
    if found != wanted:
        raise Tripwire(site, layer, position, f"{found}", f"{wanted}")


def room(site: str, layer: int, position: int, rows: int, capacity: int) -> None:
    """Trip when a cache would hold more rows than were allocated; the state refuses such a call before it begins."""
    if rows > capacity:
        raise Tripwire(site, layer, position, f"{rows} rows", f"at most {capacity}, as allocated")


def stored(site: str, layer: int, first: int, new: Tensor, rows: Rows, ratio: int = 1) -> None:
    """Trip where a cache in a narrow form does not give back, bit for bit, the rows just written.

    Parameters
    ----------
    site, layer
        What was written.
    first
        Row of the cache that `new` begins at.
    new
        [n, d], finite. Its zeros have signs, as those of E4M3 and E2M1 do.
    rows
        The cache. One in the run's dtype is as wide as `new`, and is not looked at.
    ratio
        Tokens per row: the position of a row that is coded is that of its last token.

    """
    if isinstance(rows, Tensor):
        return
    if isinstance(rows, CodedRows | BasisRows):
        _coded(site, layer, first, new, rows, ratio)
        return
    back, wanted = read(rows, first, first + new.shape[0]), new.float()
    if torch.equal(back.view(torch.int32), wanted.view(torch.int32)):
        return
    row, column = (back.view(torch.int32) != wanted.view(torch.int32)).nonzero()[0].tolist()
    measured = f"row {first + row}, column {column} comes back as {back[row, column]:.9g} from {type(rows).__name__}"
    raise Tripwire(site, layer, None, measured, f"{wanted[row, column]:.9g}, as written")


def _coded(site: str, layer: int, first: int, new: Tensor, rows: CodedRows | BasisRows, ratio: int) -> None:
    """Trip where a coded row comes back farther off than `coded_error` allows."""
    error, allowed, how = coded_error(first, new, rows)
    lost = ~(error <= allowed)  # NaN is not
    if not bool(lost.any()):
        return
    row = int(lost.nonzero()[0])
    position = (first + row + 1) * ratio - 1
    measured = f"row {first + row} comes back {error[row]:.3g} off, as a share of its squared length"
    if isinstance(rows, BasisRows) and error[row] > BASIS_SHARE:
        how, allowed = ": the basis does not hold this entry", torch.full_like(allowed, BASIS_SHARE)
    raise Tripwire(site, layer, position, measured, f"at most {allowed[row]:.3g}{how}")


def coded_error(first: int, new: Tensor, rows: CodedRows | BasisRows) -> tuple[Tensor, Tensor, str]:
    """How far rows [n, d] that were written from row `first` on come back off, as a share of their squared length.

    And how far they may, both [n] float32: as far as a codebook allows, and no farther than a basis that holds a row.
    """
    off = read(rows, first, first + new.shape[0]) - new.float()
    length = new.float().square().sum(1).clamp_min(SMALLEST_LENGTH**2)
    error = off.square().sum(1) / length
    if isinstance(rows, CodedRows):
        usual = coded_rows.expected_error(rows, new).clamp_min(2 * distortion(rows.bits))
        return error, usual + CODED_TOLERANCE, f" with {rows.bits} bits"
    usual = expected_error(rows, first, new) / length
    return error, (usual + CODED_TOLERANCE).clamp_max(BASIS_SHARE), " with these coefficients"


def column_tolerance(eps: float) -> float:
    """How far a column sum may be off 1, with `hc_eps` of the config: 1e-6 in published models."""
    return max(COLUMN_TOLERANCE, 10 * eps)


def columns(site: str, layer: int, first: int | None, comb: Tensor, eps: float) -> None:
    """Trip where a column of Sinkhorn's comb [t, s, s] is off 1; its last step is a column step."""
    if not comb.shape[0]:  # a rank may own none of a call's tokens
        return
    tolerance = column_tolerance(eps)
    # decode: sixteen numbers are added sooner on the host than by an op
    if comb.shape[0] == 1 and all(abs(sum(column) - 1) <= tolerance for column in zip(*comb[0].tolist())):  # noqa: B905 -- a matrix
        return
    off = (comb.sum(1) - 1).abs()  # [t, s]
    worst = off.max().item()
    if not worst <= tolerance:  # NaN is not
        at = int((~(off <= tolerance)).any(1).nonzero()[0])
        raise Tripwire(site, layer, _at(first, at), f"a column sum {worst:.3g} off 1", f"at most {tolerance:g}")


def routing(layer: int, first: int | None, ids: Tensor, weights: Tensor, scale: float, experts: int) -> None:
    """Trip where the experts of a token are not distinct, or their weights do not sum to the route scale.

    Parameters
    ----------
    layer, first
        Layer, and position of the first token.
    ids, weights
        [t, k] int64 and [t, k] float32.
    scale, experts
        `routed_scaling_factor`, `n_routed_experts`.

    """
    if not ids.shape[0]:
        return
    if ids.shape[0] == 1:  # decode: as in `columns`
        chosen, total = ids[0].tolist(), math.fsum(weights[0].tolist())
        distinct = len(set(chosen)) == len(chosen) and min(chosen) >= 0 and max(chosen) < experts
        if distinct and abs(total - scale) <= WEIGHT_TOLERANCE * scale:
            return
    ordered = ids.sort(dim=1).values
    off = ((weights.sum(1) - scale).abs() / scale).max().item()
    repeated = bool((ordered[:, 1:] == ordered[:, :-1]).any())
    if repeated:
        at = int((ordered[:, 1:] == ordered[:, :-1]).any(1).nonzero()[0])
        raise Tripwire("experts.ids", layer, _at(first, at), f"experts {ids[at].tolist()}", "distinct ones")
    low, high = int(ordered[:, 0].min()), int(ordered[:, -1].max())
    if low < 0 or high >= experts:
        raise Tripwire("experts.ids", layer, first, f"expert {low if low < 0 else high}", f"0 .. {experts - 1}")
    if not off <= WEIGHT_TOLERANCE:
        at = int((~((weights.sum(1) - scale).abs() <= WEIGHT_TOLERANCE * scale)).nonzero()[0])
        total = weights[at].sum().item()
        raise Tripwire("experts.weights", layer, _at(first, at), f"weights that sum to {total:.6g}", f"{scale:g}")
