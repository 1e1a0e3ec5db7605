"""The load probe: its reading of files, its watch on reads, and that it sees what is not loaded, not read, not used."""

import dataclasses

import pytest
import torch
from safetensors.torch import save_file

from fathom.model.checkpoint.tensor_mapping import Form, Slice, TensorMapping
from fathom.model.moe import Gate
from fathom.probes import load
from fathom.probes.fault import Fault
from fathom.probes.faults import FAULTS
from fathom.probes.finding import Verdict
from fathom.probes.load import Files, Load, Reads, census_findings, without_effect
from fathom.probes.probe import run_probe, silent
from fathom.probes.shared.held import find
from fathom.probes.subject import Subject
from fathom.runtime.options import RunOptions
from tests.make_checkpoint import fp4, fp8, nvfp4, tiny_config, write_checkpoint

DIFFER = "numbers that differ from the file's"
UNREAD = "parameters not read whole in a run"
GOT = "routed experts that got a token, share"


def measured(fault=None, probe=load.QUICK, **subject):
    return run_probe(probe, Subject(fault=fault, **subject), silent).report


def failures(report):
    return {(finding.what, finding.layer): finding for finding in report.findings if finding.failed}


def local(**what):
    return Fault("local", "a fault of this test", "", **what)


# --- the oracle


def test_each_form_decodes_as_it_was_written(tmp_path):
    values = torch.randn(160, 192, generator=torch.Generator().manual_seed(0))
    stack, ids = values.view(2, 80, 192).clone(), torch.arange(12).view(4, 3)
    tensors = {"bf16": values.bfloat16(), "f32": values, "ids": ids, "stack": stack}
    tensors["fp8"], scale = fp8(values)
    tensors |= {"fp8.f32": scale, "fp8.e8m0": scale.to(torch.float8_e8m0fnu)}
    tensors["small"], scale = fp8(values, 32)
    tensors["small.e8m0"] = scale.to(torch.float8_e8m0fnu)
    tensors["fp4"], tensors["fp4.scale"] = fp4(values)
    tensors["nvfp4"], tensors["nvfp4.scale"], tensors["nvfp4.global"] = nvfp4(values)
    save_file(tensors, tmp_path / "model.safetensors")
    files = Files(tmp_path)
    assert files.data_bytes == sum(tensor.nbytes for tensor in tensors.values())

    def rows(start, stop, *bound, **more):
        return files.numbers(TensorMapping(*bound, **more), start, stop)

    assert torch.equal(rows(3, 9, Form.F32, "f32"), values[3:9].double())
    assert torch.equal(rows(3, 9, Form.BF16, "bf16"), values[3:9].bfloat16().double())
    assert rows(1, 3, Form.I64, "ids").tolist() == [[3, 4, 5], [6, 7, 8]]
    assert torch.equal(rows(2, 4, Form.F32, "stack", part=Slice(1, 10, 20)), values[92:94].double())
    # at most half a step of the format from what was written: 2^-4 of E4M3, a sixth of the largest of E2M1's
    for form, name, scales, block in (
        (Form.FP8_F32, "fp8", "fp8.f32", 128),
        (Form.FP8, "fp8", "fp8.e8m0", 128),
        (Form.FP8, "small", "small.e8m0", 32),
    ):
        found = torch.cat([rows(*part, form, name, scales, block=block) for part in ((0, 128), (128, 160))])
        torch.testing.assert_close(found, values.double(), rtol=2**-4, atol=1e-3)
    for form, width, room in ((Form.FP4, 32, 3), (Form.NVFP4, 16, 5)):
        names = ("fp4", "fp4.scale") if form is Form.FP4 else ("nvfp4", "nvfp4.scale", "nvfp4.global")
        blocks = values.abs().unflatten(1, (-1, width)).amax(2).repeat_interleave(width, 1)
        assert ((rows(0, 160, form, *names) - values).abs() <= blocks / room).all()


def test_nibbles_and_blocks_by_hand(tmp_path):
    scale = torch.tensor([[2.0, 0.5]]).to(torch.float8_e8m0fnu)
    data = torch.zeros(1, 32, dtype=torch.int8)
    data[0, 0], data[0, 31] = 0x71, 0x2F  # 0.5 then 6; -6 then 1
    save_file({"w": data, "w.scale": scale}, tmp_path / "model.safetensors")
    row = Files(tmp_path).numbers(TensorMapping(Form.FP4, "w", "w.scale"), 0, 1)[0]
    assert row[[0, 1, 62, 63]].tolist() == [1, 12, -3, 0.5]
    assert not row[2:62].any()


# --- reads


def test_a_view_is_no_read_and_what_is_made_of_it_is():
    a, b, c, d = torch.ones(4, 6), torch.ones(4, 6), torch.ones(4, 6), torch.ones(4, 6)
    with Reads({"a": a, "b": b, "c": c, "d": d}) as reads:
        a[:2].view(12)
        a.T.to(torch.float32)  # already is: the same tensor
        torch.zeros_like(a)
        b[:2].double()
        b[1:3].view(torch.int32).sum()
        c[torch.tensor([3])]
        torch.zeros(2, 6).copy_(d[2:])
    assert [reads.share(name) for name in "abcd"] == [0, 0.75, 1, 0.5]


def test_a_read_reaches_into_all_that_it_covers():
    stack = torch.ones(3, 8)
    with Reads({str(i): row for i, row in enumerate(stack)}) as reads:
        stack[0:2, 4:].sum()
    assert [reads.share(name) for name in "012"] == [0.5, 1, 0]


def test_what_launches_are_given_is_read(tmp_path):
    """As on a GPU, where torch sees of a launch but where its arguments lie. Sinks that none is given are not read."""
    triton = pytest.importorskip("fathom.kernels.triton_ops", reason="Triton is not on every platform").TRITON
    config = tiny_config(compress_ratios=[4, 0], num_hidden_layers=2, n_routed_experts=4)
    write_checkpoint(tmp_path, config, seed=1)

    def unread(ops):
        subject, ran = Subject(tmp_path, ops=ops), load.Ran()
        names = list(subject.load().census.mappings)
        load.watch(subject.model, names, subject.tokens(6), 512, ran)
        return ran.unread

    def without_sinks(*given):
        return triton.attend(*given[:-1], torch.zeros(4))

    assert unread(triton) == []
    lost = [f"layers.{layer}.attn.attn_sink (0% read)" for layer in range(2)]
    assert unread(triton._replace(attend=without_sinks)) == lost


# --- the probe


def test_a_census_that_misses_something():
    loaded, files = Subject().load(), Files(Subject().directory)
    mappings = dict(loaded.census.mappings)
    del mappings["layers.1.attn.indexer.compressor.ape"]
    mappings["layers.0.attn.wkv.weight"] = mappings["layers.2.attn.wkv.weight"]
    short = dataclasses.replace(loaded.census, mappings=mappings, nbytes=loaded.census.nbytes - 4096)
    found = {finding.what: finding for finding in census_findings(short, files, loaded.model.config)}
    assert all(finding.failed for finding in found.values())
    lost = found["stored tensors that are neither used nor ignored"].evidence["first"]
    wkv = ["layers.0.attn.wkv.scale", "layers.0.attn.wkv.weight"]
    assert lost == [*wkv, "layers.1.attn.indexer.compressor.ape"]
    assert found["parameters bound"].measured == 209
    assert found["bytes accounted for"].measured == 3517012 - 4096


def test_the_demo_passes():
    report = measured()
    assert not report.failed, failures(report)
    whole = next(finding for finding in report.findings if finding.what == "parameters bound")
    assert whole.measured == 210


@pytest.mark.parametrize(
    ("name", "finding", "layers", "parameter"),
    [
        ("indexer-compressor-not-loaded", DIFFER, {1, 3}, "attn.indexer.compressor.wkv.weight"),
        ("fp4-nibbles-swapped", DIFFER, {0, 1, 2, 3}, "ffn.experts.0.w1.weight"),
        ("scales-shifted", DIFFER, {0, 1, 2, 3}, "ffn.experts.0.w1.weight"),
        ("parameter-uninitialised", DIFFER, {3}, "ffn_norm.weight"),
        ("hash-table-zeroed", DIFFER, {0}, "ffn.gate.tid2eid"),  # although a tripwire ends the run
        ("rank-0-sinks", UNREAD, {None}, "attn.attn_sink"),
    ],
)
def test_faults_are_named(name, finding, layers, parameter):
    failed = failures(measured(FAULTS[name]))
    assert {layer for what, layer in failed if what == finding} == layers
    for layer in layers:
        assert parameter in str(failed[finding, layer].evidence["first"])


def test_one_number_is_enough():
    def inject(model):
        norm = model.blocks[2].attention.kv_norm.clone()
        norm[77] = torch.nextafter(norm[77], torch.tensor(9.0))
        model.blocks[2].attention.kv_norm = norm

    ((place, finding),) = failures(measured(local(inject=inject))).items()
    assert place == (DIFFER, 2)
    assert finding.measured == 1
    assert "kv_norm.weight [77] is" in finding.evidence["first"][0]


def test_a_decoding_op_is_judged_with_what_it_is_given():
    """The bytes are right, the op's reading of them is not."""

    def scaled(ops):
        def grouped_linear(x, weight, groups):
            return ops.grouped_linear(x, weight, groups).roll(1, dims=1)

        return ops._replace(grouped_linear=grouped_linear)

    failed = failures(measured(local(ops=scaled)))
    assert "wo_a" in failed[DIFFER, 0].evidence["first"][0]


class Elsewhere(Gate):
    def __call__(self, x, tokens):
        del tokens
        return self.arithmetic.ops.gate(x, self.weight, self.elsewhere, None, self.k, self.scale)


def test_what_no_object_holds():
    def inject(model):
        gate = model.blocks[1].experts.gate
        gate.elsewhere, gate.bias = gate.bias, None
        gate.__class__ = Elsewhere

    failed = failures(measured(local(inject=inject)))
    assert failed.keys() == {("parameters that no object of the model holds", None)}
    assert find(Subject().model, "layers.1.ffn.experts.8.w1.weight") is None


def test_what_nobody_reads():
    def attend(ops):
        return ops._replace(attend=lambda *args: ops.attend(*args[:-1], torch.zeros(4)))

    failed = failures(measured(local(ops=attend)))
    assert failed.keys() == {(UNREAD, None)}
    assert failed[UNREAD, None].measured == 4


def test_what_is_read_and_thrown_away():
    """Scores are computed, and the newest entries are taken: only a change shows it."""

    def newest(ops):
        def select(q, head_weights, keys, first, ratio, k):
            ops.select(q, head_weights, keys, first, ratio, k)
            rising = torch.arange(len(keys))[:, None].expand(keys.shape).float()
            return ops.select(torch.ones_like(q), torch.ones_like(head_weights), rising, first, ratio, k)

        return ops._replace(select=select)

    names = [name for name in Subject().load().census.mappings if name.startswith("layers.1.attn.indexer")]
    tokens = Subject().tokens(160)
    assert not [name for name, same in without_effect(Subject().model, names, tokens, 64, 0) if same]
    model = Subject(fault=local(ops=newest)).model
    before = {name: find(model, name).value for name in names}
    assert [name for name, same in without_effect(model, names, tokens, 64, 0) if same] == names
    assert all(find(model, name).value is value for name, value in before.items())


def test_every_parameter_has_an_effect():
    """Of an SWA layer with a hash gate, and outside of the layers; FULL asks for all of them."""
    names = [
        name for name in Subject().load().census.mappings if not name.startswith(("layers.1", "layers.2", "layers.3"))
    ]
    names = [name for name in names if ".experts." not in name or ".experts.7." in name]
    found = dict(without_effect(Subject().model, names, Subject().tokens(128), 128, 0))
    assert found.keys() == set(names)
    assert not any(found.values())


def test_too_short_a_model_is_vacuous(tmp_path):
    write_checkpoint(tmp_path, tiny_config(max_position_embeddings=100, rope_scaling=None), seed=0)
    run = run_probe(Load(effects=False), Subject(tmp_path), silent)
    assert [finding.verdict for finding in run.report.findings] == [Verdict.VACUOUS]


def test_every_expert_is_read_however_many_there_are(tmp_path):
    write_checkpoint(tmp_path, tiny_config(n_routed_experts=128, moe_intermediate_size=32), seed=0, formats="bf16")
    options = RunOptions(numerics="plain")
    report = measured(directory=tmp_path, options=options)
    assert not report.failed
    assert next(finding for finding in report.findings if finding.what == GOT).measured < 0.9

    def deaf(model):
        for expert in model.blocks[3].experts.experts:
            expert.w3 = expert.w1
        model.blocks[3].experts.stack()

    failed = failures(measured(local(inject=deaf), directory=tmp_path, options=options))
    assert failed[UNREAD, None].measured == 128, "w3 of every expert, whether a token went to it or not"


def test_experts_that_nothing_reaches_are_named():
    def route(ops):
        def always(logits, bias, k, scale):
            del bias
            ids = torch.arange(k).expand(len(logits), k)
            return ids, ops.route_weights(logits, ids, scale)

        return ops._replace(route=always)

    report = measured(local(ops=route))
    assert next(finding for finding in report.findings if finding.what == GOT).measured == 14 / 32
    assert failures(report)[UNREAD, None].measured == 3  # the bias of three layers
    assert "layers.1.ffn.experts.2" in report.parts[-1].text


@pytest.mark.parametrize(
    ("formats", "config"),
    [("base", {}), ("nvfp4", {}), ("f32", {"compress_ratios": [0, 0], "num_hidden_layers": 2, "num_hash_layers": 0})],
)
def test_other_checkpoints(tmp_path, formats, config):
    write_checkpoint(tmp_path, tiny_config(**config), seed=1, formats=formats)
    report = measured(directory=tmp_path)
    assert not report.failed, failures(report)


def test_a_large_checkpoint_is_sampled(monkeypatch):
    monkeypatch.setattr(load, "WHOLE", 0)
    monkeypatch.setattr(load, "TILE", 1 << 14)
    healthy, faulty = measured(), measured(FAULTS["scales-shifted"])
    assert not healthy.failed
    assert " numbers in 126 parameters" in healthy.summary  # 84 matrices of experts that were not drawn
    assert {layer for what, layer in failures(faulty) if what == DIFFER} == {0, 1, 2, 3}
