"""Two bounded states made into one: what is kept, where it stands, and what is refused."""

from copy import deepcopy

import pytest
import torch

from fathom.kernels.rope.reference import angles, frequencies, rotate_halves
from fathom.model.cache.gqa import all_heads
from fathom.model.errors import StateError
from fathom.model.variants.coda import CodaCache
from fathom.model.variants.coda_merge import merge_caches
from fathom.model.variants.coda_settings import CodaSettings
from fathom.runtime.generate import prefill
from fathom.runtime.load import load, load_any
from fathom.runtime.merge import merge, mergeable
from fathom.runtime.options import RunOptions
from fathom.runtime.statefile import load_state, save_state
from tests.llama_model import oracle
from tests.make_checkpoint import tiny_config, write_checkpoint

K, D, W = 2, 16, 5
FREQS = frequencies(D, 100.0)
KV = ("all=coda:window=6,exact=4,summary=4,block=8",)


def turn(positions):
    return angles(torch.as_tensor(positions), FREQS)


def drawn(n, seed):
    """Keys before their rotation, values, and gates that banks take: [n, K, D], [n, K, D], [n]."""
    generator = torch.Generator().manual_seed(seed)
    k, v = (torch.randn(n, K, D, generator=generator) for _ in range(2))
    return k, v, torch.rand(n, generator=generator) * 0.8 + 0.15


def cache(n=0, seed=0, *, start=0, exact=3, summary=4, init="normal"):
    """A cache that was given n tokens in blocks of 4, the first of them at position `start`."""
    settings = CodaSettings(window=W, exact=exact, summary=summary, rope="half", memory_init=init)
    made = CodaCache(settings, all_heads(K), D, torch.full((K,), -1.0), torch.float32, torch.device("cpu"))
    k, v, gates = drawn(n, seed)
    k = rotate_halves(k, *turn(torch.arange(start, start + n)))
    for rows in torch.arange(n).split(4):
        made.write_block(k[rows], v[rows], gates[rows])
    return made


def equal(a, b):
    assert a.position == b.position
    ours, theirs = a.tensors(a.position), b.tensors(b.position)
    used, exact, summary = ours["used"], slice(W, W + a.exact.size), slice(W + a.exact.size, None)
    seen = {"keys": used, "values": used, "gates": used[:W]}  # of other slots nobody asks
    seen |= {"exact_targets": used[exact], "summary_targets": used[summary]}
    for name, part in ours.items():
        if name in seen:
            axis = 0 if name == "gates" else 1
            found, wanted = (held.transpose(0, axis)[seen[name]] for held in (part, theirs[name]))
            assert torch.equal(found, wanted), name
        else:
            assert torch.equal(part, theirs[name]), name


def merged(a, b, shift=None, block=4):
    shift = a.position if shift is None else shift
    return merge_caches(a, b, shift, turn([shift]), block)


@pytest.mark.parametrize("n", [0, 3, 5, 23])
def test_nothing_behind_or_before_a_document_changes_nothing(n):
    a = cache(n, 1)
    kept = merged(a, cache())
    equal(a, cache(n, 1))
    assert kept.exact_lost == kept.summary_pairs == kept.evicted == 0
    a = cache()
    merged(a, cache(n, 1))
    equal(a, cache(n, 1))


@pytest.mark.parametrize(("n", "m"), [(2, 2), (3, 4), (4, 3), (23, 1), (23, 4), (40, 3)])
def test_a_document_within_the_window_is_a_block_behind_the_first(n, m):
    """What has evicted nothing is its tokens, and to put them behind a state is to write them."""
    a, written, b = cache(n, 1), cache(n, 1), cache(m, 2)
    k, v, gates = drawn(m, 2)
    k = rotate_halves(rotate_halves(k, *turn(torch.arange(m))), *turn([n]))
    written.write_block(k, v, gates)
    merged(a, b)
    equal(a, written)
    assert a.metrics() == written.metrics()


@pytest.mark.parametrize("shift", [7, 300])
def test_moved_keys_are_those_of_a_document_that_began_there(shift):
    """Ring, exact tokens and averages alike; empty slots of zeros, because random ones are no document's."""
    a = cache(init="zeros")
    merged(a, cache(30, 3, init="zeros"), shift)
    there = cache(30, 3, start=shift, init="zeros")
    ring = (torch.arange(25, 30) + shift) % W
    assert torch.allclose(a.keys[:, ring], there.keys[:, torch.arange(25, 30) % W], atol=2e-5)
    assert torch.allclose(a.keys[:, W:], there.keys[:, W:], atol=2e-5)
    assert torch.equal(a.values[:, W:], there.values[:, W:])
    assert torch.equal(a.exact.last_used, there.exact.last_used + shift)
    still = cache(30, 3, init="zeros")
    assert (still.keys[:, W:] - there.keys[:, W:]).abs().max() > 0.1


def test_layer_0_has_the_keys_and_values_of_the_text_read_in_one_go(tmp_path):
    """Layer 0 sees embeddings, which do not know what precedes them: an oracle for the ring, by the model itself."""
    oracle().save_pretrained(tmp_path)
    loaded = mergeable(load_any(tmp_path, RunOptions("plain", "fp32", kv=KV)), "state")
    tokens = torch.randint(2, 96, (50,), generator=torch.Generator().manual_seed(5)).tolist()

    def read(ids, room):
        state = loaded.model.new_state(room, 16)
        prefill(loaded.model, state, ids, lambda _: None)
        return state

    whole, first, second = read(tokens, 50), read(tokens[:31], 50), read(tokens[31:], 50)
    before = deepcopy(second)
    kept = merge(loaded, first, second)
    ours, theirs = first.layers[0].coda, whole.layers[0].coda
    assert torch.allclose(ours.keys[:, :6], theirs.keys[:, :6], atol=1e-5)
    assert torch.allclose(ours.values[:, :6], theirs.values[:, :6], atol=1e-5)
    assert not torch.allclose(first.layers[2].coda.values[:, :6], whole.layers[2].coda.values[:, :6], atol=1e-2)
    assert first.position == first.layers[1].position == ours.position == 50
    for layer, same in zip(second.layers, before.layers, strict=True):
        assert all(torch.equal(part, same.tensors(19)[name]) for name, part in layer.tensors(19).items())
    assert kept.ring_second == 3 * 6
    assert kept.evicted == 3 * 6
    more = torch.tensor(tokens[:7])
    save_state(tmp_path / "merged", first, loaded, None)
    again = loaded.model.new_state(60, 16)
    load_state(tmp_path / "merged", again, loaded)
    first.max_context = 60
    for part in (more[:4], more[4:5], more[5:]):
        assert torch.equal(loaded.model(part, first), loaded.model(part, again))


@pytest.mark.parametrize(("n", "m"), [(3, 2), (9, 7), (14, 3), (30, 12), (12, 30), (30, 30)])
@pytest.mark.parametrize("exact", [3, 4, 40])
@pytest.mark.parametrize("summary", [4, 60])
def test_counts_and_sizes_are_those_of_both(n, m, exact, summary):
    a, b = (cache(size, seed, exact=exact, summary=summary) for size, seed in ((n, 1), (m, 2)))
    after = cache(n, 1, exact=exact, summary=summary)
    oldest, stays = max(0, n - W), min(max(0, n - W, n + m - W), n)
    for first in range(oldest, stays, 4):
        after.evict(first, min(4, stays - first))
    ours, theirs = ([int(bank.used.sum()) for bank in (x.exact, x.summary)] for x in (after, b))
    counts = {name: count + b.metrics()[name] for name, count in after.metrics().items() if "inserts" in name}
    kept = merged(a, b)
    assert a.metrics()["total_evictions"] == n + m - min(n + m, W)
    assert (int(a.exact.used.sum()), int(a.summary.used.sum())) == tuple(
        min(size, x + y) for size, x, y in zip((exact, summary), ours, theirs, strict=True)
    )
    assert kept.exact_first + kept.exact_second + kept.exact_lost == ours[0] + theirs[0]
    assert kept.exact_lost == max(0, ours[0] + theirs[0] - exact)
    assert kept.summary_pairs == max(0, ours[1] + theirs[1] - summary)
    assert kept.summary_alone + 2 * kept.summary_pairs == ours[1] + theirs[1]
    assert (kept.ring_first, kept.ring_second) == (max(0, min(W, n + m) - min(m, W)), min(m, W))
    assert counts.items() <= a.metrics().items()
    assert not kept.exact_lost or min(kept.exact_first, kept.exact_second) >= min(exact // 2, ours[0], theirs[0])
    if not (kept.exact_lost or kept.summary_pairs):  # every slot of both is there, whichever its place
        for bank in ("exact", "summary"):
            rows = {tuple(row.tolist()) for x in (after, b) for row in held(getattr(x, bank))}
            assert {tuple(row.tolist()) for row in held(getattr(a, bank))} == rows


def held(bank):
    return bank.values[:, bank.used].transpose(0, 1).flatten(1)


def test_the_most_recently_used_of_each_document_stay():
    """By hand: of 2 + 3 tokens in a bank of 3, the first document's two and the second one's newest."""
    a, b = cache(exact=3), cache(exact=3)
    for made, times, at in ((a, [5, 0, 9], (0, 2)), (b, [4, 8, 8], (0, 1, 2))):
        made.exact.last_used.copy_(torch.tensor(times))
        made.exact.used[list(at)] = True
        made.exact.values.copy_(torch.arange(3.0)[None, :, None].expand(K, 3, D) + 10 * len(at))
    kept = merged(a, b, 100)
    assert (kept.exact_first, kept.exact_second, kept.exact_lost) == (2, 1, 2)
    assert a.exact.last_used.tolist() == [5, 108, 9]
    assert a.exact.values[0, :, 0].tolist() == [20, 31, 22]


def test_the_most_alike_averages_become_their_mean():
    """By hand: 3 + 2 averages in a bank of 4: one pair, the most alike, and the other of the second where room is."""
    a, b = cache(), cache()
    low = a.summary.blend != 0
    rows = torch.eye(D)[low][:4] * torch.tensor([1.0, 2.0, 3.0, 4.0])[:, None]  # 4 directions
    for made, kinds in ((a, (0, 1, 2)), (b, (3, 1))):
        for slot, kind in enumerate(kinds):
            made.summary.keys[:, slot], made.summary.values[:, slot] = rows[kind], 10.0 * kind + len(kinds)
            made.summary.used[slot] = True
        made.renew()
    b.summary.keys[:, 1] *= 3
    kept = merged(a, b, 0)
    assert (kept.summary_alone, kept.summary_pairs) == (3, 1)
    wanted = torch.stack((rows[0], 2 * rows[1], rows[2], rows[3]))  # (1 + 3) / 2
    assert torch.equal(a.summary.keys, wanted.expand(K, 4, D))
    assert a.summary.values[0, :, 0].tolist() == [3, (13 + 12) / 2, 23, 32]


def test_documents_that_stay_where_they_are_keep_their_keys():
    a, b = cache(20, 1, exact=60, summary=60), cache(25, 2, exact=60, summary=60)
    keys = b.keys[:, W:][:, b.used[W:]]
    merged(a, b, 0)
    assert a.position == 25
    assert torch.equal(a.keys[:, :W], b.keys[:, :W])
    found = {tuple(row.tolist()) for row in a.keys[0, W:][a.used[W:]]}
    assert {tuple(row.tolist()) for row in keys[0]} <= found


def test_what_cannot_be_merged_is_refused(tmp_path):
    path = tmp_path / "llama"
    oracle().save_pretrained(path)
    for kv, says in (
        ((), "a.state: layer 0 keeps full; only bounded caches of grouped heads"),
        (("all=coda:window=6", "2=shard:rank=8"), "a.state: layer 2 keeps shard:rank=8,"),
        (("all=coda:window=6", "1=coda:published=1"), "a.state: layer 1 has published=1, which averages one half"),
    ):
        with pytest.raises(StateError, match=says):
            mergeable(load_any(path, RunOptions("plain", "fp32", kv=kv)), "a.state")
    write_checkpoint(tmp_path, tiny_config(), seed=11)
    v4 = load(tmp_path, RunOptions("deployed", "bf16", kv=("hca=coda",)))
    with pytest.raises(StateError, match="states of DeepSeek-V4 cannot be merged, only those of Llama"):
        mergeable(v4, "state")
    loaded = mergeable(load_any(path, RunOptions("plain", "fp32", kv=KV)), "state")
    first, second = loaded.model.new_state(256, 16), loaded.model.new_state(256, 16)
    prefill(loaded.model, first, [3] * 200, lambda _: None)
    prefill(loaded.model, second, [4] * 57, lambda _: None)
    with pytest.raises(StateError, match="200 and 57 tokens do not fit into 256 positions"):
        merge(loaded, first, second)
    assert first.position == 200
