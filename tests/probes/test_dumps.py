"""Dumps of other runtimes, made from transformers' modules under those runtimes' names, judged without any map."""

import copy
import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers.model_debugging_utils import model_addition_debugger_context

from fathom.model.config import ModelConfig
from fathom.model.errors import ConfigError
from fathom.model.rounding import ROUNDINGS
from fathom.probes.judge import naming
from fathom.probes.judge.recording import Recording
from fathom.probes.subject import Subject
from fathom.probes.verdict import judge
from fathom.runtime.options import DEMO
from fathom.scripts import compare
from tests import dumps
from tests.probes.transformers_faults import KNOWN

TOKENS = 150  # one HCA window


@pytest.fixture(scope="module")
def tokens() -> Tensor:
    return torch.tensor(Subject().tokens(TOKENS))


def made(form: str, model: Any, tokens: Tensor, tmp_path: Path, lengths: tuple[int, ...] = ()) -> list[str]:
    """A dump, and the flags that name it."""
    ids = tmp_path / "ids.json"
    ids.write_text(json.dumps(tokens.tolist()))
    path = dumps.FORMS[form](tmp_path / form, dumps.run(model, tokens, lengths or (len(tokens),)))
    return ["--recording", str(path), *(["--tokens", str(ids)] if form in dumps.WITHOUT_TOKENS else [])]


def compared(flags: list[str], tmp_path: Path) -> tuple[int, dict[str, Any]]:
    out = tmp_path / "verdict.json"
    status = compare.main([*flags, "--json", str(out)])
    return status, json.loads(out.read_text())


# How many sites of the demo each form has, at least: of SWA, CSA, HCA, CSA, and of the whole model.
SITES = {"huggingface": 118, "debugger": 60, "msprobe": 100, "sglang": 80, "atom": 40, "ds4": 70, "llama_cpp": 66}


@pytest.mark.parametrize("form", list(dumps.FORMS))
def test_a_healthy_dump_agrees(form, healthy, tokens, tmp_path):
    status, report = compared(made(form, healthy, tokens, tmp_path), tmp_path)
    assert report["verdict"] == "agrees"
    assert status == 0
    assert report["counts"]["differs"] == report["counts"]["not judged"] == 0
    assert len(report["sites"]) >= SITES[form]


def test_what_transformers_debugger_writes_agrees(healthy, tokens, tmp_path):
    """Its own code, which the dumps made by hand follow."""
    model, folder = copy.deepcopy(healthy), tmp_path / "d"
    shown = {"debug_path": str(folder), "do_prune_layers": False, "use_repr": False}
    with model_addition_debugger_context(model, **shown), torch.inference_mode():
        model(tokens[None], use_cache=False)
    status, report = compared(["--recording", str(folder)], tmp_path)
    assert (status, report["verdict"]) == (0, "agrees")
    assert len(report["sites"]) >= SITES["debugger"]


CHUNKS = (70, 62, 1, 1, 16)  # no multiples of a window; two tokens alone


@pytest.mark.parametrize("form", [form for form in dumps.FORMS if form not in dumps.ONE_CALL])
def test_calls_of_a_prompt_are_put_together(form, healthy, tokens, tmp_path):
    status, report = compared(made(form, healthy, tokens, tmp_path, CHUNKS), tmp_path)
    assert (status, report["verdict"], report["tokens"]) == (0, "agrees", TOKENS)
    assert len(report["sites"]) >= SITES[form] - 8  # weights of the softmax have other columns in several calls


def test_ranks_are_put_together(healthy, tokens, tmp_path):
    path = dumps.sglang(tmp_path / "two", dumps.run(healthy, tokens, (100, 50)), ranks=2)
    status, report = compared(["--recording", str(path)], tmp_path)
    assert (status, report["verdict"], report["tokens"]) == (0, "agrees", TOKENS)
    assert len(report["sites"]) >= SITES["sglang"] - 8


def test_numpy_and_torch_files_of_hugging_faces_names(healthy, tokens, tmp_path):
    calls = dumps.run(healthy, tokens, (TOKENS,))
    torch.save({"input_ids": tokens[None], **calls[0].hooks}, tmp_path / "run.pt")
    dumps.numpy_file(tmp_path / "run.npz", calls)
    config = ModelConfig.from_file(DEMO / "config.json")
    known = [
        set(Recording(path, config).tensors)
        for path in (tmp_path / "run.npz", tmp_path / "run.pt", dumps.huggingface(tmp_path / "run.safetensors", calls))
    ]
    assert known[0] == known[1] == known[2]
    assert len(known[0]) == SITES["huggingface"]


@pytest.mark.parametrize("form", ["huggingface", "sglang", "ds4"])
@pytest.mark.parametrize("name", ["compressed-keys-unrotated", "route-scale-dropped"])
def test_a_fault_in_a_dump_is_named(form, name, healthy, tmp_path):
    tokens = torch.tensor(Subject().tokens(280))  # a second HCA entry, whose rotation turns
    put = next(put for put in KNOWN if put.name == name)
    model = copy.deepcopy(healthy)
    put.put(model)
    status, report = compared(made(form, model, tokens, tmp_path), tmp_path)
    assert status == 1
    assert (report["first"]["layer"], report["first"]["site"].split(".")[0]) == (put.layer, put.sublayer)
    assert (report["faults"][0]["name"], report["faults"][0]["explains"]) == (name, True)


# --- what is refused, in one line that names the culprit

CONFIG = ModelConfig.from_file(DEMO / "config.json")
IDS = torch.arange(12)


class Command:
    """Something that an archive may hold and that must not be made."""

    def __reduce__(self) -> tuple[Any, ...]:
        return (Path("/nowhere").mkdir, ())


def sglang_file(folder: Path, name: str, value: Any, step: int = 0) -> Path:
    folder.mkdir(exist_ok=True, parents=True)
    path = folder / f"step={step}___rank=0___dump_index=1___name={name}___recompute_status=disabled.pt"
    torch.save({"value": value, "meta": {}}, path)
    return path


def test_what_is_no_dump_is_refused(tmp_path):
    (tmp_path / "empty").mkdir()
    (tmp_path / "text").mkdir()
    (tmp_path / "raw.md").write_text("x")
    (tmp_path / "notes.txt").write_text("x")
    (tmp_path / "text" / "notes.txt").write_text("x")
    (tmp_path / "cut.pt").write_bytes(b"PK\x03\x04 cut off")
    torch.save({"input_ids": IDS, "run": Command()}, tmp_path / "run.pt")
    (tmp_path / "raw_attn_norm-0_pos0.bin").write_bytes(b"123")
    for name, said in {
        "empty": "no file of tensors in it",
        "text": "no file of tensors in it",
        "cut.pt": "cannot be read as tensors alone",
        "run.pt": "cannot be read as tensors alone",
        "raw": "3 bytes, want a multiple of 4",
        "absent": "No such file",
        "ra": "No such file",
        "notes.txt": "no file of tensors: want .safetensors, .pt",
    }.items():
        with pytest.raises(ConfigError, match=said) as refused:
            Recording(tmp_path / name, CONFIG, tokens=IDS)
        assert name in str(refused.value)
        assert "\n" not in str(refused.value)


def test_dumps_of_two_runs_are_not_mixed(tmp_path):
    for run in ("dump_1", "dump_2"):
        sglang_file(tmp_path / run, "input_ids", IDS)
        sglang_file(tmp_path / run, "non_intrusive__model.embed_tokens.output", torch.randn(12, 128))
    with pytest.raises(ConfigError, match=r"of 2 dumps, name one of them: .*dump_1.*dump_2"):
        Recording(tmp_path, CONFIG)
    assert list(Recording(tmp_path / "dump_2", CONFIG).tensors) == ["embedded"]
    torch.save({"model.embed_tokens": torch.randn(12, 128)}, tmp_path / "dump_2" / "another.pt")
    with pytest.raises(ConfigError, match=r"files of SGLang's dumper, and 'another\.pt', which is none of them"):
        Recording(tmp_path / "dump_2", CONFIG)


def test_a_prompt_is_known_or_asked_for(tmp_path):
    torch.randn(12, 128).numpy().tofile(tmp_path / "d_attn_norm-0_pos0.bin")
    with pytest.raises(ConfigError, match=r"has no tensor tokens.*--tokens"):
        Recording(tmp_path / "d", CONFIG)
    assert list(Recording(tmp_path / "d", CONFIG, tokens=IDS).tensors) == ["layers.0.attention.input"]
    with pytest.raises(ConfigError, match=r"no site among its tensors.*d_attn_norm-0.*in no way.*of 11 tokens"):
        Recording(tmp_path / "d", CONFIG, tokens=IDS[:11])
    torch.save({"input_ids": IDS, "model.embed_tokens": torch.randn(12, 128)}, tmp_path / "r.pt")
    with pytest.raises(ConfigError, match=r"its 12 tokens are not the 12 of --tokens.*at position 0"):
        Recording(tmp_path / "r.pt", CONFIG, tokens=IDS + 1)


def test_calls_of_another_prompt_are_left_out(tmp_path):
    for step, ids in enumerate((IDS[:5], IDS, IDS + 12)):
        sglang_file(tmp_path / "d", "input_ids", ids, step)
        sglang_file(tmp_path / "d", "positions", torch.arange(len(ids)), step)
        sglang_file(tmp_path / "d", "non_intrusive__model.embed_tokens.output", torch.full((len(ids), 128), 0.5), step)
    last, given = Recording(tmp_path, CONFIG), Recording(tmp_path, CONFIG, tokens=IDS)
    assert torch.equal(last.tokens, IDS + 12)
    assert torch.equal(given.tokens, IDS)
    assert given.told[-1].startswith("1 of 3 calls are taken as the prompt, 12 tokens; the others, of 5, 12 tokens")
    with pytest.raises(ConfigError, match="none of its 3 calls is of the tokens that --tokens has"):
        Recording(tmp_path, CONFIG, tokens=IDS + 1)


def test_a_tensor_of_other_sizes_is_left_out_and_said_so(tmp_path):
    tensors = {"input_ids": IDS, "model.embed_tokens": torch.randn(12, 128), "model.layers.0": torch.randn(12, 4, 96)}
    torch.save({**tensors, "model.layers.9": torch.randn(12, 4, 128)}, tmp_path / "r.pt")
    found = Recording(tmp_path / "r.pt", CONFIG)
    assert list(found.tensors) == ["embedded"]
    why = {line.theirs: line.why for line in found.lines if not line.site}
    assert "in no way [t s hidden] = [12, 4, 128]" in why["model.layers.0"]
    assert "beyond the model's 4" in why["model.layers.9"]


@pytest.mark.parametrize("table", naming.tables().values(), ids=lambda table: table.name)
def test_a_table_is_of_known_sites_and_says_where_it_was_read(table):
    known = {*naming.SHAPES, *naming.WHOLE}
    assert {rule.site for rule in table.rules} <= known
    assert all(rule.ranks in naming.RANKS for rule in table.rules)
    assert re.search(r"\d", table.read_from)


def test_the_judgement_in_python(healthy, tokens):
    (call,) = dumps.run(healthy, tokens, (TOKENS,))
    verdict = judge({"input_ids": tokens, **call.hooks}, DEMO, layers=[1])
    assert (verdict.verdict, verdict.first, verdict.faults) == ("agrees", None, [])
    assert {one.layer for one in verdict.sites} == {1}
    assert verdict.not_exercised
    few = judge({"input_ids": tokens, "model.layers.1.output": call.hooks["model.layers.1.output"]}, DEMO, layers=[1])
    assert any(warning.startswith("Bounds are as wide as ") for warning in few.warnings)
    hooks = dict(call.hooks)
    hooks["model.layers.1.mlp.output"] = hooks["model.layers.1.mlp.output"] * 1.5
    how = {"layers": [1], "identify_seconds": 0, "numerics": "plain", "dtype": "bf16", "rows": 8}
    verdict = judge({"input_ids": tokens, **hooks}, DEMO, **how)
    assert verdict.verdict == "differs"
    assert 8 <= max(one.rows for one in verdict.sites) <= 12
    assert verdict.rounding == ROUNDINGS["plain"]
    with pytest.raises(ConfigError, match="fp8: no dtype of a run"):
        judge({"input_ids": tokens, **hooks}, DEMO, dtype="fp8")
    assert (verdict.first.layer, verdict.first.site) == (1, "experts.output")


def test_a_step_is_judged_from_the_site_before_it(healthy, tmp_path):
    """Gate and up exchanged: both differ, from the experts' input and ids."""
    tokens = torch.tensor(Subject().tokens(140))
    (call,) = dumps.run(healthy, tokens, (140,))
    path = dumps.llama_cpp(tmp_path / "healthy", [call])
    assert compared(["--recording", str(path)], tmp_path)[0] == 0
    swapped = {layer: torch.cat(x.chunk(2, -1)[::-1], -1) for layer, x in call.halves.items()}
    path = dumps.llama_cpp(tmp_path / "swapped", [call._replace(halves=swapped)])
    status, report = compared(["--recording", str(path), "--layers", "1"], tmp_path)
    assert status == 1
    differing = [one["site"] for one in report["sites"] if one["status"] == "differs"]
    assert differing[:2] == ["experts.gate", "experts.up"]


def test_nothing_is_written_into_a_dump(tmp_path):
    sglang_file(tmp_path / "d", "input_ids", IDS)
    with pytest.raises(ConfigError, match=r"--json .*/d/v.json: lies in .*/d, which --recording reads"):
        compare.main(["--recording", str(tmp_path / "d"), "--json", str(tmp_path / "d" / "v.json")])
