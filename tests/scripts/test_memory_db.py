"""States as a database, from argv to files: another process continues; the damaged and foreign is refused."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from fathom.kernels.formats import basis_fit
from fathom.model.llama.adapters import shapes
from fathom.runtime.basis import write_basis
from fathom.runtime.generate import prefill
from fathom.runtime.load import load_any
from fathom.runtime.merge import merge, mergeable
from fathom.runtime.options import DEMO, RunOptions
from fathom.runtime.quantised_state import load_any_state
from fathom.runtime.statefile import load_state, read_file, write_file
from fathom.runtime.text.tokenizer import Tokenizer
from fathom.scripts import generate, memory_db
from fathom.scripts.cli import run
from tests.llama_model import oracle, write_tokenizer

ROOT = Path(__file__).resolve().parents[2]
PLAIN = ("--numerics", "plain", "--dtype", "fp32")
BOUNDED = "all=coda:window=4,exact=2,summary=2,block=4"
TEXT, OTHER = "The quick brown fox jumps over it", "Sphinx of black quartz"
QUESTIONS = (" and the lazy dog", "?")


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    path = tmp_path_factory.mktemp("llama")
    model = oracle(vocab_size=264, bos_token_id=256, eos_token_id=[257, 100], num_hidden_layers=2)
    model.save_pretrained(path)
    write_tokenizer(path)
    return path


@pytest.fixture(scope="module")
def states(directory, tmp_path_factory):
    """Two bounded states, and one in full."""
    folder = tmp_path_factory.mktemp("states")
    for name, text, kv in (("a", TEXT, BOUNDED), ("b", OTHER, BOUNDED), ("full", TEXT, "all=full")):
        ingested(directory, folder / name, "--text", text, "--kv", kv)
    return folder


def command(*flags):
    return run(lambda: memory_db.main([str(flag) for flag in flags]))


def ingested(directory, out, *flags):
    report = out.with_suffix(".json")
    assert command("ingest", "--model", directory, "--out", out, "--json", report, *PLAIN, *flags) == 0
    return json.loads(report.read_text())


def asked(directory, state, tmp_path, *flags, questions=QUESTIONS):
    asks = [word for question in questions for word in ("--question", question)]
    flags = ("--model", directory, "--state", state, "--json", tmp_path / "asked.json", *asks, *flags)
    assert command("ask", *flags) == 0
    return json.loads((tmp_path / "asked.json").read_text())


def refused(capsys, *flags):
    """The one line on stderr with which the command refuses."""
    capsys.readouterr()
    assert command(*flags) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert len(captured.err.splitlines()) == 1, captured.err
    return captured.err.strip()


def greedy(loaded, text, question, count, directory):
    """What a run that never stopped says: the document in one call, the question in another, then token by token."""
    tokenizer = Tokenizer(directory, 264)
    state = loaded.model.new_state(100, 100, 1 + len(text))
    logits = prefill(loaded.model, state, [256, *tokenizer.encode_text(text)], lambda _: None)
    logits = prefill(loaded.model, state, tokenizer.encode_text(question), lambda _: None)
    tokens = [int(logits.argmax())]
    while len(tokens) < count and tokens[-1] not in (257, 100):
        logits = prefill(loaded.model, state, tokens[-1:], lambda _: None)
        tokens.append(int(logits.argmax()))
    return tokens


@pytest.mark.parametrize("kv", [BOUNDED, "all=full", "all=shard:rank=4,sinks=1,window=2", "1=coda:window=3"])
def test_answers_are_those_of_a_run_that_never_stopped(directory, tmp_path, kv, capsys):
    """For every variant, each question after the document alone, in either order; the file stays as it is."""
    state = tmp_path / "state"
    report = ingested(directory, state, "--text", TEXT, "--kv", kv)
    assert report["tokens"] == 1 + len(TEXT)
    assert report["file_bytes"] == state.stat().st_size
    assert report["full_cache_bytes"] == 34 * 2 * 2 * 2 * 8 * 4  # tokens, layers, keys and values, heads, dims, fp32
    before = state.read_bytes()
    loaded = load_any(directory, RunOptions("plain", "fp32", kv=(kv,)))
    wanted = [greedy(loaded, TEXT, question, 6, directory) for question in QUESTIONS]
    capsys.readouterr()
    data = asked(directory, state, tmp_path, "--max-new-tokens", 6)
    assert [answer["tokens"] for answer in data["answers"]] == wanted
    assert capsys.readouterr().out == "".join(f"{answer['text']}\n" for answer in data["answers"])
    turned = asked(directory, state, tmp_path, "--max-new-tokens", 6, questions=QUESTIONS[::-1])
    assert turned["answers"] == data["answers"][::-1]
    assert data["bits"] is None
    assert state.read_bytes() == before


def test_another_process_continues_bit_by_bit(directory, tmp_path):
    """Ingested there, continued here: the same bits as of a run that did both."""
    state = tmp_path / "state"
    flags = ["ingest", "--model", directory, "--out", state, *PLAIN, "--text", TEXT, "--kv", BOUNDED]
    subprocess.run([sys.executable, "-m", "scripts.memory_db", *map(str, flags)], cwd=ROOT, check=True)
    loaded = load_any(directory, RunOptions("plain", "fp32", kv=(BOUNDED,)))
    one, other = loaded.model.new_state(100, 100), loaded.model.new_state(60, 50)
    prefill(loaded.model, one, [256, *Tokenizer(directory, 264).encode_text(TEXT)], lambda _: None)
    assert load_state(state, other, loaded) is None
    for part in ([7, 8, 9, 1, 2, 3], [5], [6]):
        assert torch.equal(loaded.model(torch.tensor(part), one), loaded.model(torch.tensor(part), other))


def test_a_state_of_generate_is_asked_after_its_last_token_and_not_merged(directory, tmp_path, capsys):
    flags = ("--raw", "--prompt", TEXT, "--max-new-tokens", "3", "--kv", BOUNDED)
    run_flags = ["--model", str(directory), *PLAIN, *flags, "--save-state", str(tmp_path / "state")]
    assert generate.main([*run_flags, "--json", str(tmp_path / "run.json")]) == 0
    last = json.loads((tmp_path / "run.json").read_text())["tokens"][-1]
    data = asked(directory, tmp_path / "state", tmp_path, questions=["?"])
    assert data["answers"][0]["prompt"] == [last, ord("?") - 33]
    both = (tmp_path / "state", tmp_path / "state")
    line = refused(capsys, "merge", *both, "--model", directory, "--out", tmp_path / "out")
    assert line.startswith(f"{tmp_path / 'state'}: an answer is under way, one token is still to be run")


def test_a_bounded_state_has_one_size_and_the_report_says_so(directory, tmp_path):
    sizes = set()
    for n in (40, 200):
        (tmp_path / "document").write_text("x" * n)
        report = ingested(directory, tmp_path / "s", "--document", tmp_path / "document", "--kv", BOUNDED)
        assert report["full_cache_bytes"] == (n + 1) * 2 * 2 * 2 * 8 * 4
        sizes.add(report["cache_bytes"]["coda"])
    assert len(sizes) == 1
    assert sizes.pop() < 40 * 2 * 2 * 2 * 8 * 4


def test_v4_states_are_ingested_and_asked_too(tmp_path, capsys):
    """The demo checkpoint, with a variant of its own."""
    flags = (
        "--out",
        tmp_path / "state",
        "--kv",
        "hca=coda:window=2,exact=1,summary=1",
        "--text",
        "The capital of France",
    )
    assert command("ingest", *flags) == 0
    capsys.readouterr()
    assert command("ask", "--state", tmp_path / "state", "--question", " is", "--max-new-tokens", 1) == 0
    assert capsys.readouterr().out == " Paris\n"


def test_a_full_cache_is_told_as_it_would_be_saved(tmp_path):
    """Of a full state that is what its own file holds: not the buffers, which are larger."""
    flags = ("--out", tmp_path / "state", "--json", tmp_path / "held.json", "--text", "The capital of France is")
    assert command("ingest", *flags) == 0
    with safe_open(tmp_path / "state", "pt") as saved:
        tensors = [saved.get_tensor(name) for name in saved.keys()]  # noqa: SIM118 (no dict)
    assert json.loads((tmp_path / "held.json").read_text())["full_cache_bytes"] == sum(t.nbytes for t in tensors)


def test_a_quantised_state_is_smaller_says_what_it_is_and_answers(directory, states, tmp_path, capsys):
    sizes = {}
    for bits in (8, 4):
        flags = ("--bits", bits, "--out", tmp_path / f"{bits}", "--json", tmp_path / "q.json")
        assert command("quantise", states / "a", *flags) == 0
        sizes[bits] = json.loads((tmp_path / "q.json").read_text())
        assert sizes[bits]["file_bytes"] == (tmp_path / f"{bits}").stat().st_size
        capsys.readouterr()
        data = asked(directory, tmp_path / f"{bits}", tmp_path)
        assert (data["bits"], data["tokens"]) == (bits, 34)
        assert f"keys and values in {bits} bits" in " ".join(capsys.readouterr().err.split())
    assert sizes[8]["rows"] / sizes[8]["coded"] == 32 / 10
    assert sizes[4]["rows"] / sizes[4]["coded"] == 32 / 6
    assert sizes[4]["file_bytes"] < sizes[8]["file_bytes"] < (states / "a").stat().st_size


def test_merging_by_command_is_merging_by_hand(directory, states, tmp_path):
    before = [(states / name).read_bytes() for name in "ab"]
    out, report = tmp_path / "c", tmp_path / "c.json"
    assert command("merge", states / "a", states / "b", "--model", directory, "--out", out, "--json", report) == 0
    assert [(states / name).read_bytes() for name in "ab"] == before
    loaded = mergeable(load_any(directory, RunOptions("plain", "fp32", kv=(BOUNDED,))), "")
    first, second, found = (loaded.model.new_state(80, 80) for _ in range(3))
    load_state(states / "a", first, loaded)
    load_state(states / "b", second, loaded)
    kept = merge(loaded, first, second)
    load_any_state(out, found, loaded)
    assert found.position == first.position == 34 + 23
    for ours, theirs in zip(first.layers, found.layers, strict=True):
        assert all(torch.equal(part, theirs.tensors(57)[name]) for name, part in ours.tensors(57).items())
    data = json.loads(report.read_text())
    assert data["kept"] == kept._asdict()
    assert (data["tokens"], data["documents"]) == (57, [34, 23])
    assert asked(directory, out, tmp_path)["tokens"] == 57


def test_what_is_read_may_have_any_name_beside_the_output(states, tmp_path):
    path = tmp_path / "c.partial"
    shutil.copy(states / "a", path)
    assert memory_db.main(["quantise", str(path), "--bits", "8", "--out", str(tmp_path / "c")]) == 0
    assert path.read_bytes() == (states / "a").read_bytes()
    assert sorted(file.name for file in tmp_path.iterdir()) == ["c", "c.partial"]


def test_a_link_to_what_is_read_is_what_is_read(states, tmp_path, capsys):
    path, link = tmp_path / "a", tmp_path / "link"
    shutil.copy(states / "a", path)
    link.symlink_to(path)
    line = refused(capsys, "quantise", path, "--bits", 8, "--out", tmp_path / "c", "--json", link)
    assert line == f"--json {link}: is what STATE reads, and stays as it is"
    assert path.read_bytes() == (states / "a").read_bytes()


@pytest.fixture(scope="module")
def basis(tmp_path_factory):
    """Of the demo checkpoint: one for layers 1 and 3, none for layer 2."""
    path = tmp_path_factory.mktemp("basis") / "b.safetensors"
    g = torch.Generator().manual_seed(1)
    x = torch.randn(1000, 128, generator=g)
    x[:, :64] *= 1.1 ** -torch.arange(64)
    sample = basis_fit.Sample(x, torch.randn(16, 4, 128, generator=g), torch.ones(16, 1000, dtype=torch.bool))
    based, rotated = basis_fit.fit(sample, 64, 6, 100_000), basis_fit.fit(sample, 64, 6, 10)
    loaded = load_any(DEMO, RunOptions())
    write_basis(path, {1: based, 2: rotated, 3: based}, loaded.model.config, loaded.weights_fingerprint, 6, {})
    return path


def test_a_state_made_with_a_basis_is_asked_with_it(basis, tmp_path, capsys, monkeypatch):
    """What the file says of its basis is compared with the one named, and never opened."""
    path, out = tmp_path / "state", tmp_path / "asked.json"
    kv = ("--kv", f"all=shard:keys=6,basis={basis}")
    assert command("ingest", "--out", path, *kv, "--text", "The capital of France") == 0
    ask = ("ask", "--state", path, "--question", " is", "--max-new-tokens", 1)
    kept = load_any(DEMO, RunOptions(kv=kv[1:]))
    capsys.readouterr()
    assert command(*ask, "--basis", basis, "--json", out) == 0
    assert capsys.readouterr().out == " Paris\n"
    data = json.loads(out.read_text())
    told = [str(variant) for variant in kept.model.arithmetic.formats.variants]
    assert data["options"]["kv"] == [
        f"1,3=shard:bits=6,keys=6,basis={basis}",
        "2=shard:bits=6,keys=6",
    ]
    assert [rule.count("basis=") for rule in told] == [0, 1, 0, 1]
    assert refused(capsys, *ask) == f"{path}: made with a basis: name it with --basis"
    monkeypatch.chdir(tmp_path)
    shutil.copy(basis, tmp_path / "named")
    tensors, metadata = read_file(path)
    write_file(tmp_path / "made", tensors, metadata | {"kv": "full shard:bits=6,keys=6,basis=named full full"})
    ask = ("ask", "--state", tmp_path / "made", "--question", " is", "--max-new-tokens", 1)
    assert refused(capsys, *ask).endswith("made with a basis: name it with --basis")
    line = refused(capsys, *ask, "--basis", basis)
    assert "saved with kv 'full shard:bits=6,keys=6,basis=named full full', this run has 'full shard:" in line
    line = refused(capsys, *ask, "--basis", tmp_path / "none")
    assert line == f"{tmp_path / 'none'}: No such file or directory"


def test_a_basis_that_a_state_has_not_is_refused(basis, states, directory, capsys):
    line = refused(capsys, "ask", "--model", directory, "--state", states / "a", "--question", "?", "--basis", basis)
    assert line == f"{states / 'a'}: made without a basis, --basis is {basis}"


def test_states_of_v4_are_not_merged_and_it_is_said(tmp_path, capsys):
    path = tmp_path / "state"
    assert command("ingest", "--out", path, "--kv", "all=coda", "--text", "The capital") == 0
    line = refused(capsys, "merge", path, path, "--out", tmp_path / "c")
    assert line == f"{path}: states of DeepSeek-V4 cannot be merged, only those of Llama-family models"


@pytest.mark.parametrize(
    ("kv", "prompt", "says"),
    [
        ("all=shard:rank=4,sinks=1,window=2", "", "tells no prompt, against what its kv says"),
        (BOUNDED, "34", "tells a prompt, against what its kv says"),
        ("all=shard:rank=4,sinks=1,window=2", "33", "layers.0.shard."),
    ],
)
def test_a_made_up_prompt_is_refused(directory, tmp_path, capsys, kv, prompt, says):
    ingested(directory, tmp_path / "state", "--text", TEXT, "--kv", kv)
    tensors, metadata = read_file(tmp_path / "state")
    write_file(tmp_path / "made", tensors, metadata | {"prompt": prompt})
    line = refused(capsys, "ask", "--model", directory, "--state", tmp_path / "made", "--question", "?")
    assert line.startswith(f"{tmp_path / 'made'}: ")
    assert says in line


@pytest.mark.parametrize("coded", [False, True])
def test_made_up_content_is_refused_with_its_file_and_layer(directory, states, tmp_path, capsys, coded):
    path = states / "a"
    if coded:
        path = tmp_path / "coded"
        assert command("quantise", states / "a", "--bits", 8, "--out", path) == 0
    tensors, metadata = read_file(path)
    tensors["layers.1.coda.gates"][2] = 7
    write_file(tmp_path / "made", tensors, metadata)
    line = refused(capsys, "ask", "--model", directory, "--state", tmp_path / "made", "--question", "?")
    assert line == f"{tmp_path / 'made'}: layer 1: coda: gates of the state are not all between 0 and 1"


@pytest.mark.parametrize("coded", [False, True])
@pytest.mark.parametrize("damage", ["flipped", "truncated", "empty"])
def test_a_damaged_state_is_refused_by_every_command(directory, states, tmp_path, capsys, damage, coded):
    path, out = tmp_path / "state", tmp_path / "out"
    shutil.copy(states / "a", path)
    if coded:
        assert command("quantise", states / "a", "--bits", 8, "--out", path) == 0
    data = bytearray(path.read_bytes())
    if damage == "flipped":
        data[-5] ^= 1
    path.write_bytes(b"" if damage == "empty" else data[:-100] if damage == "truncated" else data)
    out.write_bytes(b"another file")
    flags = ("--model", directory)
    for line in (
        refused(capsys, "ask", *flags, "--state", path, "--question", "?"),
        refused(capsys, "quantise", path, "--bits", 4, "--out", out),
        refused(capsys, "merge", path, states / "b", *flags, "--out", out),
    ):
        assert line.startswith(f"{path}: ")
    assert out.read_bytes() == b"another file"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["out", "state"]


def test_a_state_of_another_model_weights_or_settings_is_refused(directory, states, tmp_path, capsys):
    other = tmp_path / "other"
    shutil.copytree(directory, other)
    oracle(vocab_size=264, bos_token_id=256, eos_token_id=[257, 100], num_hidden_layers=2, seed=1).save_pretrained(
        other
    )
    ask = ("ask", "--state", states / "a", "--question", "?")
    assert refused(capsys, *ask, "--model", other).startswith(f"{states / 'a'}: saved with weights ")
    assert refused(capsys, *ask).startswith(f"{states / 'a'}: saved with config ")  # the demo checkpoint
    adapters = tmp_path / "coda_adapters.safetensors"
    config = load_any(directory, RunOptions("plain")).model.config
    made = {f"layer_{i}.coda.{name}": torch.zeros(shape) for i in range(2) for name, shape in shapes(config).items()}
    save_file(made, adapters)
    line = refused(capsys, *ask, "--model", directory, "--coda-adapters", adapters)
    assert line.startswith(f"{states / 'a'}: saved with weights ")
    assert line.endswith("; adapters count as weights, see --coda-adapters")
    model, out = ("--model", directory), tmp_path / "out"
    for name, flags, says in (
        ("settings", ("--kv", f"{BOUNDED[:-1]}5"), "saved with kv 'coda:window=4,exact=2,summary=2,block=5 "),
        ("dtype", ("--kv", BOUNDED, "--dtype", "bf16"), "saved with dtype 'torch.bfloat16'"),
        ("adapters", ("--kv", BOUNDED, "--coda-adapters", adapters), "saved with weights "),
        ("variant", (), "saved with kv 'full full'"),
    ):
        ingested(directory, tmp_path / name, "--text", OTHER, *flags)
        line = refused(capsys, "merge", states / "a", tmp_path / name, *model, "--out", out)
        assert line.startswith(f"{tmp_path / name}: {says}")
    line = refused(capsys, "merge", states / "full", states / "full", *model, "--out", out)
    assert line.startswith(f"{states / 'full'}: layer 0 keeps full; only bounded caches")
    assert not out.exists()


def test_a_state_with_made_up_options_is_refused(directory, states, tmp_path, capsys):
    """A checksum can be made up; what a file says of its run is then still held against the model."""
    tensors, metadata = read_file(states / "a")
    for key, value, says in (
        ("dtype", "torch.int8", "dtype is 'torch.int8', want torch.bfloat16 or torch.float32"),
        ("numerics", "none", "numerics is 'none', want deployed or plain"),
        ("kv", "coda:window=4", "saved with kv 'coda:window=4', this run has 'coda:window=4,exact=64"),
        ("kv", "full full full", "saved with kv 'full full full', this run has 'full full'"),
        ("kv", "full nothing", "--kv 1=nothing: no variant 'nothing'"),
        ("kv", "full full full=coda", "--kv 2=full=coda"),
        ("position", "900", "a context of 932 positions, max_position_embeddings is 256"),
    ):
        write_file(tmp_path / "made", tensors, metadata | {key: value})
        line = refused(capsys, "ask", "--model", directory, "--state", tmp_path / "made", "--question", "?")
        assert says in line


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (("quantise", "a", "--bits", 8, "--out", "a"), "--out a: is what STATE reads, and stays as it is"),
        (("merge", "a", "b", "--out", "b"), "--out b: is what STATE reads"),
        (("quantise", "full", "--bits", 8, "--out", "c"), "full: no layer has a bounded cache"),
        (("quantise", "a", "--bits", 8, "--out", "none/c"), "none/c: cannot be written there"),
        (("ask", "--state", "none", "--question", "?"), "none: No such file or directory"),
        (("ask", "--state", "a", "--question", ""), "--question: is empty"),
        (("ask", "--state", "a", "--question", "?", "--max-new-tokens", 300), "max_position_embeddings is 256"),
        (
            ("quantise", "a", "--bits", 8, "--out", "c", "--json", "a"),
            "--json a: is what STATE reads, and stays as it is",
        ),
        (("quantise", "a", "--bits", 8, "--out", "c", "--json", "./c"), "--json c: --out writes it too"),
        (("merge", "a", "b", "--out", "c", "--json", "b"), "--json b: is what STATE reads"),
        (("merge", "a", "b", "--out", "c", "--json", "c"), "--json c: --out writes it too"),
        (("ask", "--state", "a", "--question", "?", "--json", "a"), "--json a: is what --state reads"),
        (("ask", "--state", "none", "--question", "?", "--json", "none"), "--json none: is what --state reads"),
        (("ingest", "--document", "a", "--out", "a", *PLAIN), "--out a: is what --document reads"),
        (("ingest", "--document", "a", "--out", "c", "--json", "a"), "--json a: is what --document reads"),
        (("ingest", "--text", "x", "--out", "c", "--json", "c"), "--json c: --out writes it too"),
        (("ingest", "--text", "x", "--out", "c", "--coda-adapters", "c"), "--out c: is what --coda-adapters reads"),
        (("ingest", "--text", "", "--out", "c", *PLAIN), "the prompt is empty"),
        (("ingest", "--text", "x" * 300, "--out", "c", *PLAIN), "max_position_embeddings is 256"),
        (("ingest", "--text", "x", "--out", "c"), "--numerics deployed is DeepSeek-V4's"),
    ],
)
def test_what_cannot_be_done_is_one_line(directory, states, tmp_path, monkeypatch, capsys, flags, says):
    for name in ("a", "b", "full"):
        shutil.copy(states / name, tmp_path / name)
    monkeypatch.chdir(tmp_path)
    model = () if flags[0] == "quantise" else ("--model", directory)
    assert says in refused(capsys, *flags, *model)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "b", "full"]
    for name in ("a", "b"):
        assert (tmp_path / name).read_bytes() == (states / name).read_bytes()
