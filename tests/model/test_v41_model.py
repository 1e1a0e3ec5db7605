"""DeepSeek-V4.1 run here: against DeepSeek's own tensors, against the oracle, and against itself in other calls."""

import json
from array import array
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from fathom.kernels.ops import CPU, REFERENCE
from fathom.model.attention import Attention
from fathom.model.choices import DSPARK
from fathom.model.config import ModelConfig
from fathom.model.draft import Drafts
from fathom.model.engram import table_primes
from fathom.model.errors import ConfigError, StateError
from fathom.model.hyper import HyperConnection
from fathom.model.observe import sites
from fathom.model.observe.observer import listening
from fathom.model.v41 import DelayedConnection, EntryMaker, KeyMaker, WindowAttention
from fathom.probes.subject import Subject
from fathom.probes.ways import record
from fathom.runtime.drafting import drafting
from fathom.runtime.load import load
from fathom.runtime.options import RunOptions
from fathom.runtime.plan.rehearsal import _of_layers as rehearsed
from fathom.runtime.statefile import load_state, save_state
from fathom.scripts import calibrate_kv, compare, generate, make_checkpoint, plan, probe
from fathom.scripts import record as record_command
from fathom.scripts.cli import run_alone

GOLDEN = Path(__file__).parents[2].parent / "shared" / "data" / "v41" / "golden"  # 11 MB, not in the repository
PUBLISHED = Path(__file__).parent / "data" / "DeepSeek-V4.1-Flash.json"
TOKENS = 150  # more than the 64 entries that candidates hold
IDS = [0, *torch.randint(16, 1000, (TOKENS - 1,), generator=torch.Generator().manual_seed(7)).tolist()]


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    out = tmp_path_factory.mktemp("small") / "v41"
    assert make_checkpoint.main(["--small-v41", "--out", str(out)]) == 0
    return out


def loaded(directory, numerics="deployed", dtype="bf16", ops=CPU):
    return load(directory, RunOptions(numerics, dtype, prefill_chunk=TOKENS), ops, context=TOKENS)


@pytest.fixture(scope="module")
def model(small):
    return loaded(small).model


def run(model, lengths, state=None, ids=IDS):
    """Logits of tokens that come in calls of these lengths."""
    state = model.new_state(TOKENS, max(lengths)) if state is None else state
    first, found = state.position, []
    for length in lengths:
        tokens = torch.tensor(ids[state.position : state.position + length])
        found.append(model.logits(model(tokens, state)))
    assert state.position == first + sum(lengths)
    return torch.cat(found)


# --- DeepSeek's own tensors


@pytest.mark.skipif(not GOLDEN.is_dir(), reason="DeepSeek's tensors are not beside this repository")
@pytest.mark.parametrize("ops", [REFERENCE, CPU], ids=lambda ops: ops.name)
def test_logits_are_theirs(ops):
    theirs = load_file(GOLDEN / "golden_plain.safetensors")
    model, tokens = loaded(GOLDEN, "plain", "fp32", ops).model, theirs["tokens"].long()
    ours = model.logits(model(tokens, model.new_state(TOKENS, TOKENS)))
    wanted = theirs["logits"].float()
    assert float((ours - wanted).norm() / wanted.norm()) < 1e-5  # fp32 through nine layers, theirs in float64


@pytest.mark.skipif(not GOLDEN.is_dir(), reason="DeepSeek's tensors are not beside this repository")
@pytest.mark.parametrize(("numerics", "dtype"), [("deployed", "bf16"), ("plain", "fp32")])
def test_a_run_of_their_model_is_judged_right(tmp_path, capsys, numerics, dtype):
    tokens = load_file(GOLDEN / "golden_plain.safetensors")["tokens"].tolist()
    judged(GOLDEN, tokens, numerics, dtype, tmp_path, capsys)


def own_draft(golden, theirs, ops):
    """What the head of our run drafts where DeepSeek's did, and what it heard of calls of several sizes."""
    tokens, slots = theirs["tokens"].tolist(), theirs["draft.tokens"].tolist()
    options = RunOptions("plain", "fp32", prefill_chunk=TOKENS, draft=DSPARK, draft_tokens=len(slots) - 1)
    loaded = load(golden, options, ops, context=TOKENS)
    model, head = loaded.model, loaded.head
    listener, state = head.listener(3), model.new_state(TOKENS, TOKENS)
    with listening(model, {sites.STREAMS: listener}):
        for part in (tokens[:40], tokens[40:41], tokens[41:]):
            model(torch.tensor(part), state)
    following = [*tokens, slots[0]][-model.config.sliding_window - 1 :]
    return head.draft(listener, following, len(tokens), len(slots) - 1, head.new_state(3))


@pytest.mark.skipif(not GOLDEN.is_dir(), reason="DeepSeek's tensors are not beside this repository")
@pytest.mark.parametrize("ops", [REFERENCE, CPU], ids=lambda ops: ops.name)
def test_a_draft_is_theirs(ops):
    theirs = load_file(GOLDEN / "golden_plain.safetensors")
    drafts = own_draft(GOLDEN, theirs, ops)
    assert drafts.tokens == theirs["draft.tokens"].tolist()[1:]
    for ours, wanted in ((drafts.logits, theirs["draft.logits"]), (drafts.confidence, theirs["draft.confidence"])):
        assert float((ours - wanted).norm() / wanted.norm()) < 1e-5


def test_a_text_is_the_same_with_drafts(small, tmp_path):
    texts = {}
    for draft in ("off", "lookup", "dspark", "auto"):
        told = tmp_path / f"{draft}.json"
        asked = ["--prompt", "Hello", "--max-new-tokens", "24", "--json", str(told), "--draft", draft]
        assert generate.main(["--model", str(small), *asked]) == 0
        texts[draft] = json.loads(told.read_text())
    assert len({tuple(text["tokens"]) for text in texts.values()}) == 1
    assert {texts[draft]["drafts"]["drafter"] for draft in ("dspark", "auto")} == {"dspark"}


@pytest.mark.parametrize("targets", [[0, 2, 3], [2, 1, 3]])
def test_a_head_that_reads_what_is_not_heard_is_refused(small, tmp_path, capsys, targets):
    """Streams that enter the first layer, and such as n-grams are added to, are behind no layer."""
    copy = tmp_path / "copy"
    copy.mkdir()
    for file in small.iterdir():
        (copy / file.name).symlink_to(file)
    obj = json.loads((small / "config.json").read_text())
    obj["text_config"]["dspark_target_layer_ids"] = targets
    (copy / "config.json").unlink()
    (copy / "config.json").write_text(json.dumps(obj))
    asked = ["--model", str(copy), "--prompt", "a", "--max-new-tokens", "1"]
    assert run_alone(lambda: generate.main([*asked, "--draft", "dspark"])) == 2
    assert "streams that enter layers [0, 1, 4] are not heard here" in capsys.readouterr().err
    assert generate.main(asked) == 0


def test_a_draft_that_stands_for_an_image_ends_the_drafts(small):
    loaded = load(small, RunOptions(draft=DSPARK, draft_tokens=4), CPU, context=TOKENS)
    by, image = drafting(loaded_options := RunOptions(draft=DSPARK, draft_tokens=4), loaded.head), 1025
    assert loaded.model.config.of_images == (image,)
    assert by.most == loaded_options.draft_tokens
    by.drafter.head.draft = lambda *_: Drafts([5, image, 6], torch.zeros(3, 8), torch.full((3,), 9.0))
    with by.listening(loaded.model):
        loaded.model(torch.tensor(IDS[:9]), loaded.model.new_state(TOKENS, TOKENS))
        assert by.drafter(array("q", IDS[:10]), 4) == [5]


def test_a_head_is_rehearsed_where_it_reads(small):
    """All layers of a V4.1 are: what the head reads of them stays where it is."""
    config = ModelConfig.from_file(small / "config.json")
    config = replace(config, dspark=replace(config.dspark, target_layer_ids=(3, 6, 2)))
    assert rehearsed(config, [*range(config.num_hidden_layers)]).dspark == config.dspark


def test_a_head_is_planned(small, capsys):
    assert plan.main(["--model", str(small), "--device", "cpu", "--context", "1000", "--draft", "dspark"]) == 0
    assert "draft head" in capsys.readouterr().out


# --- the oracle


def judged(directory, tokens, numerics, dtype, folder, capsys, *flags):
    """What `compare` says of a recording by `record`, in calls of 40 and then token by token, with all steps."""
    (folder / "ids.json").write_text(json.dumps(tokens))
    out = folder / "own.safetensors"
    how = ["--numerics", numerics, "--dtype", dtype, "--prefill-chunk", "40", "--decode-from", str(len(tokens) - 5)]
    given = ["--model", str(directory), "--tokens", str(folder / "ids.json"), "--out", str(out), "--steps"]
    assert record_command.main([*given, *how, *flags]) == 0
    report = folder / "report.json"
    status = compare.main(["--model", str(directory), "--recording", str(out), "--json", str(report)])
    said = json.loads(report.read_text())
    assert status == 0, capsys.readouterr().out[-2000:]
    sites = load_file(out)
    assert {site.split(".", 2)[2] for site in sites if "engram" in site} == {
        "engram.rows", "engram.gate", "engram.streams",
    }  # fmt: skip
    assert any(site.endswith("indexer.candidates") for site in sites)
    return said


@pytest.mark.parametrize(("numerics", "dtype", "ops"), [("deployed", "bf16", "cpu"), ("plain", "fp32", "reference")])
def test_a_run_is_judged_right_at_every_site_and_step(small, tmp_path, capsys, numerics, dtype, ops):
    said = judged(small, IDS, numerics, dtype, tmp_path, capsys, "--ops", ops)
    statuses = {site["status"] for site in said["sites"]}
    assert statuses == {"agrees"}
    assert len(said["sites"]) > 300


class Normed(WindowAttention):
    """As V4 does it."""

    query = Attention.query


class Undelayed(DelayedConnection):
    """As V4 does it."""

    def read_by(self, pre, streams, norm):
        del pre
        return HyperConnection.read(self, streams, norm)


class Rotated(EntryMaker):
    """Hands on what is rotated already."""

    def make(self, x, call, cache, keys):
        first = []
        right = keys.row

        def row(latent, call, start, ratio):
            first.append(start)
            return right(self.row(latent, call, start, ratio), call, start, ratio)

        keys.row = row
        super().make(x, call, cache, keys)
        keys.row = right
        assert first, "no entry was made"


class Turned(KeyMaker):
    """With V4's Hadamard transform."""

    def stored(self, rows):
        return self.arithmetic.ops.round_index(rows, 32)


def as_class(parts, kind):
    for part in parts:
        part.__class__ = type(kind.__name__, (kind, type(part)), {}) if kind is Normed else kind


FAULTS = {
    "query-head-normed": lambda model: as_class([block.attention for block in model.blocks], Normed),
    "mhc-undelayed": lambda model: as_class(
        [part for block in model.blocks for part in (block.attention_streams, block.experts_streams)], Undelayed
    ),
    "index-key-of-rotated": lambda model: as_class([model.blocks[n].attention.compressor for n in (2, 4, 5)], Rotated),
    "hadamard-kept": lambda model: as_class([model.blocks[n].attention.indexer.compressor for n in (2, 4, 5)], Turned),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_of_the_run_is_named(small, tmp_path, capsys, name):
    model = loaded(small).model
    FAULTS[name](model)
    out, report = tmp_path / "wrong.safetensors", tmp_path / "report.json"
    with model.observer.unchecked():
        record(model, IDS, [TOKENS], out)
    assert compare.main(["--model", str(small), "--recording", str(out), "--json", str(report)]) == 1
    capsys.readouterr()
    said = json.loads(report.read_text())
    assert said["faults"][0]["name"] == name, said["first"]


# --- itself


@pytest.fixture(scope="module")
def plain(small):
    return loaded(small, "plain", "fp32").model


@pytest.mark.parametrize("lengths", [[64, 64, 22], [7] * 21 + [3], [149, 1], [1] * 40 + [110]])
def test_calls_of_any_size_give_the_same_logits(plain, lengths):
    """To what sums in another order leave: an attention adds up its window and its entries by call, as V4's does."""
    apart = run(plain, lengths) - (wanted := run(plain, [TOKENS]))
    assert float((apart.norm(dim=1) / wanted.norm(dim=1)).max()) < 1e-5


@pytest.mark.parametrize("lengths", [[64, 64, 22], [7] * 21 + [3], [1] * TOKENS])
def test_calls_of_any_size_agree_as_deployed(small, model, tmp_path, capsys, lengths):
    """Every site and layer, each from what passed before it."""
    files = [tmp_path / "one.safetensors", tmp_path / "many.safetensors"]
    for out, calls in zip(files, ([TOKENS], lengths), strict=True):
        record(model, IDS, calls, out)
    asked = ["--model", str(small), "--recording", str(files[0]), "--against", str(files[1])]
    assert compare.main(asked) == 0, capsys.readouterr().out[-1000:]


def test_candidates_restrict_a_later_layer(model):
    """So that the runs above go through `select_open`."""
    state = model.new_state(TOKENS, TOKENS)
    call = model.call(torch.tensor(IDS), 0)
    model.run(torch.tensor(IDS), call, state)
    size, count = model.config.v41.candidate_block_size, model.config.v41.candidate_blocks
    assert call.candidates.shape == (TOKENS, count)
    opened, chosen = call.candidates[-1].long(), call.selected[7][-1].long()
    assert {*(chosen[chosen >= 0] // size).tolist()} <= {*opened.tolist()}
    assert (TOKENS - 1) // size in opened  # the newest block, whatever its score
    free = call.selected[5][-1].long()
    assert not {*(free[free >= 0] // size).tolist()} - {*range(-(-TOKENS // size))}


def test_tokens_taken_back_leave_nothing(model):
    lengths, wrong = [90, 1, 1, 1], [15, 16, 17]
    state = model.new_state(TOKENS, 90, rewind=3)
    run(model, [90], state)
    for token in wrong:
        model(torch.tensor([token]), state)
    state.rewind(90)
    again = run(model, [1, 1, 1], state)
    assert again.equal(run(model, lengths)[90:])


@pytest.mark.parametrize("position", [1, 2, 89])
def test_a_saved_state_goes_on(small, tmp_path, position):
    whole = loaded(small)
    state = whole.model.new_state(TOKENS, TOKENS)
    run(whole.model, [position], state)
    save_state(tmp_path / "state", state, whole, None)
    put_back = whole.model.new_state(TOKENS, TOKENS)
    load_state(tmp_path / "state", put_back, whole)
    rest = [TOKENS - position]
    assert run(whole.model, rest, put_back).equal(run(whole.model, rest, state))


# --- commands, and what is refused


def test_a_prompt_is_answered(small, capsys):
    asked = ["--model", str(small), "--think", "--effort", "4.1:30", "--prompt", "Hello", "--max-new-tokens", "4"]
    assert generate.main(asked) == 0
    assert "answer  4 tokens" in capsys.readouterr().err


def test_the_plan_of_the_published_model(tmp_path, capsys):
    out = tmp_path / "plan.json"
    asked = ["--config", str(PUBLISHED), "--device", "cpu", "--context", "65536", "--memory-gib", "8"]
    assert plan.main([*asked, "--json", str(out)]) == 0
    assert "fp4" in capsys.readouterr().out
    told = json.loads(out.read_text())
    tables = ModelConfig.from_file(PUBLISHED).v41.engram
    in_layers = sum(tables.rows) * (tables.head_dim + tables.head_dim // 32)  # values, and a scale for 32 of them
    assert in_layers < told["weights"]["n-grams"]["stored"] < 1.01 * in_layers
    assert told["needed"] < 2 << 30 < in_layers  # they are no memory of the process


WRONG = {
    "--effort preview:max": (generate, ["--think", "--effort", "preview:max", "--prompt", "a"], "want 4.1:LEVEL"),
    "--effort 4.1:0": (generate, ["--think", "--effort", "4.1:0", "--prompt", "a"], "from 1 to 100"),
    "--kv": (generate, ["--kv", "all=shard", "--prompt", "a"], "--kv all=shard is not built for DeepSeek-V4.1"),
    "--draft": (generate, ["--draft", "mtp", "--prompt", "a"], "has DSpark, see --draft dspark"),
    "--entry-format": (generate, ["--entry-format", "fp8", "--prompt", "a"], "--entry-format fp8 is not built"),
    "--device": (generate, ["--device", "cuda", "--prompt", "a"], "--device cuda is not built"),
    "--ranks": (plan, ["--device", "cpu", "--ranks", "2"], "a run on 2 ranks is not built for DeepSeek-V4.1"),
    "--ranks of a context": (plan, ["--device", "cpu", "--ranks", "2", "--context", "1000"], "a run on 2 ranks is not"),
    "plan": (plan, [], "--device cuda is not built for DeepSeek-V4.1; --device cpu is"),
    "probe": (probe, ["mhc", "--inject", "relu-dropped"], "it is put into a DeepSeek-V4, this is a V4.1"),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_is_not_built_is_refused(small, capsys, name):
    command, flags, said = WRONG[name]
    assert run_alone(lambda: command.main(["--model", str(small), *flags])) == 2
    told = capsys.readouterr().err
    assert said in told
    assert len(told.strip().splitlines()) == 1


def test_a_probe_of_v4_says_that_it_is_none_of_v41(small, capsys):
    assert probe.main(["quantisation", "--model", str(small)]) == 1
    assert "it is not built for DeepSeek-V4.1" in capsys.readouterr().out


def test_a_basis_is_refused(small, tmp_path, capsys):
    out = tmp_path / "basis.safetensors"
    assert run_alone(lambda: calibrate_kv.main([str(small), "--out", str(out)])) == 2
    assert "a basis is of --kv, which is not built for DeepSeek-V4.1" in capsys.readouterr().err


def test_an_answer_ends_where_an_image_would_begin(small, tmp_path, capsys):
    """A copy of the model in which the id that is chosen first stands for an image."""
    asked = ["--prompt", "Hello", "--max-new-tokens", "6", "--json", str(tmp_path / "told.json")]
    assert generate.main(["--model", str(small), *asked]) == 0
    tokens = json.loads((tmp_path / "told.json").read_text())["tokens"]
    copy = tmp_path / "copy"
    copy.mkdir()
    for file in small.iterdir():
        (copy / file.name).symlink_to(file)
    config = json.loads((small / "config.json").read_text())
    config["image_token_id"] = tokens[2]
    (copy / "config.json").unlink()
    (copy / "config.json").write_text(json.dumps(config))
    assert generate.main(["--model", str(copy), *asked]) == 0
    ended = json.loads((tmp_path / "told.json").read_text())["tokens"]
    assert ended == tokens[: tokens.index(tokens[2]) + 1]
    capsys.readouterr()


def test_a_state_of_another_tokenizer_is_refused(small, tmp_path, monkeypatch):
    whole = loaded(small)
    state = whole.model.new_state(TOKENS, TOKENS)
    run(whole.model, [5], state)
    save_state(tmp_path / "state", state, whole, None)
    other = whole.model.alike.roll(1).tolist()  # as of a tokenizer.json with as many numbers
    monkeypatch.setattr("fathom.runtime.load.numbers_of", lambda *_: other)
    again = loaded(small)
    with pytest.raises(StateError, match="saved with weights"):
        load_state(tmp_path / "state", again.model.new_state(TOKENS, TOKENS), again)


def test_an_image_is_not_run_as_text(model):
    with pytest.raises(ConfigError, match="stands for a part of an image"):
        model(torch.tensor([model.image]), model.new_state(TOKENS, TOKENS))


def test_a_tokenizer_of_another_model_is_refused(small, tmp_path):
    for file in small.iterdir():
        (tmp_path / file.name).symlink_to(file)
    config = json.loads((small / "config.json").read_text())
    config["text_config"]["engram_compressed_vocab_size"] -= 1
    (tmp_path / "config.json").unlink()
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match="ids spell unlike, engram_compressed_vocab_size is"):
        loaded(tmp_path)


def test_tables_of_other_sizes_are_refused(small):
    config = ModelConfig.from_file(small / "config.json")
    assert config.v41 is not None
    tables = config.v41.engram
    assert [sum(primes) for primes in table_primes(tables)] == list(tables.rows)


def test_drawn_tokens_are_text(small):
    subject = Subject(small, RunOptions())
    image = subject.config.v41.image_token_id
    drawn = subject.tokens(20_000)
    assert image not in drawn
    assert {*range(subject.config.vocab_size)} - {*drawn} == {image}


@pytest.mark.slow  # a minute
def test_probes_that_are_built_for_it_pass(small, capsys):
    assert probe.main(["all", "--model", str(small), "--quick"]) == 0
    said = capsys.readouterr().out
    assert "transformers has no DeepSeek-V4.1" in said
