"""What `scripts.compare` says: the same whatever else is judged, of nothing that was not looked at, and by its name."""

import json
import re
import shutil
import time
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file

from fathom.model.config import ModelConfig
from fathom.model.errors import ConfigError
from fathom.model.rounding import ROUNDINGS
from fathom.probes.identify import Identifier, _Case
from fathom.probes.judge import checks, exercised, oracle
from fathom.probes.judge.oracle import F64, Layer, Noise, Parameters, Setting
from fathom.probes.judge.recording import CHOICES, Recording
from fathom.probes.subject import Subject
from fathom.probes.verdict import explain, judge_layers, opened, weights_of
from fathom.runtime.options import DEMO
from fathom.scripts import compare, record
from fathom.scripts.cli import UsageError
from tests.grids import on_demand
from tests.make_checkpoint import micro_config, tiny_config, write_checkpoint

COUNT = 140


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("verdicts")


def recorded(folder, ids, *flags, name="ours"):
    """A recording of ours of these ids."""
    (folder / f"{name}.json").write_text(json.dumps(list(ids)))
    out = folder / f"{name}.safetensors"
    assert record.main(["--tokens", str(folder / f"{name}.json"), "--out", str(out), *map(str, flags)]) == 0
    return out


@pytest.fixture(scope="module")
def recording(folder):
    return recorded(folder, Subject().tokens(COUNT))


def saved(path, tensors):
    save_file({name: x.contiguous() for name, x in tensors.items()}, path)
    return path


def compared(path, *flags):
    out = path.with_suffix(".report.json")
    status = compare.main(["--recording", str(path), "--json", str(out), *map(str, flags)])
    return status, json.loads(out.read_text())


# --- it follows from the layer's recorded input alone


def numbers_of(report, layer):
    return [
        (site["site"], site["rows"], site["worst"], site["bound"], site["status"])
        for site in report["sites"]
        if site["layer"] == layer
    ]


@pytest.mark.parametrize("absent", [(), ("indexer.selected", "experts.ids", "experts.weights")])
def test_every_subset_of_layers_gives_the_same_numbers_to_the_bit(tmp_path, recording, absent):
    """Also where no choice was recorded, so that the oracle makes them itself."""
    tensors = {name: x for name, x in load_file(recording).items() if not (absent and name.endswith(absent))}
    path = saved(tmp_path / "some.safetensors", tensors)
    _, whole = compared(path, "--numerics", "deployed")
    for subset in ((3,), (0, 2)):
        _, part = compared(path, "--numerics", "deployed", "--layers", ",".join(map(str, subset)))
        for layer in subset:
            assert numbers_of(part, layer) == numbers_of(whole, layer), subset
    assumed = {site for one in whole["sites"] for site in one.get("assumed", ())}
    assert assumed == set(absent) - {"experts.weights"}


def test_choices_of_the_oracle_itself_are_told(tmp_path, recording, capsys):
    few = {name: x for name, x in load_file(recording).items() if not name.endswith("indexer.selected")}
    assert compared(saved(tmp_path / "few.safetensors", few), "--layers", "1")[0] == 0
    assert "the oracle's own choice was gone on with: indexer.selected" in capsys.readouterr().out


# --- nothing agrees that was not looked at


@pytest.mark.parametrize("flags", [(), *on_demand((("--layers", "0,1"),))])
def test_a_recording_of_nan_differs(tmp_path, recording, capsys, flags):
    tensors = load_file(recording)
    broken = {name: x * float("nan") if x.is_floating_point() else x for name, x in tensors.items()}
    status, report = compared(saved(tmp_path / "nan.safetensors", broken), "--dtype", "bf16", *flags)
    assert (status, report["verdict"]) == (1, "differs")
    assert all(site["status"] == "differs" for site in report["sites"] if site["site"] not in CHOICES)
    assert {fault["name"] for fault in report["faults"]} <= {"rows-not-finite"}
    assert "numbers that are not finite" in capsys.readouterr().out


def test_a_verdict_counts_what_was_not_judged_and_is_none_where_that_is_most(tmp_path, recording, capsys, monkeypatch):
    """A layer whose input is not recorded, of a prompt whose streams would take too much memory to compute."""
    monkeypatch.setattr(oracle, "RUN_FREELY", 0)
    tensors = {name: x for name, x in load_file(recording).items() if name.startswith("layers.2.") or name == "tokens"}
    path = saved(tmp_path / "no input.safetensors", tensors)
    status, report = compared(path)
    agree, left = report["counts"]["agrees"], report["counts"]["not judged"]
    assert (status, report["verdict"]) == (0, "agrees")
    assert agree > left > 0
    cause = "layers.1.streams are not recorded, and the prompt is too long to compute them"
    assert f"Not judged: {left} sites, layers.2.attention.pre first: {cause}" in capsys.readouterr().out
    unjudged = [f"layers.2.{site['site']}" for site in report["sites"] if site["status"] == "not judged"]
    few = {name: tensors[name] for name in ("tokens", "layers.2.experts.ids", "layers.2.experts.input", *unjudged)}
    status, report = compared(saved(path, few))
    assert report["counts"]["agrees"] < report["counts"]["not judged"]
    assert (status, report["verdict"]) == (1, "nothing compared")
    assert "NOTHING COMPARED: " in capsys.readouterr().out


def test_rows_that_nothing_is_known_of_are_counted(tmp_path, recording, capsys):
    """One NaN in a layer's input: what follows from it is not judged there, and agrees elsewhere."""
    tensors = load_file(recording)
    tensors["layers.1.attention.input"][50, 3] = float("nan")
    status, report = compared(saved(tmp_path / "one nan.safetensors", tensors), "--no-identify")
    sites = {(site["layer"], site["site"]): site for site in report["sites"]}
    assert (status, report["counts"]["differs"]) == (1, 1)
    assert sites[1, "attention.latent"]["left"] == 1
    left = [site["left"] for site in sites.values() if "left" in site]
    assert (
        f"Not judged: {sum(left)} rows of {len(left)} more sites: what it follows from is not"
        in capsys.readouterr().out
    )
    tensors["layers.1.attention.input"][50:] = float("nan")
    _, report = compared(saved(tmp_path / "most nan.safetensors", tensors), "--no-identify")
    (latent,) = (one for one in report["sites"] if (one["layer"], one["site"]) == (1, "attention.latent"))
    assert (latent["status"], latent["rows"], latent["left"]) == ("not judged", 50, COUNT - 50)


def of_positions(tensors, at, sites=None):
    """The same of rows of some positions, but for the streams between layers, of which all are kept."""
    whole = {name for name in tensors if re.fullmatch(r"tokens|embedded|layers\.\d\.streams", name)}
    rows = {name: x[at] for name, x in tensors.items() if name not in whole and len(x) == COUNT}
    rows = {name: x for name, x in rows.items() if sites is None or name.split(".", 2)[-1] in sites}
    return {"positions": at} | rows | {name: tensors[name] for name in whole if sites is None or name == "tokens"}


@pytest.mark.parametrize("sites", [None, ("attention.output", "experts.output", "streams")])
def test_rows_of_some_positions_agree(tmp_path, recording, sites):
    """Also where layers have no input: what follows from such a one is drawn as all else, by layer, site and row."""
    some = of_positions(load_file(recording), torch.tensor([3, 40, 41, 99, 139]), sites)
    status, report = compared(saved(tmp_path / "positions.safetensors", some))
    assert (status, report["verdict"]) == (0, "agrees")
    assert {site["rows"] for site in report["sites"] if site["site"] == "attention.output"} == {5}
    assert any(site.get("free") for site in report["sites"]) == (sites is not None)


def test_a_look_at_a_row_has_an_end_and_what_was_not_looked_at_is_told(tmp_path, recording, capsys, monkeypatch):
    """The layer's input is not recorded: each look is a run of all layers before."""
    monkeypatch.setattr(checks, "LOOK", 1 << 16)
    streams = load_file(recording)["layers.1.streams"].float()
    off = torch.randn(streams.shape, generator=torch.Generator().manual_seed(0)) * streams.std()
    tensors = {"tokens": load_file(recording)["tokens"], "layers.1.streams": (streams + off).bfloat16()}
    status, report = compared(saved(tmp_path / "free.safetensors", tensors), "--no-identify")
    (site,) = report["sites"]
    assert (status, site["status"], site["free"]) == (1, "differs", True)
    assert site["open"] > COUNT / 2
    assert f"Not looked at again to the end: {site['open']} rows of layers.1.streams" in capsys.readouterr().out


def test_a_prompt_of_one_token_has_no_entry_to_select(tmp_path, recording):
    """Selections may be padded: -1 is none."""
    one = {name: x[:1] for name, x in load_file(recording).items() if len(x) == COUNT}
    status, report = compared(saved(tmp_path / "one.safetensors", one))
    assert (status, report["verdict"]) == (0, "agrees")
    assert report["counts"]["differs"] == 0


# --- what these rows could not have shown


def test_what_no_judged_row_shows_is_not_exercised_however_long_the_prompt(tmp_path, recording):
    _, report = compared(saved(tmp_path / "first.safetensors", of_positions(load_file(recording), torch.arange(4))))
    found = {one["what"] for one in report["not_exercised"]}
    assert "a full window (4 of 16 tokens)" in found
    assert "a selection that leaves something out (1 entries, top 16)" in found


def test_what_was_not_exercised_is_said_with_what_would_show_it(folder, recording, capsys):
    _, report = compared(recording)
    found = {one["what"]: one["needs"] for one in report["not_exercised"]}
    assert found["a second HCA block (1 of 128 tokens)"] == "256 tokens or more"
    assert "Not exercised: " in capsys.readouterr().out
    _, report = compared(recorded(folder, Subject().tokens(5), name="five"))
    found = {one["what"]: one["needs"] for one in report["not_exercised"]}
    assert found["a full window (5 of 16 tokens)"] == "17 tokens or more"
    assert found["a second CSA block (1 of 4 tokens)"] == "8 tokens or more"
    assert found["a selection that leaves something out (1 entries, top 16)"] == "68 tokens or more"
    assert any(what.startswith("experts that no token chose") for what in found)


def test_what_was_exercised_is_not_listed(folder):
    _, report = compared(recorded(folder, Subject().tokens(300), name="long"), "--no-identify")
    told = " ".join(one["what"] for one in report["not_exercised"])
    assert not any(word in told for word in ("window", "block", "selection that", "scales", "no token chose"))


@pytest.mark.parametrize(("limit", "reached"), [(0.25, True), (1000.0, False)])
def test_a_clamp_that_no_row_reached_is_not_exercised(tmp_path, limit, reached):
    model = tmp_path / "model"
    model.mkdir()
    write_checkpoint(model, tiny_config(swiglu_limit=limit), seed=1)
    out = recorded(tmp_path, [n * 7 % 512 for n in range(40)], "--model", model)
    status, report = compared(out, "--model", model)
    clamps = [one["what"].split(" at ")[0] for one in report["not_exercised"] if "clamp" in one["what"]]
    assert status == 0
    assert clamps == ([] if reached else ["the clamp of routed experts", "the clamp of shared experts"])


def test_what_was_not_recorded_was_not_exercised(tmp_path, recording):
    few = {name: x for name, x in load_file(recording).items() if name.endswith(("tokens", "input", "latent", "kv"))}
    _, report = compared(saved(tmp_path / "inputs.safetensors", few))
    assert {one["what"]: one["needs"] for one in report["not_exercised"]} == {
        "the clamp of routed experts at 10 (no output of them was judged)": "experts.output in the recording",
        "the clamp of shared experts at 10 (no output of them was judged)": "experts.output in the recording",
        "attention (nothing that follows from it was judged)": "attention.mixed in the recording",
        "which entries are selected (none were judged)": "indexer.selected in the recording",
        "which experts are chosen (none were judged)": "experts.ids in the recording",
    }


def test_ties_and_scales_of_one_value_are_not_exercised(recording):
    _, report = compared(recording, "--layers", "1", "--no-identify")
    assert "which of two entries of equal score is taken (no two were)" in {
        one["what"] for one in report["not_exercised"]
    }
    parameters = SimpleNamespace(scales={"FP8": (0.25, 0.5), "FP4": (0.125, 0.125)})
    (one,) = exercised._scales(SimpleNamespace(setting=SimpleNamespace(parameters=parameters)))
    assert (one.what, one.needs) == ("scales of FP4 weights (all are 0.125)", "a checkpoint whose scales differ")


# --- plain causes


def changed(name, change):
    """The layer in which a tensor is changed, and how."""
    return name.split(".")[1], lambda tensors: tensors | {name: change(tensors[name])}


@pytest.mark.parametrize(
    ("cause", "change", "told"),
    [
        ("rows-of-zeros", changed("layers.2.attention.output", torch.zeros_like), "all zeros"),
        ("rows-all-alike", changed("layers.2.attention.output", lambda x: x[:1].expand_as(x)), "All rows are the same"),
        ("rows-of-one-value", changed("layers.2.experts.output", lambda x: x[:, :1].expand_as(x)), "one number again"),
        (
            "rows-of-a-batch",
            changed("layers.2.attention.input", lambda x: x[: COUNT // 2].repeat(2, 1)),
            "two sequences of a batch",
        ),
        (
            "rows-shifted-by--1",
            changed("layers.1.attention.latent", lambda x: x.roll(1, 0)),
            "Rows are those of 1 token earlier",
        ),
        ("rows-shifted-by-2", changed("layers.2.attention.kv", lambda x: x.roll(-2, 0)), "of 2 tokens later"),
        (
            "rows-shifted-by-2",
            changed("layers.1.attention.entry", lambda x: x.roll(-2, 0)),
            "of 2 entries later",
        ),
        (
            "cast-to-float8_e5m2",
            changed("layers.0.experts.output", lambda x: x.to(torch.float8_e5m2).to(x.dtype)),
            "All numbers of it are of float8_e5m2",
        ),
    ],
)
def test_a_plain_cause_is_told_before_any_fault(tmp_path, recording, capsys, cause, change, told):
    layer, changing = change
    path = saved(tmp_path / "plain.safetensors", changing(load_file(recording)))
    status, report = compared(path, "--layers", layer, "--identify-seconds", "1")
    assert status == 1
    first = report["faults"][0]
    assert (first["name"], first["plain"], first["explains"]) == (cause, True, True)
    assert told in capsys.readouterr().out


OTHER = {"1": "3", "3": "1"}  # layers of the demo that are CSA


def exchanged(name):
    return re.sub(r"^layers\.([13])\.", lambda found: f"layers.{OTHER[found[1]]}.", name)


def test_tensors_of_two_layers_that_are_exchanged_are_told(tmp_path, recording, capsys):
    tensors = {exchanged(name): x for name, x in load_file(recording).items()}
    _, report = compared(saved(tmp_path / "names.safetensors", tensors), "--layers", "1", "--identify-seconds", "1")
    assert report["faults"][0]["name"] == "layers-swapped"
    assert "What is recorded of layer 3 is what layer 1 should give" in capsys.readouterr().out


def test_weights_of_two_layers_that_are_exchanged_are_told(tmp_path, capsys):
    model = tmp_path / "demo"
    shutil.copytree(DEMO, model)
    for path in model.glob("*.safetensors"):
        save_file({exchanged(name): x for name, x in load_file(path).items()}, path)
    index = model / "model.safetensors.index.json"
    shards = json.loads(index.read_text())
    shards["weight_map"] = {exchanged(name): shard for name, shard in shards["weight_map"].items()}
    index.write_text(json.dumps(shards))
    out = recorded(tmp_path, Subject().tokens(60), "--model", model)
    _, report = compared(out, "--layers", "1", "--identify-seconds", "1")
    assert report["faults"][0]["name"] == "layers-swapped"
    assert "Layer 1 computes with the weights of layer 3" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("given", "cause", "told"),
    [
        (lambda ids: ids[1:], "bos-missing", "all rows are one early"),
        (lambda ids: [0, *ids[:-1]], "bos-missing", "The run began with BOS, which `tokens` lacks"),
        (lambda ids: [0, *reversed(ids[1:])], "another-prompt", "embeddings of other tokens than `tokens`: 0, "),
    ],
)
def test_a_run_of_another_prompt_is_told(tmp_path, capsys, given, cause, told):
    """A run was given one list of ids, and its recording says another, of the same length."""
    ids = Subject().tokens(60)
    run = given(ids)
    tensors = load_file(recorded(tmp_path, run))
    rows = {name: x for name, x in tensors.items() if name == "embedded" or name.startswith("layers.0.attention")}
    claimed = saved(tmp_path / "claimed.safetensors", rows | {"tokens": torch.tensor(ids[: len(run)])})
    status, report = compared(claimed, "--dtype", "bf16", "--identify-seconds", "1")
    assert (status, report["faults"][0]["name"]) == (1, cause)
    assert told in capsys.readouterr().out


def test_padding_and_a_missing_bos_are_told_of_the_tokens(tmp_path, capsys):
    assert compared(recorded(tmp_path, [1] * 6 + Subject().tokens(40)))[0] == 0
    told = capsys.readouterr().out
    assert "do not begin with BOS (0)" in told
    assert "begin with 6 times 1: padding?" in told


# --- names


def test_entries_rotated_by_their_number_have_a_name_of_their_own(tmp_path, recording, capsys):
    """Their first token's position is right. What rotates nothing is near: most pairs turn slowly."""
    tensors, config = load_file(recording), ModelConfig.from_file(DEMO / "config.json")
    entries, rope = tensors["layers.1.attention.entry"].double(), config.qk_rope_head_dim
    number, ratio = torch.arange(len(entries)), config.ratio(1)
    parameters, still = Parameters.of(DEMO, config), Noise(F64, replicas=0)
    layer = Layer(Setting(config, parameters, tensors["tokens"], ROUNDINGS["plain"], None, still), 1, number)
    with layer.noise.of("entries", rows=number):
        turned = layer.rotated(entries[None, :, -rope:], number * ratio - number, back=True)[0]
    tensors["layers.1.attention.entry"] = torch.cat((entries[:, :-rope], turned), -1).bfloat16()
    status, report = compared(saved(tmp_path / "by number.safetensors", tensors), "--layers", "1")
    out = capsys.readouterr().out
    assert (status, report["first"]["site"]) == (1, "attention.entry")
    assert report["faults"][0]["name"] == "entries-rotated-at-their-number"
    assert "Explained by entries-rotated-at-their-number" in out
    assert "The run rounds as" not in out


def test_the_nearest_fault_is_told_as_no_explanation_and_below_half_none_is(tmp_path, recording, capsys, monkeypatch):
    tensors = load_file(recording)
    tensors["layers.3.attention.output"] = tensors["layers.3.attention.output"] * 2
    path = saved(tmp_path / "scaled.safetensors", tensors)
    for share, told in ((0.76, True), (0.49, False)):
        monkeypatch.setattr("fathom.probes.identify._Case.share", lambda *_, share=share: share)
        _, report = compared(path, "--layers", "3")
        out = capsys.readouterr().out
        assert "Explained by" not in out
        assert ("with 76%, which does not explain it" in out) == told
        assert bool(report["faults"]) == told


def test_one_number_that_is_not_finite_is_no_other_layer_nor_fault(tmp_path, recording):
    tensors = load_file(recording)
    tensors["layers.1.attention.output"][9, 9] = float("inf")
    status, report = compared(saved(tmp_path / "inf.safetensors", tensors))
    assert (status, report["counts"]["differs"], report["faults"]) == (1, 1, [])


def test_a_text_that_repeats_is_no_batch(tmp_path):
    """The oracle's rows repeat too: what differs is the fault's."""
    half = Subject().tokens(30)
    _, report = compared(recorded(tmp_path, [*half, *half], "--inject", "norm-weight-plus-one"))
    assert {fault["name"] for fault in report["faults"] if fault["explains"]} == {"norm-weight-plus-one"}


def test_a_dump_that_was_cast_is_told(tmp_path, recording):
    """A run of bf16 has some tensors in fp32."""
    tensors = {name: x.bfloat16() if x.is_floating_point() else x for name, x in load_file(recording).items()}
    _, report = compared(saved(tmp_path / "cast.safetensors", tensors), "--identify-seconds", "5")
    assert {site["site"].rpartition(".")[2] for site in report["sites"] if site["status"] == "differs"} == {
        "pre", "post", "comb",
    }  # fmt: skip
    assert {(fault["name"], fault["plain"]) for fault in report["faults"]} == {("cast-to-bfloat16", True)}


def test_the_search_for_a_fault_ends_and_says_what_was_not_tried(folder, capsys, monkeypatch):
    out = recorded(folder, Subject().tokens(COUNT), "--inject", "sink-dropped", "--layers", "0", name="late")
    tried, share = [], _Case.share
    monkeypatch.setattr(
        _Case, "share", lambda case, names, given=None: tried.append(names) or share(case, names, given)
    )
    monkeypatch.setattr(Identifier, "late", property(lambda _: len(tried) == 3))
    status, report = compared(out, "--identify-seconds", "7")
    assert status == 1
    assert re.fullmatch(r"3 of \d+ faults were tried in 7 s", report["not_tried"][0]["why"])
    out = capsys.readouterr().out
    assert f"not explained yet ({report['not_tried'][0]['why']}); --identify-seconds" in out
    assert "none of the known faults" not in out


def test_progress_counts_faults_and_names_none_before_it_is_found(recording, tmp_path):
    tensors = load_file(recording)
    tensors["layers.0.attention.output"] *= 1.25
    told, config = [], ModelConfig.from_file(DEMO / "config.json")
    run = opened(Recording(saved(tmp_path / "off", tensors), config), weights_of(DEMO, config), None, "deployed")
    results = judge_layers(checks.Checks(run.setting, run.recording), [0])
    explain(run, results, [COUNT], 2.0, lambda what, _: told.append(what))
    tried = [what for what in told if what.startswith("layers.")]
    assert re.fullmatch(r"layers\.0\.attention\.output: trying known fault 1 of \d+", tried[0])


def test_sites_at_which_no_fault_was_looked_for_are_told_with_the_cause(tmp_path, recording, capsys):
    """By the clock: one second is over long before all of them."""
    tensors = load_file(recording)
    scaled = {
        name: x * 1.5 for name, x in tensors.items() if name.endswith((".query", ".mixed", ".unrotated", "input"))
    }
    path, began = saved(tmp_path / "much.safetensors", tensors | scaled), time.perf_counter()
    _, report = compared(path, "--no-identify", "--rows", 24)
    judged, began = time.perf_counter() - began, time.perf_counter()
    _, report = compared(path, "--identify-seconds", "1", "--rows", 24)
    assert time.perf_counter() - began < 3 * judged + 10
    out, left = capsys.readouterr().out, [one for one in report["not_tried"] if one["why"] == "1 s were over"]
    assert len(left) > len(scaled) / 2
    assert f"{len(left)} more sites differ; no fault was looked for there: 1 s were over." in out


# --- numerics are three choices


@pytest.mark.parametrize(
    "rounding",
    [  # each choice both ways; FP4 of the indexer is in the recording of all other tests
        "linears=none,kv=fp8,index=fp8",
        "linears=fp8,kv=none,index=none",
        *on_demand("linears=none,kv=fp8,index=fp4", "linears=fp8,kv=fp8,index=none", "linears=none,kv=none,index=fp8"),
    ],
)
def test_the_rounding_of_a_run_is_found(folder, capsys, rounding):
    """By its numbers; and without those that are in a narrow format, by which of the choices agrees."""
    out = recorded(folder, Subject().tokens(300), "--rounding", rounding, name="rounded")
    tensors = load_file(out)
    for kept in (None, ("streams", "embedded", "experts.ids", "indexer.selected", "attention.latent")):
        if kept is not None:
            saved(out, {name: x for name, x in tensors.items() if name == "tokens" or name.endswith(kept)})
        status, report = compared(out, "--no-identify", "--rows", 24)
        assert status == 0, report["first"]
        assert "Rounding, found from the recording: linears=" in capsys.readouterr().out
        assert set(report["rounding_rests_on"]) == {"linears", "kv", "index"}
        if kept is None:
            assert report["numerics"] == rounding
        else:
            assert f"linears={report['rounding']['linears']}" == rounding.split(",")[0]


def test_another_rounding_than_the_one_that_is_said_is_named(folder, capsys):
    rounding = "linears=none,kv=fp8,index=fp4"
    out = recorded(folder, Subject().tokens(COUNT), "--rounding", rounding, "--layers", "0", name="other")
    status, report = compared(out, "--numerics", "deployed")
    assert (status, report["faults"][0]["name"]) == (1, f"{rounding} numerics")
    assert f"The run rounds as --rounding {rounding} says." in capsys.readouterr().out


KV = "layers.{}.attention.kv"
OF_TWO = {
    # KV by scales that are no powers of two: as on no grid, and nearer to unrounded numbers than to rounded ones
    "scales": lambda tensors: {KV.format(n): by_largest(tensors[KV.format(n)]) for n in range(4)},
    "one layer": lambda tensors: {KV.format(0): tensors[KV.format(0)] * 1.01},
}


def by_largest(kv):
    """A dequantised FP8 cache whose scales are the largest of 64 over 448."""
    nope = kv[..., :64].float()
    scale = nope.abs().amax(-1, keepdim=True) / 448
    return torch.cat(((nope / scale).to(torch.float8_e4m3fn).float() * scale, kv[..., 64:].float()), -1).bfloat16()


@pytest.mark.parametrize("few", [False, True])
@pytest.mark.parametrize("which", OF_TWO)
def test_faulty_tensors_do_not_set_the_numerics(tmp_path, recording, which, few):
    """They differ, and nothing but what follows from them alone: others are judged as the rest of the run rounds."""
    tensors = load_file(recording)
    tensors |= OF_TWO[which](tensors)
    if few:
        tensors = {n: x for n, x in tensors.items() if n.endswith(("tokens", "embedded", ".streams", "attention.kv"))}
    status, report = compared(saved(tmp_path / "kv.safetensors", tensors), "--no-identify")
    wrong = {(site["layer"], site["site"]) for site in report["sites"] if site["status"] == "differs"}
    layers = range(4) if which == "scales" else (0,)
    assert (status, report["numerics"]) == (1, "deployed")
    assert {(n, "attention.kv") for n in layers} <= wrong
    assert wrong <= {(n, f"attention.{site}") for n in layers for site in ("kv", "mixed", "streams")}
    if which == "one layer" and not few:
        assert "layers.1.attention.kv and 6 more: 16 of 16 rows" in report["rounding_rests_on"]["kv"]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--rounding", "linears=fp8"), "says nothing of kv"),
        (("--rounding", "linears=fp4,kv=fp8,index=fp8"), "linears is fp8 or ggml or none"),
        (
            ("--rounding", "linear=fp8,kv=fp8,index=fp8"),
            "want linears=fp8|ggml|none,kv=fp8|f16|v4|fp4+v4|fp8-all|none,index=",
        ),
        (("--rounding", "linears=fp8,kv=fp8,index=fp8", "--numerics", "plain"), "not allowed with argument"),
    ],
)
def test_a_rounding_that_is_none_is_refused_in_one_line(recording, flags, message):
    with pytest.raises((UsageError, ConfigError)) as end:
        compare.main(["--recording", str(recording), *flags])
    assert message in str(end.value)


def test_models_with_odd_widths_are_compared_in_plain_numerics(tmp_path):
    """Widths that no block of FP8 divides: nothing of such a run can be rounded."""
    model = tmp_path / "odd"
    model.mkdir()
    write_checkpoint(model, micro_config(), seed=1)
    out = recorded(tmp_path, [n * 7 % 16 for n in range(60)], "--model", model, "--numerics", "plain")
    for flags in (("--numerics", "plain"), ()):
        status, report = compared(out, "--model", model, *flags)
        assert (status, report["numerics"]) == (0, "plain")
        assert report["counts"]["agrees"] == len(report["sites"])
