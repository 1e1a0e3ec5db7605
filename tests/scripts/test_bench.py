"""`scripts.bench`: sides take turns, what differs is not timed, and what is told is what the JSON holds."""

import argparse
import json
import re
import subprocess
import sys
import time
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file

from fathom.kernels.ops import CPU
from fathom.kernels.shard import cpu as shard
from fathom.model.errors import ConfigError
from fathom.probes.child import ChildError
from fathom.runtime.load import load_any
from fathom.runtime.options import DEMO, RunOptions
from fathom.scripts.bench import alone, beside, caches, command, ops, page, performance, record, turns
from fathom.scripts.bench.command import main
from fathom.scripts.bench.turns import OTHER, Case, Clock, Rounds, Spread, component, constant, near, ratios, timed
from fathom.scripts.cli import arguments, run
from fathom.scripts.paths import ROOT
from fathom.scripts.train.files import LLAMA
from tests.full_disk import small_files
from tests.peak_memory import peak_bytes

TINY = beside.MIDSIZE | {
    "vocab_size": 320,
    "hidden_size": 64,
    "moe_intermediate_size": 32,
    "num_hidden_layers": 4,
    "layer_types": [beside.LAYER_TYPES[ratio] for ratio in (0, 4, 128, 4)],
    "num_attention_heads": 4,
    "head_dim": 32,
    "qk_rope_head_dim": 16,
    "q_lora_rank": 32,
    "o_groups": 2,
    "o_lora_rank": 16,
    "index_n_heads": 32,  # with few, whole rows of scores are zero, and their top-k of ties is arbitrary
    "index_head_dim": 16,
    "index_topk": 8,
    "n_routed_experts": 6,
    "num_experts_per_tok": 2,
    "num_hash_layers": 1,
}
LAYER = caches.Grouped("Llama-3.1-8B", 4, 2, 16, 16)


def side(times, order=None, name="", computed=None):
    """A side that takes these times, one after the other."""
    left = iter(times)

    def once():
        if order is not None:
            order.append(name)
        return {"ms": next(left)}, computed

    return once


# --- the pairing


def test_sides_take_turns_and_a_ratio_is_of_one_round():
    """Round 0 ran while the machine was slow: across rounds the ratios would be 0.2 and 20."""
    order = []
    sides = {"a": side([9.0, 10.0, 1.0], order, "a"), "b": side([9.0, 20.0, 2.0], order, "b")}
    row = turns.run(Case("t", "c", sides, Rounds.exactly(2), asked={"ms": 2.5}))
    assert order == ["a", "b", "a", "b", "b", "a"]
    assert ratios(row, "b", "ms") == [2.0, 2.0]
    assert [(target.found, target.reached) for target in turns.asked([row])] == [(Spread(2.0, 2.0, 2.0), False)]


def test_a_floor_may_be_exceeded_by_so_much():
    rows = []
    for table, limit in (("one thread", 2.5), ("two threads", 2.4)):
        sides = {"floor": side([1.0]), "ours": side([2.5])}
        rows.append(turns.run(Case(table, "c", sides, Rounds.exactly(1), at_most={"ms": limit}, warm=False)))
    found = [(target.label, target.told, target.reached) for target in turns.asked(rows)]
    assert found == [("one thread, c", "<= 2.5", True), ("two threads, c", "<= 2.4", False)]
    assert [target.label for target in turns.asked(rows[1:])] == ["c"]


def test_a_slower_side_is_told_to_be_slower(capsys):
    sides = {"fast": timed(lambda: torch.zeros(1)), "slow": timed(lambda: torch.randn(400_000).sort().values)}
    row = turns.run(Case("t", "c", sides, Rounds(0.0, 5, 30)))
    assert 10 < min(ratios(row, "slow", "ms")) <= Spread.of(ratios(row, "slow", "ms")).median
    assert len(row["rounds"]) == 5
    assert "c, 5 rounds: fast ms" in capsys.readouterr().err
    assert re.fullmatch(r"time: slow / fast = \d+ \(\d+ .. \d+\)", turns.summary([row])[0])


def test_rounds_follow_from_what_the_first_took():
    def rounds(limits, milliseconds):
        return len(turns.run(Case("t", "c", {"a": timed(lambda: time.sleep(milliseconds / 1e3))}, limits))["rounds"])

    assert rounds(Rounds(0.05, 1, 30), 10) in range(2, 6)
    assert rounds(Rounds(0.0, 3, 30), 1) == 3
    assert rounds(Rounds(1e9, 3, 7), 1) == 7


@pytest.mark.parametrize("warm", [True, False])
def test_sides_that_compute_something_else_are_not_timed(warm, capsys):
    one, other = torch.ones(4), torch.ones(4) + torch.tensor([0.0, 0, 0, 0.1])
    for second, bound in ((other, 0.04), (one * float("nan"), 9.0)):
        sides = {"a": side([1.0] * 9, computed=one), "b": side([1.0] * 9, computed=second), "limit": constant(ms=0.5)}
        row = turns.run(Case("t", "c", sides, Rounds.exactly(3), near(bound), warm=warm))
        assert turns.differs(row)
        assert row["rounds"] == []
        assert "do not compute the same, so nothing is timed" in capsys.readouterr().err
    row = turns.run(Case("t", "c", sides | {"b": side([1.0] * 9, computed=other)}, Rounds.exactly(3), near(0.06)))
    assert [found["apart"] for found in row["agreement"]] == [pytest.approx([0.05])]
    assert len(row["rounds"]) == 3


def test_the_clock_tells_ops_and_kinds_of_layer_apart_and_what_is_none_of_them(monkeypatch):
    now = iter([0.0, 1.0, 4.0, 10.0, 12.0, 20.0, 21.0, 30.0])
    monkeypatch.setattr(turns, "wall", lambda _: next(now))
    clock = Clock()
    watched = clock.watch(CPU._replace(hadamard=lambda x: x, pool=lambda x: -x))
    clock.start()
    assert (watched.hadamard(1), watched.pool(1), watched.hadamard(2)) == (1, -1, 2)
    assert clock.stop("p", 2.0) == {"p: all": 60.0, "p: hadamard": 8.0, "p: pool": 4.0, f"p: {OTHER}": 48.0}
    q = object()
    given = {"SWA": (q, q, 0, 1, None, 1, None, q), "HCA": (q, q, 0, 1, q, 9, None, q), "CSA": (q, q, 0, 1, q, 4, q, q)}
    assert [component("attend", arguments) for arguments in given.values()] == [f"attend, {kind}" for kind in given]


# --- what is told


def document(rows, **settings):
    args = arguments(command.parser(), ["variants", "--json", "x"])
    made = record.Record(args).document(rows, [])
    return made | {"settings": made["settings"] | settings}


def test_the_page_has_the_numbers_of_the_json_and_one_table_of_each():
    sides = {"shard": side([2.0, 4.0, 5.0]), "full": side([1.0, 1.0, 10.0])}
    rows = [turns.run(Case("First", "c", sides, Rounds.exactly(3), asked={"ms": 1.0}, warm=False))]
    parts = {"1 token": lambda: ({"tokens/s": 8.0, "p: all": 3.0, "p: linear": 2.0, "p: other": 1.0}, None)}
    rows.append(turns.run(Case("Parts", "a prompt of", parts, Rounds.exactly(1), warm=False, compared=False)))
    made = page.page("kv-speed", "What a cache variant costs in time", "What was done.", document(rows))
    text = made.markdown()
    missed = "0 of 1 targets are reached; missed: c (0.5 times, asked for >= 1)"
    assert text.startswith(f"# What a cache variant costs in time\n\n**{missed}.** What was done.\n")
    # ratios by round: 0.5, 0.25, 2
    assert "* First, time: full / shard = 0.5 (0.25 .. 2), no change beyond the spread.\n" in text
    assert "| c | 4 (2 .. 5) | 1 (1 .. 10) | 0.5 | 0.25 .. 2 | 3 |" in text
    assert "| c | ms | >= 1 | 0.5 (0.25 .. 2) | missed |" in text
    assert "* a prompt of 1 token: tokens/s 8.\n" in text
    assert "| a prompt of | p: linear | 2 | 1 |" in text
    assert text.count("\n## First\n") == text.count("\n## Parts\n") == 1
    assert json.loads(made.files()["kv-speed.json"])["rows"] == rows
    assert "kv-speed-parts-p.svg" in made.files()


def test_a_page_of_what_was_saved_is_the_same_and_nothing_else_is_one(tmp_path):
    rows = [turns.run(Case("T", "c", {"a": side([1.0])}, Rounds.exactly(1), warm=False))]
    saved = tmp_path / "run.json"
    saved.write_text(json.dumps(document(rows)))
    for folder in ("one", "two"):
        assert main(["variants", "--saved", str(saved), "--out", str(tmp_path / folder)]) == 0
    assert (tmp_path / "one" / "kv-speed.md").read_text() == (tmp_path / "two" / "kv-speed.md").read_text()
    for text, why in (("{", "not JSON"), ("[]", "not what"), ('{"bench": "kernels"}', "not what")):
        saved.write_text(text)
        with pytest.raises(ConfigError, match=why):
            main(["variants", "--saved", str(saved)])
    saved.write_text(json.dumps(document(rows) | {"complete": False}))
    with pytest.raises(ConfigError, match="broke off"):
        main(["variants", "--saved", str(saved)])


def test_kernels_measures_what_is_asked_for_and_says_what_it_ran(tmp_path, monkeypatch, capsys):
    sides = {"x": side(range(1, 9)), "y": side(range(1, 9))}
    case = Case("attend", "a", sides, Rounds.exactly(2))
    assert tuple(ops.PARTS) == command.KERNEL_PARTS
    monkeypatch.setattr(ops, "PARTS", {"attend": lambda: iter([case])})
    out = tmp_path / "out.json"
    assert main(["kernels", "--only", "attend", "--json", str(out)]) == 0
    data = json.loads(out.read_text(encoding="utf-8"))
    assert (data["bench"], data["settings"], data["complete"]) == ("kernels", {"only": ["attend"]}, True)
    assert data["command"] == "python -m scripts.bench kernels --only attend --json out.json"
    assert data["rows"][0]["rounds"] == [{"x": {"ms": ms}, "y": {"ms": ms}} for ms in (2, 3)]
    assert data["machine"]["memory_bytes"] > 1 << 28
    assert data["versions"]["python"].startswith("3.")
    assert str(tmp_path) not in out.read_text(encoding="utf-8")
    assert "y / x" in capsys.readouterr().out


def test_the_command_names_folders_of_this_repository_whole_and_others_by_their_last_part(tmp_path):
    for folder, told in ((DEMO, "model/demo"), (tmp_path / "mine", "mine")):
        args = arguments(command.parser(), ["compare-transformers", "--checkpoint", str(folder)])
        assert record.settings(args)["checkpoint"] == told
        assert args.command_line == f"python -m scripts.bench compare-transformers --checkpoint {told}"


def test_pages_of_settings_that_make_another_page_have_names_of_their_own():
    for name, settings, told in (
        ("compare-transformers", {"theirs_dtype": "bf16"}, "beside-transformers"),
        ("compare-transformers", {"theirs_dtype": "fp32"}, "beside-transformers-fp32"),
        ("performance", {}, "performance"),
        ("gpu", {}, "gpu-kernels"),
    ):
        assert command.page_name(command.BENCHES[name], settings) == told


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        ([], "want the NAME of a bench"),
        (["nothing"], "nothing"),
        (["kernels", "--only", "dances"], "dances"),
        (["prefill", "--repetitions", "0"], "'0'"),
        (["variants", "--seconds", "nan"], "'nan'"),
        (["compare-transformers", "--threads", "0.5"], "'0.5'"),
    ],
)
def test_bad_flags_are_refused(flags, says, capsys):
    assert run(lambda: main(flags)) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert says in line


def test_the_list_says_what_each_measures_and_one_rank_alone_is_refused(capsys):
    assert main(["--list"]) == 0
    told = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in told] == list(command.BENCHES)
    assert all(len(line.split()) > 5 for line in told)
    assert run(lambda: main(["rank-tokens"])) == 2
    assert capsys.readouterr().err == "one rank alone has all tokens: start several, with torchrun\n"


# --- beside transformers


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tiny")
    beside.write(folder, TINY, 0)
    return folder


def test_both_sides_run_and_compute_the_same(tiny, tmp_path, monkeypatch):
    if sys.dont_write_bytecode:  # imports are most of it
        monkeypatch.setenv("PYTHONPYCACHEPREFIX", str(tmp_path / "cache"))
        monkeypatch.delenv("PYTHONDONTWRITEBYTECODE", raising=False)
    out = tmp_path / "out.json"
    flags = ["--context", "200", "--chunk", "64", "--our-chunk", "128", "--decode", "2", "--ours-only", "200"]
    files = ["--checkpoint", str(tiny), "--json", str(out), "--out", str(tmp_path)]
    assert main(["compare-transformers", *flags, "--pairs", "1", *files]) == 0
    pair, lone = json.loads(out.read_text(encoding="utf-8"))["rows"]
    assert pair["sides"] == ["Fathom", "transformers"]
    for found in pair["rounds"][0].values():
        assert list(found) == [beside.LOAD, beside.PREFILL, beside.DECODE, beside.PEAK, beside.ANONYMOUS]
        assert 0.05 < found[beside.ANONYMOUS] < found[beside.PEAK] < 2
        assert min(found.values()) > 0
    (judged,) = pair["agreement"]
    assert judged["same"]
    assert max(judged["apart"]) > 0, "two sides, not one twice"
    assert len(judged["apart"]) == 3
    assert lone["sides"] == ["200 tokens"]
    for found in lone["rounds"][0].values():
        kinds = {"linear", "select", "attend, SWA", "attend, CSA", "attend, HCA", "pool", "other"}
        for kind, whole in (("prefill", beside.PREFILL), ("decode", beside.DECODE)):
            parts = {name: ms for name, ms in found.items() if name.startswith(f"{kind}: ")}
            assert {f"{kind}: {part}" for part in kinds - {"pool"}} < parts.keys()
            assert parts[f"{kind}: all"] == pytest.approx(found[whole], rel=0.3)
            assert sum(parts.values()) == pytest.approx(2 * parts[f"{kind}: all"])
    text = (tmp_path / "beside-transformers.md").read_text(encoding="utf-8")
    assert "of 2 targets are reached" in text
    assert str(tmp_path) not in text


def faked(run, wrong=0.0):
    """A run of 1 s for our side, 3 s for theirs, whose logits are off by so much."""
    logits = torch.randn(1 + run.decode, 50, generator=torch.Generator().manual_seed(run.context))
    slower = 1.0 if run.side == beside.OURS else 3.0
    return {beside.LOAD: slower, beside.PREFILL: slower}, logits + (wrong * logits.roll(1, 1) if slower > 1 else 0)


def test_logits_that_differ_refuse_to_be_timed_and_what_can_be_reached_is_asked_for(tmp_path, monkeypatch, capsys):
    sizes = {"hidden_size": 64, "num_hidden_layers": 4, "n_routed_experts": 6, "vocab_size": 50}
    (tmp_path / "config.json").write_text(json.dumps(sizes))
    asked = []
    flags = ["compare-transformers", "--checkpoint", str(tmp_path), "--pairs", "2", "--decode", "2", "--ours-thp"]
    for wrong, status in ((0.0, 0), (0.2, 1)):
        monkeypatch.setattr(beside, "measured", lambda run, wrong=wrong: (asked.append(run), faked(run, wrong))[1])
        out = tmp_path.parent / f"{tmp_path.name}-{status}.json"
        assert run(lambda: main([*flags, "--json", str(out)])) == status  # noqa: B023 -- called at once
        rows = json.loads(out.read_text(encoding="utf-8"))["rows"]
        assert [len(row["rounds"]) for row in rows] == [2 * (1 - status)] * 2
        assert [bool(turns.asked([row])) for row in rows] == [not status] * 2
    assert [given.side for given in asked[:4]] == ["Fathom", "transformers", "transformers", "Fathom"]
    assert {given.chunk for given in asked if given.side == "Fathom"} == {2048}
    assert all(given.thp for given in asked)
    assert "nothing is timed" in capsys.readouterr().err


def test_how_far_apart_is_too_far():
    rows, noise = (torch.randn(5, 400, generator=torch.Generator().manual_seed(seed)) for seed in (0, 1))
    assert beside.apart(rows, rows)["apart"] == [0.0] * 5
    off = rows.clone()
    for change, same in ((0.05 * noise, True), (0.2 * noise, False), (rows.roll(1, 1) - rows, False)):
        assert beside.apart(rows + change, rows)["same"] == same
    for third, same in ((rows[2] + 0.3 * noise[2], True), (noise[2], False), (rows[2] * float("nan"), False)):
        off[2] = third  # a selection went the other way
        assert beside.apart(off, rows)["same"] == same


def test_a_child_that_refuses_is_one_line_and_one_that_breaks_says_why(tmp_path, capsys):
    (tmp_path / "config.json").write_text(json.dumps(dict.fromkeys(beside.SIZES, 64)))
    given = beside.Run(beside.OURS, tmp_path, 8, 8, 1, 1, 0, thp=False)
    assert run(lambda: beside.measured(given)) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "config.json" in line
    with pytest.raises(ChildError, match=r"^fathom\.scripts\.bench\.beside\.measure: .*") as broken:
        beside.measured(given._replace(side=beside.THEIRS, threads=0))
    assert "\n" not in str(broken.value)


def test_a_run_gets_its_threads_and_huge_pages_only_where_they_are_asked_for(tmp_path, monkeypatch):
    asked = []

    class Started(Exception):
        pass

    def start(*_, environment):
        asked.append(environment)
        raise Started

    monkeypatch.setattr(beside, "Child", start)
    (tmp_path / "config.json").write_bytes(b"2" * ((1 << 24) + 1))
    (tmp_path / "folder").mkdir()
    assert beside.warm(tmp_path) == (1 << 24) + 1
    for thp in (True, False):
        with pytest.raises(Started):
            beside.measured(beside.Run(beside.OURS, tmp_path, 8, 8, 1, 3, 0, thp=thp))
    assert [given[beside.THP] for given in asked] == ["1", None]
    assert all(given["OMP_NUM_THREADS"] == "3" for given in asked)


def test_another_family_or_no_transformers_is_one_line(tmp_path, monkeypatch, capsys):
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    assert run(lambda: main(["compare-transformers", "--checkpoint", str(tmp_path)])) == 2
    told = f"{tmp_path}/config.json: n_routed_experts: missing; only checkpoints of DeepSeek-V4 are compared\n"
    assert capsys.readouterr().err == told
    monkeypatch.setattr(beside.importlib.util, "find_spec", lambda _: None)
    assert run(lambda: main(["compare-transformers"])) == 2
    assert capsys.readouterr().err.startswith("transformers is not installed, and is the other side here")


def test_the_same_seed_writes_the_same_checkpoint(tiny, tmp_path, monkeypatch, capsys):
    beside.write(tmp_path / "again", TINY, 0)
    beside.write(tmp_path / "other", TINY, 1)
    one, again, other = (load_file(path / "model.safetensors") for path in (tiny, *sorted(tmp_path.iterdir())))
    assert all(torch.equal(one[name], again[name]) for name in one)
    assert not any(torch.equal(one[name], other[name]) for name in one)
    assert {tensor.dtype for tensor in one.values()} == {torch.bfloat16, torch.float32, torch.int64}
    (table,) = (tensor for tensor in one.values() if tensor.dtype is torch.int64)
    assert table.unique().numel() == 6
    assert (table[:, 0] != table[:, 1]).all()
    assert len({tensor.double().sum().item() for tensor in one.values()}) == len(one), "every parameter is drawn"
    assert len({path.stat().st_mode for path in tiny.iterdir()}) == 1, "files of any writer can be read alike"
    monkeypatch.setattr(beside, "MIDSIZE", TINY)
    with small_files(10_000):
        assert run(lambda: beside.checkpoint(tmp_path / "kept", 0).__enter__() is None) == 2
    assert capsys.readouterr().err.splitlines()[-1] == f"{tmp_path / 'kept'}: File too large"
    assert not (tmp_path / "kept").exists()


# --- Fathom alone, and beside an older commit


def test_parts_are_all_of_the_time_in_every_repetition(tmp_path, capsys):
    out = tmp_path / "out.json"
    for name, more in (("prefill", []), ("decode", ["--steps", "3"])):
        flags = ["--context", "150", "70", "--repetitions", "2", "--prefill-chunk", "64", "--json", str(out), *more]
        assert main([name, *flags]) == 0
        data = json.loads(out.read_text(encoding="utf-8"))
        (row,) = data["rows"]
        assert row["sides"] == ["150 tokens", "70 tokens"]
        assert len(row["rounds"]) == 2
        for found in (taken[context] for taken in row["rounds"] for context in row["sides"]):
            parts = {part.partition(": ")[2]: ms for part, ms in found.items() if part != "tokens/s"}
            assert {"linear", "attend, SWA", "attend, CSA", "attend, HCA", "select", OTHER} <= parts.keys()
            assert min(parts.values()) >= 0
            assert sum(parts.values()) == pytest.approx(2 * parts["all"])
            assert found["tokens/s"] == pytest.approx((1e6 if name == "prefill" else 1e3) / parts["all"])
        assert (data["settings"]["numerics"], data["settings"]["model"]) == ("deployed", "model/demo")
        assert "--model" not in data["command"]
        assert f"{name}: attend, CSA" in capsys.readouterr().out


def test_load_is_timed_cold_and_warm_beside_reading_the_files(tmp_path, monkeypatch, capsys):
    forgotten, asked = [], []
    monkeypatch.setattr(alone, "call", lambda function, *given: (asked.append(given[0]), function(*given))[1])
    monkeypatch.setattr(alone, "forget", forgotten.append)
    out = tmp_path / "out.json"
    assert main(["load", "--repetitions", "2", "--copies", str(DEMO), "--json", str(out), "--out", str(tmp_path)]) == 0
    cold, warm, copies = json.loads(out.read_text(encoding="utf-8"))["rows"]
    assert asked[:12] == 2 * [*alone.WAYS, *reversed(alone.WAYS)]
    assert list(copies["sides"]) == list(alone.COPIES) == asked[12 : 12 + len(alone.COPIES)]
    assert all(found["GB/s"] > 0 for taken in copies["rounds"] for found in taken.values())
    assert forgotten == [DEMO.resolve()] * 6
    assert [row["case"] for row in (cold, warm)] == ["cold files", "warm files"]
    assert all(found["s"] > 0 for row in (cold, warm) for taken in row["rounds"] for found in taken.values())
    for name in ("load", "prefill", "decode"):
        assert run(lambda name=name: main([name, "--model", str(tmp_path / "none")])) == 2
        assert "none" in capsys.readouterr().err.splitlines()[-1]


def test_a_worktree_has_the_files_of_its_commit_and_goes_again():
    with performance.worktree("HEAD") as (folder, commit):
        assert (folder / "model" / "config.py").is_file()
        assert len(commit) == 40
    listed = subprocess.run(["git", "worktree", "list"], cwd=ROOT, check=True, capture_output=True, text=True).stdout
    assert str(folder) not in listed
    with pytest.raises(ConfigError, match="--before no-such-commit: git knows no such commit here"):
        performance.worktree("no-such-commit").__enter__()


def test_a_profile_is_of_the_code_of_its_folder_and_covers_the_whole_run(tmp_path, monkeypatch):
    monkeypatch.setattr(performance, "BEFORE_DECODE", 40)
    asked = {"kind": "decode", "threads": 1, "decode": 2, "head": True, "seed": 0, "clock": True}
    found = performance.call(performance.profile, ROOT, DEMO, asked)
    parts = {"all", "linear", "attend, CSA", "attend, HCA", "select", "experts", OTHER}
    assert {f"token: {part}" for part in parts} <= found.keys()
    assert all(ms > 0 for name, ms in found.items() if name.startswith("token"))
    assert found["tokens/s"] == pytest.approx(1e3 / found[performance.TOKEN])
    assert performance.call(performance.profile, ROOT, DEMO, asked | {"clock": False}).keys() == {
        performance.TOKEN,
        "tokens/s",
    }
    found = performance.call(performance.profile, ROOT, DEMO, asked | {"kind": 24})
    assert 0 < found["call, s"] <= found["call: all"] / 1e3
    broken = "raise ValueError('another commit')"
    (tmp_path / "new").mkdir()
    (tmp_path / "new" / "fathom.py").write_text(broken)
    (tmp_path / "old" / "runtime").mkdir(parents=True)
    (tmp_path / "old" / "runtime" / "__init__.py").write_text(broken)
    for commit in ("new", "old"):
        with pytest.raises(ChildError, match="ValueError: another commit"):
            performance.call(performance.profile, tmp_path / commit, DEMO, asked)


def test_a_floor_is_the_bytes_of_a_token_or_what_a_call_multiplies(monkeypatch):
    """The demo: of its experts' bytes a token reads its share, by counting tensors."""
    monkeypatch.setattr(performance, "reading", lambda: 1e9)
    monkeypatch.setattr(performance, "multiplying", lambda _: 1e30)
    loaded = load_any(DEMO, RunOptions())
    config, held = loaded.model.config, loaded.held
    routed = sum(size for name, size in held.items() if ".experts." in name and "shared" not in name)
    others = sum(size for name, size in held.items() if "embed" not in name and name != "head.weight") - routed
    share = config.num_experts_per_tok / config.n_routed_experts
    found = performance.floor(DEMO, "decode")
    assert found[performance.TOKEN] == pytest.approx((others + routed * share) / 1e6, rel=1e-6)
    assert found[performance.HEAD] == pytest.approx(held["head.weight"] / 1e6)
    many = performance.floor(DEMO, 10_000)["call, s"]
    assert many == pytest.approx((others + routed) / 1e9)
    monkeypatch.setattr(performance, "multiplying", lambda _: 1e9)
    assert performance.floor(DEMO, 20_000)["call, s"] == pytest.approx(2 * performance.floor(DEMO, 10_000)["call, s"])


def test_the_estimate_is_the_layers_of_the_whole_over_two(monkeypatch):
    monkeypatch.setattr(performance, "_token_and_head", lambda _: (2e9, 1e9))

    def row(case, **measures):
        rounds = [{performance.OURS: measures}]
        return {"table": "Two layers of V4-Flash, 1 thread", "case": case, "rounds": rounds}

    token = {performance.TOKEN: 100.0, performance.HEAD: 50.0}
    rows = [row(f"after {performance.BEFORE_DECODE} tokens", **token), row("a call of 512", **{"call, s": 4.0})]
    (told,) = performance.performance_tables(SimpleNamespace(threads=[1], layers=DEMO), rows)
    assert [cells[2] for cells in told["rows"]] == ["2.2 s", "0.137 s", "86 s", "5.38 s"]
    assert "44 GB are read" in told["rows"][1][1]


# --- caches


def relative(sides):
    computed = [taken()[1] for taken in sides.values()]
    return near(9.0)(*computed)["apart"]


def test_every_way_to_hold_a_cache_computes_what_it_stands_for():
    layer = caches.CodaLayer(4, 2, 16, caches.coda_settings(16, 5, 6))
    for sides in (layer.prompt(90, 24), layer.decoding(90, 24)):
        assert list(sides) == ["coda", "package"]
        assert 0 < relative(sides)[0] < 2e-5
    for bits in (None, 8, 4):
        assert max(relative(caches.grouped_step(LAYER, 200, bits))) < caches.APART[bits]
    assert relative(caches.grouped_prompt(LAYER, 90, 32)) == [0.0]
    for ratio in (4, 128):
        shape = caches.Shared(4, 32, 2, 16, 8, 4)
        assert relative(caches.shared_step(shape, 1024, ratio, bits=8, key_bits=8))[0] < 5e-2


def test_a_long_context_is_filled_and_its_step_takes_the_scratch_of_a_short_one(monkeypatch):
    monkeypatch.setattr(caches, "SAMPLE", 100)
    monkeypatch.setattr(shard, "KEYS", 16 * LAYER.kv_heads * LAYER.d)
    for bits in (8, None):
        peaks = []
        for n in (400, 1600):
            cache = caches.shard_cache(LAYER, bits, n)
            assert cache.count == n
            token = tuple(part[:1] for part in caches.drawn(1, LAYER, seed=1))
            assert cache.attend(*token).isfinite().all()
            peaks.append(peak_bytes(partial(cache.attend, *token)))
        assert peaks[0] == peaks[1] < 64 << 10


def test_benches_of_caches_yield_what_they_name_with_denormals_flushed(monkeypatch):
    flushed, threads = [], torch.get_num_threads()
    monkeypatch.setattr(torch, "set_flush_denormal", flushed.append)
    for name, value in (("LLAMA", LAYER), ("SMALL", LAYER), ("FLASH", caches.Shared(4, 32, 2, 16, 8, 4))):
        monkeypatch.setattr(caches, name, value)
    for name, value in (("LAYER", (4, 2, 16)), ("SLOTS", (16, 4, 4)), ("BLOCK", 32)):
        monkeypatch.setattr(caches, name, value)
    args = argparse.Namespace(context=[128], seconds=0.0)
    rows = [turns.run(case) for bench in (caches.variants, caches.compare_coda) for case in bench(args)]
    assert not any(map(turns.differs, rows))
    assert [len(row["rounds"]) for row in rows] == [5] * 11
    monkeypatch.setattr(caches, "PACKAGE", "no_such_package")
    assert [(case.label, list(case.sides)) for case in caches.compare_coda(args)][1] == (
        "8 tokens after 128 (the package no_such_package is not installed)",
        ["coda"],
    )
    assert flushed == [True] * 3
    torch.set_num_threads(threads)


def test_the_limit_counts_what_a_prompt_multiplies():
    """2048 tokens: q, k, v, o, lambda, gate; scores of two streams and one sum, of 384 + 128 rows each."""
    wanted = 2048 * (1024 * (1024 + 2 * 256 + 1024 + 16 + 1) + 3 * 1024 * 512) / 1e9
    assert caches.prompt_products(2048) == wanted
