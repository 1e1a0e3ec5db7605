"""`generate`, `logits` and `probe` on several ranks: what they write is that of one, and a rank that dies is named."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from fathom.model.errors import ConfigError
from fathom.runtime.group.failures import RUNNING
from fathom.runtime.options import DEMO
from fathom.scripts import compare, generate, logits, record
from tests.by_hand import ROOT, ByHand

GENERATE = "scripts.generate"
# So hot that the next EOS of this seed is hundreds of tokens away.
ENDLESS = ("--raw", "--prompt", "The", "--temperature", "5", "--max-new-tokens", "5000")
# From there on, the console holds torchrun's own report, which names ranks too.
OF_TORCHRUN = "Traceback (most recent call last):"


def torchrun(n, *command):
    """Run a command under torchrun; returns the finished process and the lines of the console that are ours."""
    words = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(n), "-m", *command]
    done = subprocess.run(
        words, capture_output=True, text=True, check=False, cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": "1"}
    )
    ours = done.stderr.partition(OF_TORCHRUN)[0].splitlines()
    return done, [line for line in ours if not line.startswith(("W1", "W0", "E1", "E0"))]


def test_two_ranks_say_what_one_says_and_say_it_once(tmp_path, capsys):
    flags = ("--prompt", "What is the capital of France?", "--json")
    assert generate.main([*flags, str(tmp_path / "alone")]) == 0
    alone = json.loads((tmp_path / "alone").read_text())
    done, _ = torchrun(2, GENERATE, *flags, str(tmp_path / "both"))
    assert done.returncode == 0, done.stderr
    assert done.stdout == capsys.readouterr().out == alone["text"] + "\n"
    assert done.stderr.count("ran on") == 1
    both = json.loads((tmp_path / "both").read_text())
    same = ("tokens", "prompt", "message", "position", "weights_fingerprint", "config_fingerprint", "cache_bytes")
    assert {name: both[name] for name in same} == {name: alone[name] for name in same}
    ranks = both["ranks"]
    assert ranks["count"] == 2
    assert ranks["calls_by_tokens"] == {"all": len(both["tokens"]), "own": 0}
    assert ranks["replicated"] == []
    assert (ranks["experts"], alone["ranks"]["experts"], both["options"]["experts"]) == ("rows", None, "auto")
    assert ranks["experts_because"] == "no link between ranks is known of this device, to estimate times with"
    assert max(ranks["weight_bytes"]) < alone["ranks"]["weight_bytes"][0] < sum(ranks["weight_bytes"])
    assert len(ranks["peak_memory_bytes"]) == 2
    assert all(touched > 0 for touched in ranks["file_bytes_touched"])
    assert len(ranks["file_bytes_touched"]) == 2


def test_what_two_ranks_record_is_held_against_one(tmp_path, capsys):
    """A fault between ranks is one of theirs, at the site that it touches."""
    (tmp_path / "ids").write_text(json.dumps([0, *range(7, 70)]))
    flags = ("--tokens", str(tmp_path / "ids"), "--decode-from", "60", "--numerics", "plain", "--out")
    assert record.main([*flags, str(tmp_path / "alone")]) == 0
    for name, more in (("two", ()), ("wrong", ("--inject", "sinks-of-rank-0"))):
        done, _ = torchrun(2, "scripts.record", *flags, str(tmp_path / name), *more)
        assert done.returncode == 0, done.stderr
        assert "tensors of 64 tokens from 5 calls" in done.stderr
    against = ("--recording", str(tmp_path / "alone"), "--no-identify", "--against")
    assert compare.main([*against, str(tmp_path / "two")]) == 0
    capsys.readouterr()
    assert compare.main([*against, str(tmp_path / "wrong"), "--json", str(tmp_path / "said")]) == 1
    said = json.loads((tmp_path / "said").read_text())
    assert (said["first"]["layer"], said["first"]["site"]) == (0, "attention.mixed")
    assert "It is --against that is wrong." in capsys.readouterr().out
    with pytest.raises(ConfigError, match=r"^--inject sinks-of-rank-0: it acts between ranks alone"):
        record.main([*flags, str(tmp_path / "no"), "--inject", "sinks-of-rank-0"])


def test_two_ranks_draft_alike(tmp_path):
    """And as one does."""
    flags = ("--raw", "--prompt", "The old farmer carried a letter to the town. " * 4, "--max-new-tokens", "24")
    flags = (*flags, "--draft", "lookup", "--json")
    assert generate.main([*flags, str(tmp_path / "alone")]) == 0
    done, _ = torchrun(2, GENERATE, *flags, str(tmp_path / "both"))
    assert done.returncode == 0, done.stderr
    alone, both = (json.loads((tmp_path / name).read_text()) for name in ("alone", "both"))
    assert {name: both[name] for name in ("tokens", "drafts")} == {name: alone[name] for name in ("tokens", "drafts")}
    assert sum(both["drafts"]["accepted"]) > 0


def test_two_ranks_run_token_ids_of_a_model_without_a_tokenizer(tmp_path):
    folder, ids = tmp_path / "mute", tmp_path / "ids.json"
    folder.mkdir()
    for path in DEMO.iterdir():
        if path.name != "tokenizer.json":
            (folder / path.name).symlink_to(path)
    ids.write_text(json.dumps([5, *range(300, 340), *range(300, 320)]))
    flags = ("--tokens", str(ids), "--max-new-tokens", "12", "--json")
    assert generate.main([*flags, str(tmp_path / "alone")]) == 0
    both = (*flags, str(tmp_path / "both"), "--model", str(folder), "--draft", "lookup")
    done, _ = torchrun(2, GENERATE, *both)
    assert done.returncode == 0, done.stderr
    alone, told = (json.loads((tmp_path / name).read_text()) for name in ("alone", "both"))
    assert done.stdout == " ".join(map(str, alone["tokens"])) + "\n"
    assert (told["tokens"], told["text"]) == (alone["tokens"], None)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (("--prompt", ""), "the prompt is empty"),
        (("--prompt", "a", "--model", "nowhere"), "nowhere/config.json: No such file or directory"),
        (("--prompt", "a", "--json", "/proc/x"), "/proc/x: cannot be written there (No such file or directory)"),
        (("--prompt", "a", "--rank-timeout", "1"), "argument --rank-timeout: 1: want at least 2 seconds"),
    ],
)
def test_a_user_error_is_one_line(flags, said):
    done, ours = torchrun(2, GENERATE, *flags)
    assert done.returncode == 1
    assert done.stdout == ""
    assert [line for line in ours if said in line] == ours[-1:]
    assert len(ours) == 1


@pytest.mark.slow
def test_experts_columns_that_do_not_divide_are_refused():
    done, ours = torchrun(3, GENERATE, "--prompt", "a")
    assert (done.returncode, done.stdout) == (1, "")
    assert [line.partition(": ")[2] for line in ours] == [
        "3 ranks: moe_intermediate_size, columns of SwiGLU: 128, which 3 does not divide"
    ]


@pytest.mark.slow
def test_a_broken_environment_is_one_line_for_each_process(tmp_path):
    with ByHand(tmp_path, 2, GENERATE, "--prompt", "a", MASTER_PORT="no") as run:
        assert run.statuses()[0] == [2, 2]
        assert run.console == ["environment: MASTER_PORT='no': want 1 to 65535"] * 2


def rows_matter():
    """Whether torch's product of each token with its own keys depends, on this machine, on how many heads it has."""
    draw = torch.Generator().manual_seed(0)
    q, keys = torch.randn(146, 4, 128, generator=draw), torch.randn(146, 16, 128, generator=draw)
    return not (q @ keys.mT)[:, :2].equal(q[:, :2].contiguous() @ keys.mT)


@pytest.mark.slow
@pytest.mark.parametrize("tokens", ["all", "own"])
def test_logits_are_written_once_and_are_those_of_one_rank(tmp_path, tokens):
    (tmp_path / "tokens").write_text(json.dumps([2, *range(5, 150)]))
    flags = ("--tokens", str(tmp_path / "tokens"), "--decode-from", "140", "--rank-tokens", tokens, "--out")
    done, _ = torchrun(2, "scripts.logits", *flags, str(tmp_path / "both"))
    assert done.returncode == 0, done.stderr
    assert logits.main([*flags, str(tmp_path / "alone")]) == 0
    alone, both = load_file(tmp_path / "alone")["logits"], load_file(tmp_path / "both")["logits"]
    if rows_matter():  # as README says; a rounding of bf16 then falls to the other side here and there
        assert (both - alone).abs().max() <= 2.0**-6 * alone.abs().max()
        assert (both.argmax(1) == alone.argmax(1)).float().mean() > 0.95
    else:
        assert both.equal(alone)
    assert done.stderr.count("logits [146, ") == 1
    assert not list(tmp_path.glob("*.partial"))


@pytest.mark.slow
def test_a_state_saved_on_two_ranks_goes_on_alone_and_the_other_way(tmp_path):
    flags = ("--raw", "--prompt", "The old farmer")
    straight = tmp_path / "straight"
    assert generate.main([*flags, "--max-new-tokens", "12", "--json", str(straight)]) == 0
    tokens = json.loads(straight.read_text())["tokens"]

    def run(ranks, name, *more):
        command = [*more, "--json", str(tmp_path / name)]
        if ranks == 1:
            assert generate.main(command) == 0
        else:
            assert torchrun(ranks, GENERATE, *command)[0].returncode == 0
        return json.loads((tmp_path / name).read_text())["tokens"]

    for first, second in ((2, 1), (1, 2)):
        state = str(tmp_path / f"state {first}")
        begun = run(first, "begun", *flags, "--max-new-tokens", "7", "--save-state", state)
        assert begun + run(second, "rest", "--load-state", state, "--max-new-tokens", "5") == tokens


@pytest.mark.slow
def test_a_probe_writes_its_page_once(tmp_path):
    done, _ = torchrun(2, "scripts.probe", "attention", "load", "--quick", "--out", str(tmp_path))
    assert done.returncode == 1, "asked for by name, a probe that cannot run fails"
    lines = done.stdout.splitlines()
    assert [line.split()[:2] for line in lines if line[0] != " "][:2] == [["pass", "attention"], ["vacuous", "load"]]
    assert "it runs on one rank, and there are 2" in lines[1]
    assert "torchrun --nproc-per-node 2 -m scripts.probe attention --quick" in (tmp_path / "attention.md").read_text()
    assert done.stderr.count("wrote ") == 2


# --- a rank that dies


def in_prefill(run):
    heartbeat = run.heartbeat(0)
    return heartbeat is not None and heartbeat.phase == RUNNING and heartbeat.collectives > 50


def in_decode(run):
    return len(run.out(0)) > 40


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("when", [in_prefill, in_decode])
def test_a_rank_that_is_killed_is_named_and_the_other_ends(tmp_path, when, rank):
    (tmp_path / "long").write_text("The old farmer carried a letter to the town. " * 2000)
    flags = ("--raw", "--prompt-file", str(tmp_path / "long")) if when is in_prefill else ENDLESS
    with ByHand(tmp_path, 2, GENERATE, *flags, store="test") as run:
        run.until(lambda: when(run))
        run.send(signal.SIGKILL, rank)
        statuses, seconds = run.statuses()
        assert statuses[rank] == -signal.SIGKILL
        assert statuses[1 - rank] == 1
        assert seconds < 10, "of 60"
        assert len(run.console) == 1, run.console
        assert run.console[0].startswith(f"rank {rank} died or was stopped, last seen at collective ")
        assert (run.out(0) == "") == (when is in_prefill)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "ranks", "statuses", "told"),
    [
        (signal.SIGINT, (0, 1), [130, 130], "interrupted"),
        (signal.SIGSTOP, (1,), [1, -9], "rank 1 died or was stopped"),  # rank 0 is blocked: no exception reaches it
    ],
)
def test_a_run_that_ends_in_prefill_leaves_no_half_written_file(tmp_path, number, ranks, statuses, told):
    (tmp_path / "tokens").write_text(json.dumps([5] * 40_000))
    flags = ("--tokens", str(tmp_path / "tokens"), "--out", str(tmp_path / "logits"), "--rank-timeout", "4")
    with ByHand(tmp_path, 2, "scripts.logits", *flags, store="test") as run:
        run.until(lambda: in_prefill(run))
        assert list(tmp_path.glob(".fathom-*.partial"))
        run.send(number, *ranks)
        found, seconds = run.statuses(stopped=ranks if number == signal.SIGSTOP else ())
        assert found == statuses
        assert seconds < 8
        assert len(run.console) == 1
        assert run.console[0].startswith(told)
        assert not list(tmp_path.glob(".fathom-*"))
        assert not (tmp_path / "logits").exists()


@pytest.mark.slow
def test_torchrun_and_a_rank_that_is_killed(tmp_path):
    """Here it is the launcher that ends the others and names the dead one; ours say nothing."""
    words = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "-m", GENERATE, *ENDLESS]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    with (tmp_path / "err").open("wb") as err:
        run = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=err, cwd=ROOT, env=env)
    try:
        assert len(run.stdout.read(40)) == 40
        second = int(Path(f"/proc/{run.pid}/task/{run.pid}/children").read_text().split()[1])
        os.kill(second, signal.SIGKILL)
        assert run.wait(15) == 1
    finally:
        run.kill()
        run.stdout.close()
    said = (tmp_path / "err").read_text()
    assert f"exitcode  : -9 (pid: {second})" in said
    assert "rank      : 1 (local_rank: 1)" in said
    assert "died" not in said
