"""`scripts.evaluate`: perplexity and divergence as others compute them; what shows nothing says so."""

import json
import math
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer
from torch.nn.functional import cross_entropy, kl_div

from fathom.probes import evaluation
from fathom.probes.evaluation import Run, divergence, standard_error, windows
from fathom.runtime.load import load_any
from fathom.runtime.options import DEMO, RunOptions
from fathom.runtime.text.segments import BOS
from fathom.scripts import evaluate
from fathom.scripts.cli import run
from tests import llama_model, transformers_model

TEXT = "The old clock in the hall has not told the right time since the winter of the flood. Nobody minds: né à 5 h.\n"
PLAIN = ("--numerics", "plain", "--dtype", "fp32")
BEGIN = 256  # of both models' tokenizers


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text(TEXT * 3)
    return path


@pytest.fixture(scope="module", params=["llama", "deepseek_v4"])
def checkpoint(request, tmp_path_factory):
    """A folder with a tiny random model, and the model in transformers; bytes are its tokens."""
    path = tmp_path_factory.mktemp(request.param)
    if request.param == "llama":
        theirs = llama_model.oracle(vocab_size=264, bos_token_id=256, max_position_embeddings=512)
    else:
        theirs = transformers_model.oracle((0, 4, 128, 4))
    theirs.save_pretrained(path)
    llama_model.write_tokenizer(path, **({} if request.param == "llama" else {"begin": BOS.name}))
    return path, theirs


def evaluated(tmp_path, model, text, *flags):
    out = tmp_path / "found.json"
    assert evaluate.main([*map(str, ("--model", model, "--text", text, "--json", out)), *PLAIN, *map(str, flags)]) == 0
    return json.loads(out.read_text())


def byte_ids(path):
    """Ids of a text by the tokenizer of `write_tokenizer`, by the table of the library that wrote it."""
    return Tokenizer.from_file(str(path)).encode(TEXT * 3, add_special_tokens=False).ids


@pytest.mark.parametrize(("context", "stride"), [(None, None), (100, 99), (100, 30), (80, 20)])
def test_perplexity_is_that_of_transformers(tmp_path, checkpoint, text, context, stride):
    path, theirs = checkpoint
    flags = [] if context is None else ["--context", context, "--stride", stride]
    (found,) = (data := evaluated(tmp_path, path, text, *flags))["runs"]
    ids, bos = byte_ids(path / "tokenizer.json"), BEGIN
    room = len(ids) if context is None else context - 1
    unread, nats = room - (stride or room), []
    for first in range(0, len(ids) - unread, stride or room):
        window = torch.tensor([bos, *ids[first : first + room]])
        logits = transformers_model.their_logits(theirs, window)
        nats.append(cross_entropy(logits[:-1], window[1:], reduction="none")[unread:])
    nats = torch.cat(nats).double()
    assert found["tokens"] == len(nats) == len(ids) - unread
    assert data["windows"] == len(range(0, len(ids) - unread, stride or room))
    assert found["perplexity"] == pytest.approx(math.exp(nats.mean()), rel=1e-5)
    nbytes = len((TEXT * 3).encode()) - unread
    assert found["bits_per_byte"] == pytest.approx(float(nats.sum()) / math.log(2) / nbytes, rel=1e-5)
    assert "kl" not in found


@pytest.mark.parametrize("decode", [False, True])
def test_divergence_is_that_of_two_runs_apart(tmp_path, checkpoint, text, decode):
    path, theirs = checkpoint
    llama = theirs.config.model_type == "llama"
    kv = "all=coda:window=8,exact=4,summary=4" + (",block=8" if llama else "")
    flags = ["--kv", kv, "--stride", 40, "--prefill-chunk", 16, *(["--decode"] if decode else [])]
    full, found = evaluated(tmp_path, path, text, *flags)["runs"]
    logits = []
    for rules in ((), (kv,)):
        model = load_any(path, RunOptions("plain", "fp32", prefill_chunk=16, kv=rules)).model
        ids = torch.tensor([BEGIN, *byte_ids(path / "tokenizer.json")])
        read, state = len(ids) - 41, model.new_state(len(ids), 16)
        rest = [1] * 40 if decode else [16] * 2 + [8]
        sizes = [16] * (read // 16) + [read % 16] * (read % 16 > 0) + rest
        logits.append(torch.cat([model.logits(model(part, state)) for part in ids[:-1].split(sizes)])[-40:].double())
    wanted = kl_div(logits[1].log_softmax(-1), logits[0].log_softmax(-1), reduction="none", log_target=True).sum(-1)
    assert found["kl"] == pytest.approx(float(wanted.mean()), rel=1e-4)
    assert found["kl_worst"] == pytest.approx(float(wanted.max()), rel=1e-4)
    assert found["kl_worst_token"] == len(ids) - 1 - 40 + int(wanted.argmax())
    assert found["same_likeliest"] == float((logits[0].argmax(-1) == logits[1].argmax(-1)).double().mean())
    ratio = math.exp(cross_entropy(logits[1], ids[-40:]) - cross_entropy(logits[0], ids[-40:]))
    assert found["perplexity_ratio"] == pytest.approx(ratio, rel=1e-4)
    assert found["perplexity"] == pytest.approx(full["perplexity"] * ratio, rel=1e-4)
    assert sum(found["cache_bytes"].values()) < sum(full["cache_bytes"].values())
    assert not found["exact_layers"] or not llama


def test_a_run_against_itself_differs_by_nothing_and_is_vacuous(tmp_path, checkpoint, text, capsys):
    path, _ = checkpoint
    flags = ("--against", "--numerics plain", "--run", "--prefill-chunk 512")
    full, same = evaluated(tmp_path, path, text, *flags)["runs"]
    assert (same["kl"], same["kl_worst"], same["perplexity_ratio"], same["same_likeliest"]) == (0, 0, 1, 1)
    assert full["perplexity"] == same["perplexity"]
    assert "--prefill-chunk 512: VACUOUS, its flags are those of the reference" in capsys.readouterr().out


def test_a_variant_that_has_done_nothing_is_told(tmp_path, checkpoint, text, capsys):
    path, theirs = checkpoint
    llama = theirs.config.model_type == "llama"
    layers = list(range(3)) if llama else [1, 2, 3]
    runs = ("--run", "--kv all=coda:window=400", "--run", "--kv all=coda:window=9,exact=2,summary=2")
    _, idle, busy = evaluated(tmp_path, path, text, *runs, "--prefill-chunk", 64)["runs"]
    assert idle["exact_layers"] == idle["varied_layers"] == layers
    assert busy["exact_layers"] == ([] if llama else [2]), "two entries of 128 tokens fit any window"
    assert idle["kl"] < 1e-9 < busy["kl"]
    told = capsys.readouterr().out
    nothing = "no scored token saw anything evicted or compressed"
    assert f"--kv all=coda:window=400: VACUOUS, {nothing}" in told
    assert "window=400: its caches take no less than the reference's" in told
    assert told.count("VACUOUS") == 1
    assert (f"window=9,exact=2,summary=2: {nothing} in layers 2" in told) == (not llama)


def test_what_is_evicted_behind_the_last_call_was_seen_by_nobody(tmp_path, checkpoint, text):
    """A call, or a block of one, attends before it evicts."""
    path, theirs = checkpoint
    block = ",block=333" if theirs.config.model_type == "llama" else ""
    kv = ("--kv", f"all=coda:window=9,exact=2,summary=2{block}")
    _, whole = evaluated(tmp_path, path, text, *kv)["runs"]
    assert whole["exact_layers"] == whole["varied_layers"]
    assert whole["kl"] < 1e-9


def test_shard_compresses_the_prompt_and_streams_what_is_scored(tmp_path, text):
    """As long as a prompt is read it is held exactly: without one there is a stream alone."""
    model = tmp_path / "model"
    llama_model.oracle(vocab_size=264, bos_token_id=256, max_position_embeddings=512).save_pretrained(model)
    llama_model.write_tokenizer(model)
    kv = ("--kv", "all=shard:rank=8,sinks=2,window=8")
    _, alone = evaluated(tmp_path, model, text, *kv, "--tokens", 60)["runs"]
    _, after = evaluated(tmp_path, model, text, *kv, "--tokens", 60, "--stride", 20)["runs"]
    assert alone["exact_layers"] == after["exact_layers"] == []
    assert 0 < alone["kl"] < after["kl"], "8 bits of every column lose less than 4 bits of 8 components"
    _, idle = evaluated(tmp_path, model, text, *kv, "--tokens", 10)["runs"]
    assert idle["exact_layers"] == [0, 1, 2]
    assert idle["kl"] < 1e-9


def test_runs_may_differ_by_numerics_dtype_and_backend(tmp_path, text, capsys):
    flags = ("--run", "--dtype bf16", "--run", "--ops reference", "--run", "--numerics deployed --dtype bf16")
    full, rounded, other, deployed = evaluated(tmp_path, DEMO, text, "--tokens", 80, *flags)["runs"]
    assert full["name"] == "full cache"
    assert [one["name"] for one in (rounded, other, deployed)] == list(flags[1::2])
    assert 0 < other["kl"] < 1e-8 < rounded["kl"] < deployed["kl"]
    assert (other["ops"], rounded["ops"]) == ("reference", "cpu")
    assert deployed["options"]["numerics"] == "deployed"
    narrow = ("--numerics", "deployed", "--dtype", "bf16", "--run", "--entry-format fp8 --key-format fp4")
    _, stored = evaluated(tmp_path, DEMO, text, "--tokens", 80, *narrow)["runs"]
    assert stored["kl_worst"] == 0
    assert "--entry-format fp8 --key-format fp4: every distribution is the reference's, to the bit" in (
        capsys.readouterr().out
    )


def test_a_run_alone_says_that_nothing_was_compared(tmp_path, text, capsys):
    assert len(evaluated(tmp_path, DEMO, text, "--tokens", 20)["runs"]) == 1
    assert "Nothing is compared" in capsys.readouterr().out


def test_an_error_is_of_means_of_stretches():
    """Neighbours that are copies of each other tell nothing new: the error is that of a 16th as many."""
    drawn = torch.randn(32, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    assert standard_error(drawn.repeat_interleave(16)) == pytest.approx(float(drawn.std() / 32**0.5))
    assert standard_error(torch.zeros(31)) is None


def test_divergence_is_of_the_second_from_the_first():
    """``sum p log(p / q)``: 0.9 log(0.9 / 0.5) + 0.1 log(0.1 / 0.5), which the other direction is not."""
    one, other = torch.tensor([[0.9, 0.1]]).log(), torch.tensor([[0.5, 0.5]]).log()
    assert divergence(one, other).item() == pytest.approx(0.368064, abs=1e-6)
    assert divergence(other, one).item() == pytest.approx(0.510826, abs=1e-6)
    assert divergence(torch.tensor([[0.0, -math.inf]]), other).item() == pytest.approx(math.log(2))


def test_windows_score_every_token_behind_the_first_prompt_once():
    for before in ([7], []):
        for tokens, context, stride in ((50, 20, 20), (50, 20, 6), (50, 60, 60), (50, 60, 10), (9, 8, 1)):
            made = windows(range(100, 100 + tokens), before, context, stride)
            scored = [token for window in made for token in window.ids[-window.scored :]]
            unread = min(context - len(before), tokens) - min(stride, context - len(before), tokens)
            first = unread if before or unread else 1
            if before or unread:
                assert scored == list(range(100 + first, 100 + tokens))
            else:  # the first token of a window without BOS is predicted by nothing
                assert scored == [token for window in made for token in window.ids[1:]]
            assert all(len(window.ids) <= context and window.ids[: len(before)] == before for window in made)


def test_logits_are_made_in_pieces(monkeypatch):
    monkeypatch.setattr(evaluation, "PIECE", 3 * 1024)
    model = load_any(DEMO, RunOptions()).model
    shapes, logits = [], model.logits
    monkeypatch.setattr(model, "logits", lambda hidden: shapes.append(len(hidden)) or logits(hidden), raising=False)
    made = windows(range(300, 340), [0], 41, 40)
    evaluation.compare([Run("run", model, 16)], made, lambda _: None)
    assert max(shapes) == 3
    assert sum(shapes) == 40


@pytest.mark.parametrize(
    ("content", "flags", "says"),
    [
        (b"", (), "text: the text is empty"),
        (b" Paris", (), "text: a text of one token, want two or more"),
        (b"\xff\xfe", (), "text: "),
        (b"a b", ("--context", "2000000"), "--context 2000000: the model has 1048576 positions"),
        (b"a b", ("--context", "2"), "--context 2: want 3 tokens or more"),
        (b"a b c d", ("--stride", "9"), "--stride 9: of"),
        (b"a b", ("--run", "--kv all=none"), 'the run "--kv all=none": --kv all=none: no variant'),
        (b"a b", ("--run", "--kvx 1"), '--run "--kvx 1": unrecognized arguments: --kvx 1'),
        (b"a b", ("--run", "--dtype fp8"), '--run "--dtype fp8": argument --dtype: invalid choice'),
        (b"a b", ("--against", "--kv 'all"), """--against "--kv 'all": No closing quotation"""),
        (b"a b", ("--run", "--kv all=shard:basis=nowhere"), "nowhere: No such file or directory"),
        (b"a b", ("--run", "--coda-adapters nowhere"), "nowhere: No such file or directory"),
    ],
)
def test_bad_input_is_one_line(tmp_path, capsys, content, flags, says):
    path = tmp_path / "text"
    path.write_bytes(content)
    assert run(lambda: evaluate.main(["--text", str(path), *flags])) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    (line,) = captured.err.splitlines()
    assert says in line
    assert Path(path).read_bytes() == content


# --- pages


def test_the_page_has_every_run_once(tmp_path, text):
    evaluated(tmp_path, DEMO, text, "--tokens", 200, "--kv", "all=shard:bits=4", "--out", tmp_path / "page")
    page = (tmp_path / "page" / "evaluate.md").read_text()
    data = json.loads((tmp_path / "page" / "evaluate.json").read_text())
    assert data == json.loads((tmp_path / "found.json").read_text())
    assert page.count("| --kv all=shard:bits=4 | ") == 1
    assert f"{data['runs'][1]['kl']:.0e}"[:1] in page
    assert "![Divergence against bytes](evaluate-divergence-against-bytes.svg)" in page
    assert "python -m scripts.evaluate --model model/demo --text text.txt" in page
    assert str(tmp_path) not in page


# --- codes in a long text


def test_codes_are_found_by_the_demo_and_lost_by_a_small_cache(tmp_path, capsys):
    out = tmp_path / "found.json"
    kv = "--kv all=coda:window=8,exact=2,summary=2"
    flags = ["--needle", "--lengths", "256,512", "--needles", "6", "--documents", "1", "--prefill-chunk", "64"]
    flags += ["--run", kv, "--run", "--kv all=coda:window=600", "--json", str(out), "--out", str(tmp_path / "page")]
    assert evaluate.main([*flags, *PLAIN]) == 0
    data = json.loads(out.read_text())
    full, small, idle = data["runs"]
    assert data["text"] == "documents of the demo language"
    assert full["questions"] == small["questions"] == len(full["answers"]) == 12
    assert full["written"] == full["told_apart"] == idle["written"] == 1 > small["written"]
    assert sum(small["cache_bytes"].values()) < sum(full["cache_bytes"].values())
    assert idle["exact_layers"] == idle["varied_layers"] == [1, 2, 3]
    said = capsys.readouterr().out
    assert "12 codes told in 2 documents of 256, 512 tokens: 100.0 % by full cache" in said
    assert "--kv all=coda:window=600: VACUOUS" in said
    assert said.count("VACUOUS") == 1
    page = (tmp_path / "page" / "evaluate.md").read_text()
    assert page.count("![Codes found, ") == 3
    assert f"| {kv} | " in page


def test_a_model_that_finds_nothing_is_vacuous(tmp_path, checkpoint, capsys):
    """Whatever its tokenizer; and a text may be given, if it is long enough."""
    path, theirs = checkpoint
    long = tmp_path / "long.txt"
    long.write_text(TEXT * 30)
    flags = ["--model", str(path), "--needle", "--lengths", "400", "--needles", "2", "--documents", "1", *PLAIN]
    for more in ([], ["--text", str(long)]):
        assert evaluate.main([*flags, *more]) == 0
        assert "full cache: VACUOUS, tells apart" in capsys.readouterr().out
    long.write_text(TEXT)
    assert run(lambda: evaluate.main([*flags, "--text", str(long)])) == 2
    assert "the text ends" in capsys.readouterr().err
    most = theirs.config.max_position_embeddings
    assert run(lambda: evaluate.main([*flags, "--lengths", "9999"])) == 2
    assert f"--lengths 9999: the model has {most} positions" in capsys.readouterr().err
