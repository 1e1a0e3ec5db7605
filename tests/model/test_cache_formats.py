"""Caches in narrow forms: the same run to the bit in fewer bytes, and a tripwire where a form does not hold a value."""

import itertools
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from fathom.kernels.formats import rows
from fathom.kernels.ops import CPU, REFERENCE
from fathom.model.cache.entries import Entries
from fathom.model.cache.formats import CacheFormats
from fathom.model.choices import ENTRY_FORMATS, KEY_FORMATS
from fathom.model.config import ModelConfig
from fathom.model.errors import CapacityError, ConfigError, StateError, Tripwire
from fathom.model.observe import invariants, sites
from fathom.model.observe.observer import listening
from fathom.model.state import State
from fathom.runtime.digest import digest
from fathom.runtime.load import load
from fathom.runtime.options import DEMO, RunOptions
from fathom.runtime.statefile import load_state, save_state
from tests.deployed_cases import make_case

CONFIGS = Path(__file__).parents[2] / "model" / "published"
META = torch.device("meta")
FORMS = list(itertools.product(ENTRY_FORMATS, KEY_FORMATS))
LENGTHS = (67, 1, 70, 33, *[1] * 5)  # odd calls, then decoding; 44 entries, of which the demo selects 16
TOKENS = torch.randint(2, 1000, (sum(LENGTHS),), generator=torch.Generator().manual_seed(3))


def options(entries, keys, dtype="bf16"):
    return RunOptions(dtype=dtype, entry_format=entries, key_format=keys)


def ran(directory, chosen, ops=CPU, lengths=LENGTHS):
    """Logits of all tokens, what each CSA layer selected, and the state."""
    model = load(directory, chosen, ops).model
    state, selected = model.new_state(sum(lengths), max(lengths)), []
    tokens = TOKENS[: sum(lengths)] % model.config.vocab_size
    with listening(model, {sites.SELECTED: lambda layer, x: selected.append((layer, x.clone()))}):
        logits = [model.logits(model(part, state)) for part in tokens.split(lengths)]
    return torch.cat(logits), selected, state


def same(one, other):
    assert torch.equal(one[0], other[0]), f"logits off by {(one[0] - other[0]).abs().max()}"
    assert len(one[1]) == len(other[1])
    for (layer, ours), (_, theirs) in zip(one[1], other[1], strict=True):
        assert torch.equal(ours, theirs), f"selections of layer {layer} differ"


@pytest.fixture(scope="module")
def plainly_stored():
    logits, selected, state = ran(DEMO, options("dtype", "dtype"))
    chosen = max(int((x >= 0).sum(1).min()) for _, x in selected)
    assert chosen == 16, "no token sees more entries than it selects: selections could not differ"
    return logits, selected, state


@pytest.mark.parametrize(("entries", "keys"), FORMS[1:])
def test_every_format_gives_the_same_logits_and_selections(entries, keys, plainly_stored):
    found = ran(DEMO, options(entries, keys))
    same(found, plainly_stored)
    held = {type(cache.entries.data).__name__ for cache in found[2].layers if hasattr(cache, "entries")}
    assert held == {{"dtype": "Tensor", "fp8": "Fp8Entries"}[entries]}
    held = {type(cache.keys.data).__name__ for cache in found[2].layers if hasattr(cache, "keys")}
    assert held == {{"dtype": "Tensor", "fp8": "Fp8Keys", "fp4": "Fp4Keys"}[keys]}


def test_fp8_scores_of_deployed_queries_change_nothing_and_the_model_says_so(plainly_stored):
    """What is rounded to E2M1 per 32 columns fits E4M3 with a power of two per head."""
    chosen = replace(options("dtype", "fp8"), index_scores="fp8")
    same(ran(DEMO, chosen), plainly_stored)
    model = load(DEMO, chosen, CPU).model
    model(TOKENS[:9] % model.config.vocab_size, model.new_state(9, 9))
    assert model.arithmetic.fp8_scores
    asked = []
    spied = CPU._replace(select=lambda q, *given: asked.append(q) or CPU.select(q, *given))
    model = load(DEMO, chosen, spied).model
    model(TOKENS[:9] % model.config.vocab_size, model.new_state(9, 9))
    assert asked
    assert all(torch.equal(q, CPU.simulate_fp8(q, q.shape[-1])) for q in asked)


def test_keys_that_are_rounded_to_fp8_fit_fp8_and_not_fp4():
    """Without a Hadamard transform, one scale a row; KV is rounded and inputs of linears are not."""
    mixed = RunOptions("linears=none,kv=fp8,index=fp8")
    wanted = ran(DEMO, mixed)
    assert min(int((x >= 0).sum(1).min()) for _, x in wanted[1]) == 0  # a token sees no entry yet,
    assert max(int((x >= 0).sum(1).max()) for _, x in wanted[1]) == 16  # another more than it selects
    same(ran(DEMO, replace(mixed, entry_format="fp8", key_format="fp8")), wanted)
    scored = ran(DEMO, replace(mixed, key_format="fp8", index_scores="fp8"))
    same(scored, wanted)  # queries are rounded as these scores round them
    with pytest.raises(ConfigError, match="--key-format fp4"):
        replace(mixed, key_format="fp4")


@pytest.mark.parametrize("name", ["flash", "uneven"])
def test_other_widths_and_groups_of_subnormals(name, tmp_path):
    """Two groups of 64 and 16 rope dims; in "uneven" the second group is all subnormal under the least scale."""
    directory = make_case(name, tmp_path).directory
    lengths = (130, 7, 1)
    wanted = ran(directory, options("dtype", "dtype"), lengths=lengths)
    for entries, keys in (("fp8", "fp4"), ("fp8", "fp8")):
        same(ran(directory, options(entries, keys), lengths=lengths), wanted)


@pytest.mark.parametrize("keys", KEY_FORMATS[1:])
def test_keys_of_an_fp32_run(keys):
    lengths = (100, 33, 1, 1)
    wanted = ran(DEMO, options("dtype", "dtype", "fp32"), lengths=lengths)
    same(ran(DEMO, options("dtype", keys, "fp32"), lengths=lengths), wanted)


def test_the_reference_reads_every_format_too():
    lengths = (75, 1)
    wanted = ran(DEMO, options("dtype", "dtype"), REFERENCE, lengths)
    for entries, keys in (("fp8", "fp4"), ("dtype", "fp8")):
        same(ran(DEMO, options(entries, keys), REFERENCE, lengths), wanted)


# --- bytes


def pro(context, entries, keys):
    """Bytes of V4-Pro's caches, by component, on the meta device and so without memory."""
    config = ModelConfig.from_file(CONFIGS / "DeepSeek-V4-Pro.json")
    return State(config, context, 1, CacheFormats(torch.bfloat16, entries, keys), META).nbytes()


@pytest.mark.parametrize(
    ("entries", "keys", "entry_bytes", "key_bytes", "gigabytes"),
    [
        ("dtype", "dtype", 1024, 256, 10.33),
        ("fp8", "fp8", 584, 132, 5.78),
        ("fp8", "fp4", 584, 68, 5.28),
        ("fp8", "dtype", 584, 256, None),
        ("dtype", "fp4", 1024, 68, None),
    ],
)
def test_bytes_of_v4_pro(entries, keys, entry_bytes, key_bytes, gigabytes):
    """30 CSA layers and 31 HCA layers; the totals are those of the published roofline, for 2^20 tokens."""
    for context in (1 << 20, 1_000_000):
        sizes = pro(context, entries, keys)
        assert sizes["indexer_keys"] == 30 * (context // 4) * key_bytes
        assert sizes["entries"] == (30 * (context // 4) + 31 * (context // 128)) * entry_bytes
        assert sizes["window"] == 61 * 128 * 1024
        if context == 1 << 20 and gigabytes:
            total = sizes["entries"] + sizes["indexer_keys"] + sizes["window"]
            assert abs(total / 1e9 - gigabytes) < 0.01
    formats = CacheFormats(torch.bfloat16, entries, keys)
    assert (formats.entry_bytes(512, 64), formats.key_bytes(128)) == (entry_bytes, key_bytes)


@pytest.mark.parametrize(("entries", "keys"), FORMS)
def test_a_state_claims_the_bytes_it_allocated(entries, keys):
    model = load(DEMO, options(entries, keys)).model
    for cache in model.new_state(1000, 64).layers:
        for name, part in cache.components.items():
            if isinstance(part, Entries):
                planes = rows.planes(part.data).values()
                assert cache.nbytes()[name] == sum(plane.untyped_storage().nbytes() for plane in planes) > 0


def test_buffers_stay_where_they_are():
    model = load(DEMO, options("fp8", "fp4")).model
    state = model.new_state(300, 64)

    def places():
        csa = state.layers[1]
        return [plane.data_ptr() for part in (csa.entries, csa.keys) for plane in rows.planes(part.data).values()]

    before = places()
    for part in TOKENS.split(64):
        model(part, state)
    assert places() == before
    view = state.layers[1].entries.view()
    assert [plane.data_ptr() for plane in view] == before[:3], "a read is a view"
    assert view.shape == (sum(LENGTHS) // 4, 128)


# --- what does not fit


def test_a_row_too_many():
    held = Entries(4, rows.fp8_keys(3, 32, torch.device("cpu")))
    held.append(torch.ones(2, 32))
    with pytest.raises(CapacityError, match="cache of 3 entries cannot take entry 3"):
        held.append(torch.ones(2, 32))
    assert held.count == 2


@pytest.mark.parametrize(
    ("entries", "keys", "op", "site"),
    [("fp8", "dtype", "simulate_fp8", "attention.entry"), ("dtype", "fp4", "simulate_fp4", "indexer.key_used")],
)
def test_a_run_whose_rounding_is_lost_trips(entries, keys, op, site):
    """With rows in the run's dtype nothing is asked; a narrow form would have changed them."""
    left = CPU._replace(**{op: lambda x, _: x})
    ran(DEMO, options("dtype", "dtype"), left, (8,))
    with pytest.raises(Tripwire) as trip:
        ran(DEMO, options(entries, keys), left, (8,))
    assert (trip.value.site, trip.value.layer) == (site, 1)


def test_the_tripwire_names_row_column_and_both_values():
    held = rows.fp8_keys(9, 64, torch.device("cpu"))
    x = torch.zeros(2, 64, dtype=torch.bfloat16)
    x[:, 0], x[:, 32] = 4.0, -(2.0**-10)  # E4M3 would have to hold -2^-4 and -2^-10 under one scale
    rows.write(held, 5, x)
    invariants.stored("indexer.key_used", 3, 5, torch.zeros_like(x) + rows.read(held, 5, 7).bfloat16(), held)
    x[1, 32] /= 2**6
    rows.write(held, 5, x)
    with pytest.raises(Tripwire) as trip:
        invariants.stored("indexer.key_used", 3, 5, x, held)
    assert str(trip.value) == (
        "indexer.key_used of layer 3: row 6, column 32 comes back as -0 from Fp8Keys,"
        " expected -1.52587891e-05, as written"
    )
    invariants.stored("indexer.key_used", 3, 5, x, torch.zeros(9, 64))  # a tensor in the run's dtype is not looked at


@pytest.mark.parametrize("form", ["fp8_entries", "fp8_keys", "fp4_keys"])
def test_the_tripwire_sees_every_bit(form):
    """A sign of zero, a unit in the last place, a scale: anything that is not what was written."""
    held = rows.fp8_entries(3, 128, 64, META) if form == "fp8_entries" else getattr(rows, form)(3, 64, META)
    x = torch.zeros(3, held.shape[1], dtype=torch.bfloat16)
    x[:, ::3] = 1.5
    for name, plane in rows.planes(held).items():
        fresh = type(held)(*(torch.zeros_like(p, dtype=torch.uint8, device="cpu").view(p.dtype) if p.element_size() == 1
                             else torch.zeros_like(p, device="cpu") for p in held))  # fmt: skip
        rows.write(fresh, 0, x)
        invariants.stored("site", 0, 0, x, fresh)
        damaged = rows.planes(fresh)[name].view(torch.uint8)
        damaged.view(-1)[(damaged.numel() // 3) * 2] ^= 128 if plane.dtype != torch.float8_e8m0fnu else 1
        with pytest.raises(Tripwire, match="row 2"):
            invariants.stored("site", 0, 0, x, fresh)


@pytest.mark.parametrize(
    ("given", "culprit"),
    [
        ({"numerics": "plain", "entry_format": "fp8"}, "--entry-format fp8: .* --numerics plain"),
        ({"numerics": "plain", "key_format": "fp8"}, "--key-format fp8: .* --numerics plain"),
        ({"numerics": "plain", "key_format": "fp4", "dtype": "fp32"}, "--key-format fp4: .* --numerics plain"),
        ({"dtype": "fp32", "entry_format": "fp8"}, "--entry-format fp8: .* --dtype fp32"),
        ({"numerics": "plain", "fp8_products": "fp8"}, "--fp8-products fp8: .* --numerics deployed"),
        ({"dtype": "fp32", "fp8_products": "fp8"}, "--fp8-products fp8: .* --dtype bf16"),
        ({"index_scores": "fp8"}, "--index-scores fp8: .* --key-format fp8"),
        ({"index_scores": "fp8", "key_format": "fp4"}, "--index-scores fp8: .* --key-format fp8"),
        ({"index_scores": "fp8", "key_format": "fp8", "kv": ("csa=shard",)}, "--index-scores fp8: .* no --kv"),
    ],
)
def test_a_format_that_cannot_hold_the_values_is_refused(given, culprit):
    with pytest.raises(ConfigError, match=culprit) as error:
        RunOptions(**given)
    assert "\n" not in str(error.value)


# --- saved states


@pytest.fixture(scope="module")
def loaded():
    return load(DEMO, options("fp8", "fp4"))


def advanced(loaded, position):
    state = loaded.model.new_state(300, 64)
    for part in TOKENS[:position].split(64):
        loaded.model(part, state)
    return state


@pytest.mark.parametrize(("entries", "keys", "at"), [("fp8", "fp4", 3), ("fp8", "fp4", 130), ("dtype", "fp8", 130)])
def test_a_loaded_state_continues_bit_exactly(entries, keys, at, tmp_path):
    loaded = load(DEMO, options(entries, keys))
    straight = advanced(loaded, at)
    save_state(tmp_path / "state", straight, loaded, pending=17)
    resumed = loaded.model.new_state(700, 64)  # a larger context takes it too
    assert load_state(tmp_path / "state", resumed, loaded) == 17
    for part in TOKENS[at:].split(33):
        assert torch.equal(loaded.model(part, resumed), loaded.model(part, straight))


def test_a_saved_state_holds_the_narrow_rows(loaded, tmp_path):
    save_state(tmp_path / "state", advanced(loaded, 130), loaded, pending=None)
    with safe_open(tmp_path / "state", framework="pt") as file:
        found = {
            name.removeprefix("layers.1."): (tuple(file.get_tensor(name).shape), file.get_tensor(name).dtype)
            for name in file.keys()  # noqa: SIM118 - no mapping
            if name.startswith(("layers.1.entries", "layers.1.indexer_keys"))
        }
    assert found == {
        "entries.values": ((32, 64), torch.float8_e4m3fn),
        "entries.rope": ((32, 64), torch.bfloat16),
        "entries.scale": ((32, 8), torch.float8_e8m0fnu),
        "indexer_keys.packed": ((32, 64), torch.uint8),
        "indexer_keys.scale": ((32, 4), torch.float8_e8m0fnu),
    }


def test_a_state_in_another_format_is_refused(loaded, tmp_path):
    save_state(tmp_path / "state", advanced(loaded, 40), loaded, pending=None)
    for entries, keys, culprit in (
        ("dtype", "fp4", "saved with entry_format 'fp8', this run has 'dtype'"),
        ("fp8", "fp8", "saved with key_format 'fp4', this run has 'fp8'"),
    ):
        other = load(DEMO, options(entries, keys))
        with pytest.raises(StateError, match=culprit):
            load_state(tmp_path / "state", other.model.new_state(300, 64), other)


@pytest.mark.parametrize(
    ("name", "part"),
    [
        ("layers.1.entries.scale", torch.ones(10, 7).to(torch.float8_e8m0fnu)),
        ("layers.1.entries.values", torch.ones(10, 64)),
        ("layers.1.indexer_keys.packed", torch.ones(9, 64, dtype=torch.uint8)),
        ("layers.1.entries.rows", torch.ones(10, 128)),
    ],
)
def test_a_made_up_plane_is_refused(loaded, tmp_path, name, part):
    path = tmp_path / "state"
    save_state(path, advanced(loaded, 40), loaded, pending=None)
    with safe_open(path, framework="pt") as file:
        metadata, tensors = file.metadata(), {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
    del metadata["sha256"]
    tensors[name] = part
    save_file(tensors, path, metadata | {"sha256": digest(tensors, metadata)})
    with pytest.raises(StateError, match=name):
        load_state(path, loaded.model.new_state(300, 64), loaded)
