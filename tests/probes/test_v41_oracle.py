"""DeepSeek-V4.1 judged: tensors of DeepSeek's own code, on a nine-layer random checkpoint, against the oracle.

The recording and the checkpoint lie beside the repository, see `golden/meta.json` there for how they were made.
"""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from fathom.model.config import ModelConfig
from fathom.model.errors import ConfigError
from fathom.model.rounding import ROUNDINGS
from fathom.probes.judge.checks import Checks, Status
from fathom.probes.judge.draft_oracle import FAULTS as FAULTS_OF_DRAFTS
from fathom.probes.judge.draft_oracle import Dspark41, SlotBlock41
from fathom.probes.judge.dump import in_memory
from fathom.probes.judge.engram import multipliers, primes, table_rows
from fathom.probes.judge.faults_v41 import explained
from fathom.probes.judge.oracle import E2M1_INDEX, E4M3_ROW, Ends, Noise, Parameters, layer_of, sites_of
from fathom.probes.judge.oracle_v41 import E2M1_ENTRY, Layer41
from fathom.probes.judge.recording import CHOICES, Recording
from fathom.probes.verdict import ids_alike, judge_layers, layers_needed, opened, weights_of
from fathom.scripts import compare

GOLDEN = Path(__file__).parents[2].parent / "shared" / "data" / "v41" / "golden"  # 11 MB, not in the repository
TOKENS = 89
F32_STORED = 2.0**-24  # what storing float64 in float32 leaves, over a number
ANGLES = 2.0**-22  # of queries and keys: the angle of a rotation is an fp32 number in one code and not in the other

pytestmark = pytest.mark.skipif(not GOLDEN.is_dir(), reason="DeepSeek's tensors are not beside this repository")


@pytest.fixture(scope="module")
def config():
    return ModelConfig.from_file(GOLDEN / "config.json")


@pytest.fixture(scope="module")
def weights(config):
    return weights_of(GOLDEN, config)


def tensors(which):
    return load_file(GOLDEN / f"golden_{which}.safetensors")


@pytest.fixture(scope="module")
def alike(config):
    return ids_alike(GOLDEN, config)


def recorded(config, found):
    return Recording(in_memory(found), config)


def judged(config, weights, found, numerics=None, dtype="bf16", alike=None):
    run = opened(recorded(config, found), weights, dtype, numerics, alike=alike)
    return run, judge_layers(Checks(run.setting, run.recording), None)


def test_plain_every_site_is_theirs_but_for_its_storage(config, weights, alike):
    """Their float64, stored in float32, against ours, each site from the recorded ones before it."""
    found = tensors("plain")
    run = opened(recorded(config, found), weights, "fp32", "plain", alike=alike)
    still = replace(run.setting, noise=Noise(torch.float32, replicas=0))
    count = 0
    for number in range(config.num_hidden_layers):
        layer = layer_of(still, number, torch.arange(TOKENS))
        for site in sites_of(config, number):
            name = f"layers.{number}.{site}"
            if name not in run.recording.tensors:
                continue
            of_entries = site.startswith(("attention.entry", "indexer.key"))
            at = layer.entries if of_entries else layer.at
            ours, theirs = layer.computed(site, at)[0], run.recording.known(name, at)
            if site in CHOICES:
                assert ours.sort(-1).values.equal(theirs.sort(-1).values), name
            else:
                rotated = site.endswith((".query", ".key", ".kv", ".entry", ".unrotated"))
                most = ANGLES if rotated else 4 * F32_STORED
                assert float((ours - theirs).norm() / theirs.norm()) <= most, name
            count += 1
    ends = Ends(still)
    for site in ("embedded", "folded", "hidden", "logits"):
        ours, theirs = ends.computed(site, torch.arange(TOKENS))[0], run.recording.known(site, torch.arange(TOKENS))
        assert float((ours - theirs).norm() / theirs.norm()) <= 4 * F32_STORED, site
    assert count == 199


def test_deployed_agrees_and_its_rounding_is_found(config, weights, alike):
    run, results = judged(config, weights, tensors("deployed"), alike=alike)
    assert run.setting.rounding.numerics == "deployed"
    assert [one.name for one in results if one.status is not Status.AGREES] == []
    assert len(results) == 210


def test_engram_without_a_tokenizer_is_judged_from_recorded_rows(config, weights):
    results = {one.name: one for one in judged(config, weights, tensors("deployed"))[1]}
    unjudged = {name: one.why for name, one in results.items() if one.status is not Status.AGREES}
    assert unjudged.keys() == {"layers.1.engram.rows", "layers.4.engram.rows"}
    assert all("there is no tokenizer.json" in why for why in unjudged.values())


def test_engram_looks_up_their_rows(config, alike):
    """Ids that spell alike, primes, multipliers and rows as DeepSeek's code makes them."""
    found, told = tensors("deployed"), json.loads((GOLDEN / "meta.json").read_text())["engram constants"]
    layers = config.v41.engram.layer_ids
    assert alike.equal(found["engram.token_map"].long())
    assert primes(config) == told["primes"]
    assert [multipliers(config, layer) for layer in layers] == told["multipliers"]
    for layer in layers:
        rows = table_rows(config, layer, found["tokens"], alike, torch.arange(TOKENS))
        assert rows.equal(found[f"layers.{layer}.engram.ids"])


def test_engram_constants_of_the_published_config():
    """Which eight projects give alike, and vectors of rows."""
    published = ModelConfig.from_file(Path(__file__).parents[1] / "model" / "data" / "DeepSeek-V4.1-Flash.json")
    told = json.loads((GOLDEN.parent / "engram_constants.json").read_text())
    assert primes(published) == told["primes"]
    assert [multipliers(published, layer) for layer in (1, 14)] == told["multipliers"]
    vectors = told["vectors"]
    numbers, tokens = torch.tensor(vectors["token_map"]), torch.tensor(vectors["tokens"])
    rows = [table_rows(published, layer, tokens, numbers, torch.arange(len(tokens))) for layer in (1, 14)]
    assert torch.stack(rows, 1).flatten(0, 1).tolist() == vectors["rows [token*2+layer][24]"]


def test_every_rounding_is_theirs_to_the_bit(config):
    """Of tensors that were recorded before and after it."""
    found = {name: x.double() for name, x in tensors("deployed").items()}
    layers = range(config.num_hidden_layers)
    pairs = {
        E2M1_ENTRY: [(f"layers.{n}.attention.entry_plain", f"layers.{n}.attention.entry") for n in layers],
        E2M1_INDEX: [
            (f"layers.{n}.indexer.{site}", f"layers.{n}.indexer.{site}_used")
            for n in layers
            for site in ("key", "query")
        ],
    }
    for form, names in pairs.items():
        there = [pair for pair in names if pair[0] in found]
        assert there
        for before, after in there:
            assert form.rounded(found[before]).equal(found[after]), before
    for n in layers:
        kv = found[f"layers.{n}.attention.kv"]
        assert E4M3_ROW._replace(block=32).rounded(kv).equal(kv)
        if f"layers.{n}.attention.entry" in found:
            entry = found[f"layers.{n}.attention.entry"]
            assert E2M1_ENTRY.held(entry).equal(entry)
            assert not E2M1_ENTRY.held(entry * 1.01).equal(entry * 1.01)


def test_an_image_is_not_judged_as_text(config):
    found = tensors("deployed")
    found["tokens"][7] = config.v41.image_token_id
    with pytest.raises(ConfigError, match=r"tokens\[7\] is 415, a part of an image"):
        recorded(config, found)


@pytest.mark.parametrize(("name", "said"), [
    ("layers.3.attention.entry", "layer 3 has no attention.entry of its own"),
    ("layers.6.indexer.selected", "layer 6 has no indexer.selected of its own"),
    ("layers.7.indexer.key_used", "layer 7 has no indexer.key_used of its own"),
    ("layers.2.indexer.candidates", "layer 2 has no indexer.candidates of its own"),
    ("layers.2.engram.gate", "layer 2 has no engram.gate of its own"),
    ("layers.0.attention.entry", "layer 0 is SWA, which has no attention.entry"),
])  # fmt: skip
def test_a_site_that_a_layer_does_not_have_is_refused(config, name, said):
    with pytest.raises(ConfigError, match=said):
        recorded(config, tensors("deployed") | {name: torch.zeros(44, 32)})


def test_a_reading_layer_is_judged_without_what_it_reads(config, weights):
    """Entries and selections that were not recorded are computed from their source's input; a selection is told."""
    found = tensors("deployed")
    for site in ("attention.entry", "attention.latent_entry", "indexer.selected"):
        del found[f"layers.2.{site}"]
    results = {one.name: one for one in judged(config, weights, found)[1]}
    mixed = results["layers.3.attention.mixed"]
    assert (mixed.status, mixed.assumed) == (Status.AGREES, ("indexer.selected",))


def test_selections_among_candidates_that_nobody_recorded_are_not_judged(config, weights):
    found = tensors("deployed")
    del found["layers.5.indexer.candidates"]
    results = {one.name: one for one in judged(config, weights, found)[1]}
    assert results["layers.5.indexer.selected"].status is Status.AGREES
    assert results["layers.7.indexer.selected"].status is Status.NOT_JUDGED
    assert "indexer.candidates are not recorded" in results["layers.7.indexer.selected"].why


def test_layers_that_a_layer_reads_are_needed(config):
    """Whose weights are wanted of a hub: those of sources whose tensors were not recorded, and what these need."""
    found = tensors("deployed")
    own = ("layers.7.", "layers.6.streams", "tokens")
    alone = {name: x for name, x in found.items() if name.startswith(own)}
    assert layers_needed(recorded(config, alone), [7]) == set(range(8))
    shared = ("layers.5.attention.entry", "layers.5.indexer.key_used", "layers.5.indexer.candidates")
    more = {name: found[name] for name in (*shared, "layers.6.experts.pre")}
    assert layers_needed(recorded(config, alone | more), [7]) == {7}


def test_a_layer_is_not_judged_from_streams_alone(config, weights, alike):
    kept = ("tokens", *(f"layers.{n}.streams" for n in range(9)))
    found = {name: x for name, x in tensors("deployed").items() if name in kept}
    run = opened(recorded(config, found), weights, "bf16", "deployed", alike=alike)
    results = {one.name: one for one in judge_layers(Checks(run.setting, run.recording, 4), [0, 3])}
    assert results["layers.3.streams"].status is Status.NOT_JUDGED
    assert results["layers.3.streams"].why == ("layers.2.experts.pre are not recorded, by which the streams are read")


def test_a_run_from_the_embeddings_on_computes_each_layer_once(config, weights, alike, monkeypatch):
    """Of a file that holds nothing but logits: through all layers, in seconds."""
    found = {name: x for name, x in tensors("deployed").items() if name in ("tokens", "logits")}
    run = opened(recorded(config, found), weights, "bf16", "deployed", alike=alike)
    computed: list[str] = []
    equation = Layer41.equation

    def counted(layer, site, at):
        computed.append(f"{layer.layer} {site}")
        return equation(layer, site, at)

    monkeypatch.setattr(Layer41, "equation", counted)
    (result,) = judge_layers(Checks(run.setting, run.recording, 1), None)
    assert result.free
    assert result.rows
    assert max(computed.count(f"{n} attention.output") for n in range(9)) == 1


def test_what_is_no_block_and_no_tokenizer_of_the_model_is_not_gone_on_with(config, weights, tmp_path):
    found = tensors("deployed")
    found["layers.5.indexer.candidates"][-1, 0] = 60
    results = {one.name: one for one in judged(config, weights, found)[1]}
    assert results["layers.5.indexer.candidates"].status is Status.DIFFERS
    told = json.loads((GOLDEN / "tokenizer.json").read_text())
    del told["model"]["vocab"]["a"]
    told["model"]["merges"] = []
    (tmp_path / "tokenizer.json").write_text(json.dumps(told))
    with pytest.raises(ConfigError, match="ids spell unlike, engram_compressed_vocab_size is 343"):
        ids_alike(tmp_path, config)


def test_a_fault_whose_format_does_not_fit_the_model_is_left_out(config, weights):
    """V4's record is in blocks of 64 columns, and this model's keys have 16 beside those of rope."""
    found = tensors("deployed")
    x = found["layers.0.attention.kv"]
    x[5:9] = (x[5:9].float() * 1.5).to(x.dtype)
    run, results = judged(config, weights, found, "deployed")
    places = explained(run.setting, run.recording, results, [TOKENS], 60.0, lambda *_: None)
    assert places[0].judged.name == "layers.0.attention.kv"
    assert not {one.name for one in places[0].faults} & {"window-v4-record", "entry-v4-record"}


def test_two_recordings_are_compared_and_the_fault_between_them_named(tmp_path, capsys):
    found = tensors("deployed")
    found["layers.6.attention.unrotated"] = found["layers.6.attention.mixed"].clone()
    save_file(found, tmp_path / "wrong.safetensors")
    command = ["--model", str(GOLDEN), "--recording", str(GOLDEN / "golden_deployed.safetensors")]
    assert compare.main([*command, "--against", str(tmp_path / "wrong.safetensors"), "--layers", "6"]) == 1
    assert "no-inverse-rotation" in capsys.readouterr().out


def test_the_command_on_their_file(tmp_path, capsys):
    """From the folder as it is; one wrong tensor is named, at its first wrong row."""
    model = tmp_path / "model"
    model.mkdir()
    for name in ("config.json", "model.safetensors", "tokenizer.json"):
        shutil.copy(GOLDEN / name, model)
    command = ["--model", str(model), "--recording"]
    assert compare.main([*command, str(GOLDEN / "golden_deployed.safetensors")]) == 0
    assert "AGREES: 210 sites agree" in capsys.readouterr().out
    found = tensors("deployed")
    found["layers.6.attention.input"][50:] = found["layers.6.attention.input"][:39].clone()
    save_file(found, tmp_path / "wrong.safetensors")
    assert compare.main([*command, str(tmp_path / "wrong.safetensors"), "--no-identify"]) == 1
    shown = capsys.readouterr().out
    assert "First difference: layer 6 attention.input, position 50" in shown


# --- the draft head


def drafting(config, which, replicas=0):
    dtype = torch.float32 if which == "plain" else torch.bfloat16
    parameters = Parameters.of(GOLDEN, config, head=True)
    return Dspark41(config, parameters, stages=3, rounding=ROUNDINGS[which], noise=Noise(dtype, replicas))


def taps_of(found, config):
    """Streams that enter the target layers; no n-grams are added before any of these."""
    targets = config.dspark.target_layer_ids
    assert not {*targets} & {*config.v41.engram.layer_ids}
    return torch.stack([found[f"layers.{layer - 1}.streams"].double() for layer in targets], 1)


def slots_of(found, config):
    noise = [config.dspark.noise_token_id] * (config.dspark.block_size - 1)
    return torch.tensor([int(found["draft.tokens"][0]), *noise])


def test_plain_a_draft_is_theirs(config):
    """Three slots through three stages, end to end: their float64, stored in float32."""
    found, head = tensors("plain"), drafting(config, "plain")
    taps = taps_of(found, config)
    draft = head.draft(head.main_keys(taps), slots_of(found, config))
    assert draft.ids.tolist() == found["draft.tokens"][1:].tolist()
    for ours, theirs in (
        (taps.mean(2).flatten(1), found["draft.taps"]),
        (draft.logits[0], found["draft.logits"]),
        (draft.confidence[0], found["draft.confidence"]),
    ):
        assert float((ours - theirs.double()).norm() / theirs.double().norm()) < 2e-6


@pytest.mark.parametrize("which", ["plain", "deployed"])
def test_each_stage_is_theirs_from_what_entered_it(config, which):
    """As deployed within twice of what rounding does to 32 runs, each site from the streams that entered the stage."""
    found, head = tensors(which), drafting(config, which, 32)
    keys, at = head.main_keys(taps_of(found, config)), TOKENS + torch.arange(config.dspark.block_size)
    streams = head.main.looked_up("embed.weight", slots_of(found, config))[:, :, None].expand(-1, -1, 4, -1)
    pre = torch.tensor([1.0, 0, 0, 0], dtype=torch.float64).expand(1, len(at), -1)
    for stage in range(3):
        block = SlotBlock41(head, stage, at, streams, pre, keys[stage])
        for site in ("attention.input", "attention.mixed", "attention.streams", "experts.input", "streams"):
            values, theirs = block.value(site, at), found[f"mtp.{stage}.{site}"].double()
            off = ((theirs - values[0]).flatten(1).norm(dim=1) / values[0].flatten(1).norm(dim=1)).max()
            spread = ((values[1:] - values[:1]).flatten(2).norm(dim=2) / values[0].flatten(1).norm(dim=1)).max()
            assert off <= 2 * spread + 2e-6, (stage, site, float(off), float(spread))
        streams = found[f"mtp.{stage}.streams"].double()[None]
        pre = found[f"mtp.{stage}.experts.pre"].double()[None]


@pytest.mark.parametrize(
    "reading", ["block-causal", "rope-of-compressed-layers", "confidence-normed", "block-one-early"]
)
def test_a_head_read_otherwise_is_not_theirs(config, reading):
    found = tensors("plain")
    head = drafting(config, "plain")
    head.reading = FAULTS_OF_DRAFTS[reading]
    draft = head.draft(head.main_keys(taps_of(found, config)), slots_of(found, config))
    pair = (draft.confidence[0], found["draft.confidence"]) if reading == "confidence-normed" else (
        draft.logits[0], found["draft.logits"],
    )  # fmt: skip
    assert float((pair[0] - pair[1].double()).norm() / pair[1].double().norm()) > 1e-3
