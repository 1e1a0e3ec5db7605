"""`scripts.compare --against`: which numbers of two recordings are the same, and what is said of the others."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from fathom.model.config import ModelConfig
from fathom.model.errors import ConfigError
from fathom.probes.faults import FAULTS
from fathom.probes.subject import Subject
from fathom.runtime.options import DEMO
from fathom.scripts import compare, record

COUNT = 140
FEW = 40  # of these, where all layers are run before a row is known
BROKEN = ("indexer-returns-none", "keys-four-times-too-wide")  # faults with which nothing can be recorded


def faults():
    """Those that one rank without variants or drafts can have."""
    config = ModelConfig.from_file(DEMO / "config.json")
    elsewhere = ("between_ranks", "in_variants", "in_drafts")
    for name, fault in FAULTS.items():
        if not any(getattr(fault, where) for where in elsewhere) and not fault.inapplicable(config):
            yield name


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("two")
    (path / "ids.json").write_text(json.dumps(Subject().tokens(COUNT)))
    return path


def recorded(folder, *flags):
    out = folder / f"{'-'.join(map(str, flags)).strip('-') or 'healthy'}.safetensors"
    if not out.exists():
        assert record.main(["--tokens", str(folder / "ids.json"), "--out", str(out), *map(str, flags)]) == 0
    return out


@pytest.fixture
def healthy(folder):
    return recorded(folder)


def saved(path, tensors):
    save_file({name: x.contiguous() for name, x in tensors.items()}, path)
    return path


def compared(one, other, *flags):
    out = one.parent / "two.json"
    status = compare.main(["--recording", str(one), "--against", str(other), "--json", str(out), *map(str, flags)])
    return status, json.loads(out.read_text())


def alone(path, *flags):
    out = path.with_suffix(".json")
    compare.main(["--recording", str(path), "--json", str(out), *flags])
    return json.loads(out.read_text())


def test_a_recording_is_the_same_as_itself_and_no_layer_is_computed(healthy, monkeypatch, capsys):
    def computed(*_):
        raise AssertionError("a layer of which all rows are the same")

    monkeypatch.setattr("fathom.probes.judge.pairs.Layer.computed", computed)
    status, report = compared(healthy, healthy, "--numerics", "deployed")
    assert (status, report["verdict"], report["parts"], report["first"]) == (0, "agrees", None, None)
    assert report["same"]["sites"] == report["same"]["of_sites"] == 102
    assert report["same"]["rows"] == report["same"]["of_rows"] > 102
    assert "The same numbers: all" in capsys.readouterr().out


def test_calls_of_other_lengths_part_in_numbers_and_agree(folder, healthy):
    cut = recorded(folder, "--prefill-chunk", 50, "--decode-from", 130)
    one, other = load_file(healthy), load_file(cut)
    status, report = compared(healthy, cut)
    assert (status, report["verdict"], report["faults"]) == (0, "agrees", [])
    assert report["counts"] == {"agrees": 102, "differs": 0, "not judged": 0}
    (wide,) = report["warnings"]
    assert wide.startswith("Bounds are as wide as")
    assert report["not_tried"] == []
    assert [set(file) for file in report["files"]] == [{"understood", "left_out", "names"}] * 2
    assert 0 < report["same"]["sites"] < 102
    unlike = [
        name
        for name in one
        if name != "tokens" and not name.endswith(("ids", "selected")) and not torch.equal(one[name], other[name])
    ]
    assert len(unlike) <= 102 - report["same"]["sites"]
    parts = report["parts"]
    name = f"layers.{parts['layer']}.{parts['site']}"
    rows = (one[name] != other[name]).flatten(1).any(1).nonzero()[:, 0]
    assert int(rows[0]) == parts["position"]


def test_runs_that_round_otherwise_agree_each_by_its_own_numerics(folder, healthy, capsys):
    plain = recorded(folder, "--numerics", "plain", "--dtype", "fp32")
    status, report = compared(healthy, plain)
    assert (status, report["dtype"]) == (0, ["bf16", "fp32"])
    out = capsys.readouterr().out
    assert "--recording: deployed numerics, bf16" in out
    assert "--against: plain numerics, fp32" in out


@pytest.mark.parametrize(
    ("fault", "site"), [("sink-dropped", "attention.mixed"), ("post-not-doubled", "attention.post")]
)
def test_the_step_is_found_and_named_whichever_run_has_it(folder, healthy, capsys, fault, site):
    faulty = recorded(folder, "--inject", fault)
    for one, other, wrong in ((healthy, faulty, "against"), (faulty, healthy, "recording")):
        status, report = compared(one, other)
        assert (status, report["first"]["layer"], report["first"]["site"]) == (1, 0, site)
        assert {explained["name"] for explained in report["faults"]} == {fault}
        assert report["explained_in"] == wrong
        assert f"It is --{wrong} that is wrong." in capsys.readouterr().out


def test_a_fault_that_both_have_is_no_step(folder):
    one = recorded(folder, "--inject", "sink-dropped")
    other = recorded(folder, "--inject", "sink-dropped", "--prefill-chunk", 50)
    status, report = compared(one, other)
    assert (status, report["verdict"]) == (0, "agrees")
    assert report["same"]["rows"] < report["same"]["of_rows"]


@pytest.mark.parametrize("row", [0, 77, COUNT - 1])
def test_one_row_of_a_long_recording_that_is_not_the_same_is_judged(healthy, tmp_path, row):
    """However few rows are judged."""
    tensors = load_file(healthy)
    tensors["layers.2.attention.output"][row] *= 1.5
    status, report = compared(healthy, saved(tmp_path / "x.safetensors", tensors), "--rows", 8, "--no-identify")
    assert status == 1
    assert (report["first"]["site"], report["first"]["position"]) == ("attention.output", row)
    assert report["same"]["of_rows"] - report["same"]["rows"] == 1


def test_rows_that_only_one_has_are_left_out_and_a_longer_prompt_is_no_other(healthy, tmp_path, capsys):
    (tmp_path / "ids.json").write_text(json.dumps(Subject().tokens(COUNT)[:100]))
    short = tmp_path / "short.safetensors"
    assert record.main(["--tokens", str(tmp_path / "ids.json"), "--out", str(short)]) == 0
    for one, other in ((short, healthy), (healthy, short)):
        status, report = compared(one, other)
        assert (status, report["verdict"]) == (0, "agrees")
    some = {name: x for name, x in load_file(healthy).items() if name in {"tokens", "logits", "layers.1.streams"}}
    capsys.readouterr()
    status, report = compared(saved(tmp_path / "some.safetensors", some), healthy)
    assert (status, report["same"]["of_sites"]) == (0, 2)
    assert "Not compared: 100 in --against alone" in capsys.readouterr().out


def test_logits_alone_are_held_against_logits(folder, tmp_path):
    plain = recorded(folder, "--numerics", "plain", "--dtype", "fp32")
    faulty = recorded(folder, "--numerics", "plain", "--dtype", "fp32", "--inject", "query-theta")
    paths = []
    for path in (plain, faulty):
        tensors = load_file(path)
        paths.append(saved(tmp_path / path.name, {name: tensors[name][:FEW] for name in ("tokens", "logits")}))
    flags = ("--numerics", "plain", "--dtype", "fp32", "--no-identify")
    assert compared(paths[0], paths[0], *flags)[0] == 0
    status, report = compared(*paths, *flags)
    assert (status, report["first"]["site"]) == (1, "logits")


def altered(healthy, tmp_path, name, change):
    """The healthy recording with one tensor changed in place."""
    tensors = load_file(healthy)
    change(tensors[name])
    return saved(tmp_path / "altered.safetensors", tensors)


def both_ways(one, other, *flags):
    """Whichever of the two it is said first."""
    for pair in ((one, other), (other, one)):
        yield compared(*pair, *flags)


def a_number_lost(x):
    x[5, 3] = torch.nan


def another_expert(x):
    x[9, 0] = next(expert for expert in range(64) if expert not in x[9].tolist())


def weights_exchanged(x):
    x.copy_(x.flip(-1))


def off_the_grid(x):
    x[40, 5] *= 1.01


@pytest.mark.parametrize(
    ("name", "change", "position"),
    [
        ("layers.1.attention.output", a_number_lost, 5),
        ("layers.3.experts.ids", another_expert, 9),
        ("layers.1.experts.weights", weights_exchanged, 0),
        ("layers.1.attention.kv", off_the_grid, 40),
    ],
)
def test_what_is_wrong_in_either_run_differs_and_is_its_own(folder, healthy, tmp_path, name, change, position):
    """Beside a run that differs from both in rounding."""
    wrong, cut = altered(healthy, tmp_path, name, change), recorded(folder, "--prefill-chunk", 50)
    layer, site = name.removeprefix("layers.").split(".", 1)
    reports = list(both_ways(cut, wrong, "--no-identify", "--layers", layer))
    for (status, report), which in zip(reports, ("against", "recording"), strict=True):
        assert (status, report["first"]["site"], report["first"]["position"]) == (1, site, position)
        off = {side: float(value) for side, value in report["off"].items()}
        assert off[which] > 1
        assert off[{"against": "recording", "recording": "against"}[which]] <= 1


def test_what_is_not_finite_in_both_is_no_step(folder, healthy, tmp_path):
    cut = recorded(folder, "--prefill-chunk", 50)
    for path in (healthy, cut):
        tensors = load_file(path)
        tensors["layers.1.attention.output"][5] = torch.nan
        saved(tmp_path / path.name, tensors)
    status, report = compared(*(tmp_path / path.name for path in (healthy, cut)), "--layers", "1")
    assert (status, report["verdict"]) == (0, "agrees")
    assert report["same"]["rows"] < report["same"]["of_rows"]


def test_rows_of_some_positions_are_compared_with_all(healthy, tmp_path):
    tensors, at = load_file(healthy), torch.arange(10, 50)
    some = {name: x[at] if len(x) == COUNT and name != "tokens" else x for name, x in tensors.items()}
    some["positions"] = at
    tensors["layers.1.attention.output"][[15, 100]] *= 3
    paths = saved(tmp_path / "some.safetensors", some), saved(tmp_path / "all.safetensors", tensors)
    for status, report in both_ways(*paths, "--no-identify"):
        assert (status, report["first"]["site"], report["first"]["position"]) == (1, "attention.output", 15)
        assert report["same"]["of_rows"] - report["same"]["rows"] == 1, "position 100 is not in both"


def test_other_prompts_and_flags_that_mean_nothing_are_refused(healthy, tmp_path):
    tensors = load_file(healthy)
    tensors["tokens"][3] += 1
    other = saved(tmp_path / "other.safetensors", tensors)
    with pytest.raises(ConfigError, match=r"another prompt than .*tokens\[3\] is"):
        compared(healthy, other)
    with pytest.raises(ConfigError, match="--against-map: there is no --against"):
        compare.main(["--recording", str(healthy), "--against-map", str(healthy.parent / "ids.json")])
    with pytest.raises(ConfigError, match="--picture: draws one recording"):
        compared(healthy, healthy, "--picture", tmp_path / "x.svg")
    whole = load_file(healthy)
    one, two = (
        saved(tmp_path / f"{name}.safetensors", {"tokens": whole["tokens"], name: whole[name]})
        for name in ("hidden", "logits")
    )
    with pytest.raises(ConfigError, match="no row of any site is in both"):
        compared(one, two)


def test_log_probabilities_are_compared_where_they_are_of_the_same_ids(folder, tmp_path, capsys):
    whole = load_file(recorded(folder, "--numerics", "plain", "--dtype", "fp32"))
    tensors = {name: whole[name][:FEW] for name in ("tokens", "logits")}
    logprobs, ids = torch.log_softmax(tensors["logits"], -1).topk(4)
    first = {"tokens": tensors["tokens"], "logprobs": logprobs, "logprobs.ids": ids}
    second = {name: x.clone() for name, x in first.items()}
    for x in (second["logprobs"], second["logprobs.ids"]):
        x[7] = x[7].roll(1)  # engines list them in any order
    second["logprobs.ids"][8] += 1  # others than the first run's
    second["logprobs"][9] *= 1.1
    paths = [saved(tmp_path / f"{n}.safetensors", tensors) for n, tensors in enumerate((first, second))]
    status, report = compared(*paths, "--numerics", "plain", "--dtype", "fp32")
    assert (status, report["first"]["site"], report["first"]["position"]) == (1, "logprobs", 9)
    assert (report["same"]["of_rows"], report["same"]["rows"]) == (FEW - 1, FEW - 2)
    assert "1 row of logprobs, of other ids" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.parametrize("fault", tuple(faults()))
def test_a_fault_is_the_step_at_the_site_at_which_the_oracle_sees_it(folder, healthy, fault):
    if fault in BROKEN:
        with pytest.raises(ConfigError, match=f"--inject {fault}: the run breaks down with it"):
            recorded(folder, "--inject", fault)
        return
    faulty = recorded(folder, "--inject", fault)
    first = alone(faulty, "--no-identify")["first"]
    status, report = compared(healthy, faulty, "--no-identify")
    assert status == (first is not None)
    if first is not None:
        assert (report["first"]["layer"], report["first"]["site"]) == (first["layer"], first["site"])
        assert float(report["off"]["against"]) > 1 >= float(report["off"]["recording"])
    else:
        assert report["verdict"] == "agrees"
