"""`scripts.record` and `scripts.compare` as commands: what they write, refuse, and need of a checkpoint."""

import json
import os
import shutil
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file, save_file

from fathom.model.errors import ConfigError
from fathom.probes import verdict
from fathom.probes.faults import FAULTS
from fathom.probes.subject import Subject
from fathom.scripts import compare, fathom, logits, make_checkpoint, record
from tests.make_checkpoint import tiny_config

COUNT = 140
DISPATCH = (
    "experts-wrong-for-some-tokens",
    "experts-of-the-next-rank",
    "weights-of-another-slot",
    "pair-lost",
    "pairs-beyond-capacity-lost",
    "pair-counted-twice",
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("compare")
    (path / "ids.json").write_text(json.dumps(Subject().tokens(COUNT)))
    return path


@pytest.fixture(scope="module")
def recording(folder):
    out = folder / "ours.safetensors"
    assert record.main(["--tokens", str(folder / "ids.json"), "--out", str(out)]) == 0
    return out


def compared(path, *flags):
    out = path.with_suffix(".json")
    status = compare.main(["--recording", str(path), "--json", str(out), *flags])
    return status, json.loads(out.read_text())


def test_our_own_run_agrees_in_deployed_numerics_at_every_site(recording, capsys):
    status, report = compared(recording)
    assert (status, report["verdict"], report["first"], report["faults"]) == (0, "agrees", None, [])
    assert len(report["sites"]) == 102
    assert {site["status"] for site in report["sites"]} == {"agrees"}
    out = capsys.readouterr().out
    assert "Record the sites" not in out, "all are"
    assert "AGREES: 102 sites agree" in out
    assert "deployed numerics (found), bf16 (as its numbers say)" in out
    assert len([line for line in out.splitlines() if "agrees" in line]) == 2  # layers together, and what is of no layer
    assert out.splitlines()[-1] == "AGREES: 102 sites agree"  # where a reader looks first
    assert report["warnings"][0].startswith("Bounds are as wide as ")


@pytest.mark.parametrize("numerics", ["plain", "deployed"])
def test_steps_of_our_own_run_agree_too(folder, tmp_path, capsys, numerics):
    out = tmp_path / "steps.safetensors"
    flags = ["--tokens", str(folder / "ids.json"), "--out", str(out), "--steps", "--numerics", numerics]
    assert record.main([*flags, "--prefill-chunk", "50"]) == 0
    assert "cpu ops do not show: attention.weights\n" in capsys.readouterr().err
    status, report = compared(out)
    assert (status, report["verdict"], report["counts"]["agrees"]) == (0, "agrees", 146)
    with pytest.raises(ConfigError, match="no site; there are"):
        record.main([*flags, "--sites", "attention.weights"])


def test_a_recording_has_the_rows_of_every_call(folder, recording):
    """Cut into calls and decoded: the same names and shapes."""
    out = folder / "cut.safetensors"
    flags = ["--prefill-chunk", "50", "--decode-from", "130", "--layers", "1", "--sites", "indexer.selected,streams"]
    assert record.main(["--tokens", str(folder / "ids.json"), "--out", str(out), *flags]) == 0
    whole, cut = load_file(recording), load_file(out)
    assert set(cut) == {"tokens", "layers.1.indexer.selected", "layers.1.streams"}
    assert all(cut[name].shape == whole[name].shape and cut[name].dtype == whole[name].dtype for name in cut)
    assert compare.main(["--recording", str(out)]) == 0


@pytest.mark.parametrize(("numerics", "dtype"), [("plain", "fp32"), ("deployed", "fp32")])
def test_the_oracle_from_embeddings_to_logits_agrees_with_scripts_logits(folder, capsys, numerics, dtype):
    """Nothing else is recorded, so four layers and the head are its own."""
    out, run = folder / "logits.safetensors", ("--numerics", numerics, "--dtype", dtype)
    ids = Subject().tokens(60)
    (folder / "few.json").write_text(json.dumps(ids))
    assert logits.main(["--tokens", str(folder / "few.json"), "--out", str(out), *run]) == 0
    save_file(load_file(out) | {"tokens": torch.tensor(ids)}, out)
    status, report = compared(out, *run)
    assert status == 0
    assert report["sites"][0]["free"] is True
    assert report["sites"][0]["rows"] == 60
    assert report["sites"][0]["bound"] < (1e-3 if numerics == "plain" else 0.5)
    assert "computed from the embeddings on" in capsys.readouterr().out


@pytest.mark.parametrize(
    "fault",
    [
        "sink-dropped",
        *(
            pytest.param(fault, marks=pytest.mark.slow)
            for fault in ("route-scale-dropped", "query-theta", "sinkhorn-of-sigmoids", *DISPATCH)
        ),
    ],
)
def test_a_fault_that_is_injected_is_named_in_all_layers_at_once(folder, capsys, fault):
    out = folder / "injected.safetensors"
    assert record.main(["--tokens", str(folder / "ids.json"), "--out", str(out), "--inject", fault]) == 0
    status, report = compared(out)
    assert status == 1
    best = {(one["layer"], one["site"]): one["name"] for one in reversed(report["faults"])}  # a site has its best first
    assert {*best.values()} == {fault}
    *_, verdict, first, line = capsys.readouterr().out.splitlines()
    assert verdict.startswith("DIFFERS: ")
    assert first.startswith("First difference: ")
    assert line.startswith(f"Explained by {fault}, ")
    assert report["faults"][0]["what"] in line
    assert report["faults"][0]["what"] == FAULTS[fault].what


@pytest.fixture(scope="module")
def beyond_capacity(folder):
    """The first layer of a run in calls of 50 tokens."""
    out = folder / "capacity.safetensors"
    flags = ["--inject", "pairs-beyond-capacity-lost", "--prefill-chunk", "50", "--layers", "0"]
    assert record.main(["--tokens", str(folder / "ids.json"), "--out", str(out), *flags]) == 0
    return out


@pytest.mark.parametrize(("flags", "named"), [(("--prefill-chunk", "50"), True), ((), False)])
def test_what_depends_on_the_other_tokens_of_a_call_is_named_by_the_calls_of_the_run(beyond_capacity, flags, named):
    status, report = compared(beyond_capacity, *flags)
    assert (status, report["first"]["site"]) == (1, "experts.output")
    assert [fault["name"] for fault in report["faults"] if fault["explains"]] == ["pairs-beyond-capacity-lost"] * named


def test_it_is_not_tried_where_rows_of_a_call_are_missing_and_that_is_said(beyond_capacity, folder, capsys):
    tensors, at = load_file(beyond_capacity), torch.arange(0, COUNT, 2)
    kept = {name: x[at] for name, x in tensors.items() if len(x) == COUNT and name != "tokens"}
    path = folder / "every other row.safetensors"
    save_file(kept | {"tokens": tensors["tokens"], "positions": at}, path)
    _, report = compared(path, "--prefill-chunk", "50", "--dtype", "bf16")
    assert not any(fault["explains"] for fault in report["faults"])
    (left,) = report["not_tried"]
    names, _, why = left["why"].removeprefix("not ").partition(": ")
    assert "pairs-beyond-capacity-lost" in names.split(", ")
    assert why == "not all rows of its calls were recorded"
    told = "layers.0.experts.output: none of the known faults explains it"
    assert any(line.startswith(told) and left["why"] in line for line in capsys.readouterr().out.splitlines())


@pytest.mark.parametrize(
    ("fault", "why"), [("sinks-of-rank-0", "between ranks"), ("sink-droped", "did you mean sink-dropped?")]
)
def test_a_fault_that_this_run_cannot_have_is_refused(folder, tmp_path, fault, why):
    flags = ["--tokens", str(folder / "ids.json"), "--out", str(tmp_path / "x"), "--inject", fault]
    with pytest.raises(ConfigError, match=why):
        record.main(flags)


def test_the_other_numerics_are_named(recording):
    status, report = compared(recording, "--numerics", "plain", "--layers", "0")
    assert status == 1
    assert report["first"]["site"] == "attention.latent"  # wq_a is FP8: its input is rounded
    assert report["faults"][0]["name"] == "deployed numerics"


@pytest.mark.parametrize(
    ("flags", "name", "position", "column", "value"),
    [
        (("--layers", "2"), "layers.2.attention.kv", 77, 3, 0.1),  # a number that E4M3 does not have
        (("--layers", "0"), "layers.0.attention.output", 5, 0, float("nan")),
        (("--layers", "3"), "layers.3.attention.mixed", 139, 1, 3.0),
        ((), "embedded", 9, 4, 0.5),
    ],
)
def test_a_number_that_is_wrong_is_found(folder, recording, flags, name, position, column, value):
    tensors = load_file(recording)
    tensors[name][position].view(-1)[column] = value
    path = folder / "wrong.safetensors"
    save_file(tensors, path)
    status, report = compared(path, *flags, "--no-identify")
    assert status == 1
    first = report["first"]
    assert (first["position"], first["index"][-1] % 128) == (position, column)
    assert name in (first["site"], f"layers.{first['layer']}.{first['site']}")


def test_a_small_error_in_one_column_of_all_rows_is_found(folder, recording):
    tensors = load_file(recording)
    tensors["layers.1.streams"][:, 0, 17] *= 1.03
    path = folder / "column.safetensors"
    save_file(tensors, path)
    _, report = compared(path, "--layers", "1", "--no-identify")
    (site,) = [site for site in report["sites"] if site["status"] == "differs"]
    assert site["site"] == "streams"
    assert "number 17 of all rows" in site["why"]


@pytest.mark.parametrize(
    ("site", "change"),
    [
        (
            "indexer.selected",
            lambda ids: ids.index_put((torch.tensor(100), torch.tensor(2)), torch.tensor(30, dtype=ids.dtype)),
        ),
        ("indexer.selected", lambda ids: ids.index_put((torch.tensor(100), torch.tensor(2)), ids[100, 3])),
        ("experts.ids", lambda ids: ids.index_put((torch.tensor(100),), (ids[100] + 1) % 8)),
    ],
    ids=["an unfinished entry", "an entry twice", "other experts"],
)
def test_a_choice_that_the_scores_do_not_make_is_found(folder, recording, site, change):
    tensors = load_file(recording)
    name = f"layers.1.{site}"
    tensors[name] = change(tensors[name]).contiguous()
    path = folder / "choice.safetensors"
    save_file(tensors, path)
    _, report = compared(path, "--layers", "1", "--no-identify")
    assert (report["first"]["site"], report["first"]["position"]) == (site, 100)


@pytest.mark.parametrize(
    ("name", "value"),
    [("experts.ids", -1), ("experts.ids", 8), ("indexer.selected", 35), ("indexer.selected", 10**6)],
)
def test_a_choice_of_nothing_differs_and_is_not_gone_on_with(folder, recording, name, value):
    tensors = load_file(recording)
    tensors[f"layers.1.{name}"][120, 0] = value
    path = folder / "nothing.safetensors"
    save_file(tensors, path)
    _, report = compared(path, "--layers", "1", "--no-identify")
    assert [site["site"] for site in report["sites"] if site["status"] == "differs"] == [name]
    assert report["first"]["position"] == 120


@pytest.mark.parametrize(
    "ids", [[0], [0, 100, 101], [5] * 130], ids=["one token", "no window", "one token again and again"]
)
@pytest.mark.parametrize(("numerics", "dtype"), [("plain", "fp32"), ("deployed", "bf16")])
def test_prompts_of_few_or_equal_tokens_agree(folder, ids, numerics, dtype):
    tokens, out = folder / "short.json", folder / "short.safetensors"
    tokens.write_text(json.dumps(ids))
    run = ("--numerics", numerics, "--dtype", dtype)
    assert record.main(["--tokens", str(tokens), "--out", str(out), *run]) == 0
    status, report = compared(out, *run)
    assert status == 0
    left_out = {site["site"] for site in report["sites"] if site["status"] != "agrees"}
    assert left_out <= {"attention.entry", "indexer.key", "indexer.key_used"}
    assert bool(left_out) == (len(ids) < 4 or len(ids) // 128 == 0)


def test_what_follows_from_a_number_that_is_not_finite_is_not_blamed(folder, recording):
    tensors = load_file(recording)
    tensors["layers.0.streams"][30, 1, 5] = float("nan")
    path = folder / "nan.safetensors"
    save_file(tensors, path)
    _, report = compared(path, "--layers", "0,1", "--no-identify")
    assert [(site["layer"], site["site"]) for site in report["sites"] if site["status"] == "differs"] == [
        (0, "streams")
    ]


def test_all_rows_scaled_alike_differ(folder, recording):
    tensors = load_file(recording)
    tensors["layers.1.experts.output"] *= 1.015
    path = folder / "scaled.safetensors"
    save_file(tensors, path)
    _, report = compared(path, "--layers", "1", "--no-identify")
    assert "experts.output" in {site["site"] for site in report["sites"] if site["status"] == "differs"}


@pytest.mark.parametrize(
    ("layer", "kept", "first"),
    [
        (1, (), "indexer.selected and experts.ids"),
        (1, ("experts.ids",), "indexer.selected"),
        (2, (), "experts.ids"),  # nothing is selected in an HCA layer
        (2, ("experts.ids",), ""),
    ],
)
def test_what_would_make_bounds_narrow_is_said_where_it_is_not_recorded(
    folder, recording, capsys, monkeypatch, layer, kept, first
):
    monkeypatch.setattr(verdict, "WIDE", 0.01)
    tensors = load_file(recording)
    parts = {name: x for name, x in tensors.items() if name == "tokens" or name.endswith((".streams", *kept))}
    save_file(parts, folder / "streams.safetensors")
    assert compared(folder / "streams.safetensors", "--layers", str(layer), "--rows", "8")[0] == 0
    out = capsys.readouterr().out.replace("\n", " ")
    assert "Bounds are as wide as" in out
    assert f"Record the sites between, {first} first." in out if first else "Record the sites between" not in out


def test_rows_that_are_wrong_are_not_forgiven_where_no_input_is_recorded(folder, recording):
    tensors = load_file(recording)
    kept = {name: tensors[name] for name in ("tokens", "layers.0.streams", "layers.2.streams")}
    kept["layers.2.streams"][50:54] = 0
    path = folder / "free.safetensors"
    save_file(kept, path)
    status, report = compared(path, "--no-identify")
    assert status == 1
    assert (report["first"]["layer"], report["first"]["position"]) == (2, 50)


def test_few_rows_of_few_positions(folder, recording):
    tensors = load_file(recording)
    positions = torch.tensor([3, 50, 77, 100, 139])
    kept = {name: tensors[name][positions] for name in ("layers.0.streams", "layers.0.experts.output")}
    path = folder / "few.safetensors"
    save_file(kept | {"tokens": tensors["tokens"], "positions": positions}, path)
    assert compared(path, "--rows", "2", "--dtype", "bf16")[0] == 0


def test_experts_in_another_order_agree(folder, recording):
    tensors = load_file(recording)
    for name in ("layers.1.experts.ids", "layers.1.experts.weights"):
        tensors[name] = tensors[name].flip(1).contiguous()
    path = folder / "order.safetensors"
    save_file(tensors, path)
    assert compared(path, "--layers", "1")[0] == 0


def test_a_sample_of_rows_is_said(recording, capsys):
    status, report = compared(recording, "--rows", "40", "--layers", "2")
    assert status == 0
    rows = {site["rows"] for site in report["sites"] if site["site"] == "streams"}
    assert len(rows) == 1
    assert 30 <= rows.pop() <= 40
    assert "one at random from each of as many equal parts" in capsys.readouterr().out


def test_the_picture_and_the_json_of_what_is_not_finite(folder, recording):
    tensors = load_file(recording)
    tensors["layers.1.attention.output"][7, 0] = float("inf")
    path, picture = folder / "inf.safetensors", folder / "depth.svg"
    save_file(tensors, path)
    _, report = compared(path, "--picture", str(picture), "--layers", "1", "--no-identify")
    assert report["first"]["theirs"] == "inf"
    assert picture.read_text().startswith("<svg")
    assert "How far sites are off, layer by layer" in picture.read_text()


LONG = "model.layers.1." + "of_a_runtime_that_nobody_knows." * 6 + "output"


def test_names_are_told_whole_without_a_judgement(folder, recording):
    """Whatever a terminal may be taken for."""
    tensors, path = load_file(recording), folder / "names.safetensors"
    kept = {"tokens": tensors["tokens"], LONG: tensors["hidden"], "model.layers.1.output": tensors["layers.1.streams"]}
    save_file(kept, path)
    program = "import sys; from fathom.scripts.compare import main; sys.exit(main(sys.argv[1:]))"
    flags = ["--recording", str(path), "--explain-names"]
    env = os.environ | {"TERM": "dumb", "FORCE_COLOR": "1"}
    done = subprocess.run([sys.executable, "-c", program, *flags], capture_output=True, text=True, env=env, check=True)
    (line,) = [line for line in done.stdout.splitlines() if LONG.replace("layers.1.", "layers.{l}.") in line]
    assert line.endswith("no name in the table of transformers")
    assert "agree" not in done.stdout
    with pytest.raises(ConfigError, match="judges nothing, so there is nothing for --json"):
        compared(path, "--explain-names")


def test_the_page_has_the_names_and_titles_of_words(folder, recording):
    tensors = load_file(recording)
    path, page = folder / "page.safetensors", folder / "page.html"
    wrong = tensors["layers.1.attention.latent"] * 2
    save_file({"tokens": tensors["tokens"], "embedded": tensors["embedded"], "a<b": wrong}, path)
    names = folder / "names.json"
    names.write_text(json.dumps({"a<b": "layers.1.attention.latent"}))
    compared(path, "--map", str(names), "--html", str(page), "--no-identify")
    _, after = page.read_text().split("<details>")
    assert "a&lt;b" in after
    assert "Rows that differ, by their place in the prompt" in page.read_text()


def test_only_the_shards_of_what_is_compared_are_needed(tmp_path, capsys):
    """A checkpoint with a shard for each layer, of which one is there."""
    config = tiny_config(compress_ratios=[0, 4, 128], num_hidden_layers=3, num_hash_layers=1)
    (tmp_path / "config.json").write_text(json.dumps(config | {"expert_dtype": "fp4"}))
    whole, part = tmp_path / "whole", tmp_path / "part"
    make = ["--config", str(tmp_path / "config.json"), "--layers", "0,1,2", "--out", str(whole)]
    assert make_checkpoint.main(make) == 0
    ids, out = tmp_path / "ids.json", tmp_path / "r.safetensors"
    ids.write_text(json.dumps([n * 7 % config["vocab_size"] for n in range(150)]))
    assert record.main(["--model", str(whole), "--tokens", str(ids), "--out", str(out)]) == 0
    index = json.loads((whole / "model.safetensors.index.json").read_text())["weight_map"]
    part.mkdir()
    for name in ("config.json", "model.safetensors.index.json", index["layers.1.attn_norm.weight"]):
        shutil.copy(whole / name, part / name)
    assert compare.main(["--model", str(part), "--recording", str(out), "--layers", "1"]) == 0
    capsys.readouterr()
    with pytest.raises(ConfigError) as error:
        compare.main(["--model", str(part), "--recording", str(out), "--layers", "2"])
    assert "--layers 2" in str(error.value)
    assert f"is in {index['layers.2.attn_norm.weight']}, which is not in the directory" in str(error.value)
    status, report = compared(out, "--model", str(part))  # all of it: what cannot be judged says why
    assert (status, report["verdict"]) == (1, "nothing compared"), "most of it could not be"
    assert {site["status"] for site in report["sites"] if site["layer"] == 1} == {"agrees"}
    assert {site["layer"] for site in report["sites"] if site["status"] != "agrees"} == {0, 2, None}
    assert all("not in the directory" in site["why"] for site in report["sites"] if site["status"] == "not judged")


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--layers", "7"), "--layers 7: the model has layers 0-3"),
        (("--picture", "x.png"), "want a name that ends in .svg"),
    ],
)
def test_a_command_line_that_cannot_be_meant_is_refused(recording, flags, message):
    with pytest.raises(ConfigError, match=message):
        compare.main(["--recording", str(recording), *flags])


def test_a_site_that_is_none_is_refused(folder, tmp_path):
    flags = ["--tokens", str(folder / "ids.json"), "--out", str(tmp_path / "x"), "--sites", "stream"]
    with pytest.raises(ConfigError, match="no site"):
        record.main(flags)
    assert not (tmp_path / "x").exists()


def test_fathom_runs_every_command_and_names_a_near_miss(capsys):
    assert {"generate", "logits", "record", "compare", "inspect", "plan", "probe", "bench", "make-checkpoint"} <= set(
        fathom.commands()
    )
    assert fathom.main(["comapre"]) == 2
    assert "did you mean compare?" in capsys.readouterr().err
    words = [sys.executable, "-m", "scripts.fathom"]
    same = subprocess.run([*words, "inspect"], capture_output=True, text=True, check=False)
    assert (same.returncode, "vocab_size" in same.stdout) == (0, True)
    for name in ("make-checkpoint", "make_checkpoint"):  # as the command is called, and as its file
        wrong = subprocess.run([*words, name, "--nothing"], capture_output=True, text=True, check=False)
        assert (wrong.returncode, "make_checkpoint" in wrong.stderr) == (2, True)


# --- what serving engines return of a prompt


def returned(path, tensors, count=5, late=0):
    """The likeliest tokens of every position, as an engine returns them; `late`: a position late."""
    logprobs, ids = torch.log_softmax(tensors["logits"].float(), -1).topk(count)
    rows = len(ids) - late
    more = {"positions": torch.arange(late, len(ids))} if late else {}
    tensors = {"tokens": tensors["tokens"], "logprobs": logprobs[:rows], "logprobs.ids": ids[:rows]} | more
    save_file({name: x.contiguous() for name, x in tensors.items()}, path)
    return path


@pytest.fixture(scope="module")
def in_fp32(folder):
    out = folder / "plain.safetensors"
    flags = ["--numerics", "plain", "--dtype", "fp32"]
    assert record.main(["--tokens", str(folder / "ids.json"), "--out", str(out), *flags]) == 0
    return out


def test_the_likeliest_tokens_alone_are_judged(folder, in_fp32):
    flags = ("--numerics", "plain", "--dtype", "fp32")
    tensors = load_file(in_fp32)
    status, report = compared(returned(folder / "returned.safetensors", tensors), *flags)
    assert (status, [site["site"] for site in report["sites"]]) == (0, ["logprobs"])
    assert report["sites"][0]["rows"] == COUNT
    assert report["sites"][0]["bound"] < 1e-4
    tensors["logits"] = tensors["logits"] * 1.01
    status, report = compared(returned(folder / "warm.safetensors", tensors), *flags, "--rows", "20")
    assert (status, report["first"]["site"]) == (1, "logprobs")


def test_log_probabilities_of_the_token_before_are_told(folder, in_fp32, capsys):
    late = returned(folder / "late.safetensors", load_file(in_fp32), late=1)
    status, report = compared(late, "--numerics", "plain", "--dtype", "fp32", "--rows", "20")
    assert status == 1
    assert [fault["name"] for fault in report["faults"]] == ["rows-shifted-by--1"]
    assert "Rows are those of 1 token earlier." in capsys.readouterr().out


def test_log_probabilities_of_no_name_are_told_to_be_of_all_layers(folder, in_fp32, capsys):
    tensors = load_file(in_fp32)
    tensors["logits"] = tensors["logits"].roll(1, -1)
    path = returned(folder / "rolled.safetensors", tensors)
    status, report = compared(path, "--numerics", "plain", "--dtype", "fp32", "--rows", "20")
    assert (status, report["faults"]) == (1, [])
    assert "no fault was looked for there: log-probabilities come from all layers" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"logprobs.ids": None}, "has logprobs without logprobs.ids"),
        ({"logprobs": None}, "has logprobs.ids without logprobs"),
        ({"logprobs": torch.zeros(COUNT, 4)}, r"logprobs is \[140, 4\] and logprobs.ids is \[140, 5\]"),
        ({"logprobs.ids": torch.full((COUNT, 5), 1 << 20)}, r"logprobs.ids\[0, 0\] is 1.04858e\+06, want 0 to"),
        ({"logprobs.ids": torch.full((COUNT, 5), 0.5)}, r"logprobs.ids\[0, 0\] is 0.5, want 0 to"),
    ],
)
def test_log_probabilities_without_their_ids_are_refused(recording, tmp_path, change, why):
    tensors = load_file(returned(tmp_path / "x.safetensors", load_file(recording))) | change
    path = tmp_path / "changed.safetensors"
    save_file({name: x for name, x in tensors.items() if x is not None}, path)
    with pytest.raises(ConfigError, match=why):
        compared(path)
