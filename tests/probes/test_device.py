"""Probes of a model on a device that is not the host's: what they make themselves has to be there before a kernel is.

It runs in Triton's interpreter, on a device that only keeps the two sides apart: `tests.other_device`.
"""

import pytest
import torch

from fathom.probes import variants
from fathom.probes.subject import Subject
from fathom.runtime.options import RunOptions
from tests.make_checkpoint import tiny_config, write_checkpoint

TRITON = pytest.importorskip("fathom.kernels.triton_ops", reason="Triton is not on every platform").TRITON
from tests.other_device import DEVICE, There, moved, other_device  # noqa: E402  # imports Triton, which may be absent

WIDTHS = {"head_dim": 64, "qk_rope_head_dim": 32, "index_head_dim": 32}


@pytest.fixture(scope="module")
def subject(tmp_path_factory):
    """One CSA layer."""
    folder, config = tmp_path_factory.mktemp("tiny"), tiny_config(compress_ratios=[4], num_hidden_layers=1, **WIDTHS)
    write_checkpoint(folder, config, seed=1)
    return Subject(folder, RunOptions(numerics="plain", dtype="fp32"), TRITON)


def test_a_model_there_computes_what_it_computes_here(subject):
    ids = torch.tensor(subject.tokens(9))
    here = subject.load(subject.with_options(prefill_chunk=7)).model
    wanted = here.logits(here(ids, here.new_state(9, 9)))
    with other_device():
        there = moved(here)
        assert there.device == DEVICE
        found = there.logits(there(ids.to(DEVICE), there.new_state(9, 9)))
    assert isinstance(found, There)
    assert torch.equal(found.as_subclass(torch.Tensor), wanted)


def test_the_two_sides_do_not_meet():
    with other_device():
        x, here = torch.ones(2, 32, device=DEVICE), torch.ones(2, 32)
        assert x.device == x[0].sum().device == torch.zeros_like(x).device == here.to(DEVICE).device == DEVICE
        assert here.device == x.cpu().device == torch.arange(3).device == torch.device("cpu")
        assert torch.equal((x + torch.tensor(1.0)).cpu(), here + 1)  # as of one number
        assert torch.equal(here.to(DEVICE).copy_(2 * here).cpu(), 2 * here)
        places = torch.tensor([1])  # where `[]` takes them, torch's `index_select` on CUDA does not
        assert torch.equal(x[places].cpu(), here[places])
        for wrong in (
            lambda: x + here,
            lambda: torch.cat((x, here)),
            lambda: torch.equal(x, here),
            lambda: x.index_select(0, places),
        ):
            with pytest.raises(RuntimeError, match="of the host"):
                wrong()
        with pytest.raises(TypeError, match="numpy"):
            x.numpy()
        with pytest.raises(RuntimeError, match="generator of the host"):
            torch.randn(3, device=DEVICE, generator=torch.Generator())
        assert TRITON.rms_norm(x, None, 1e-6).device == DEVICE
        with pytest.raises(ValueError, match=r"_rms_norm cannot be accessed from Triton \(cpu tensor\?\)"):
            TRITON.rms_norm(here, None, 1e-6)


def test_cache_variants_are_measured_where_the_model_is(subject, monkeypatch):
    monkeypatch.setattr(variants, "keys_per_tile", lambda *_: 4096)  # from there on a call has all its splits
    monkeypatch.setattr(variants, "MORE", 2)
    with other_device():
        shard, eight, coda = (
            moved(variants._model(subject, rule)) for rule in ("all=shard", "all=shard:bits=8", f"all={variants.SMALL}")
        )
        findings = [
            *variants.rows_kept(coda, "coda", (1, 5), 12, 0),
            *variants.masses(coda, 12, 0),
            *variants.means(coda, 12, 0),
            *variants.rows_kept(shard, "shard", (1, 5), 12, 0),
            *variants.attentions(eight, 12, 0),
            *variants.in_a_basis(shard, 12, (1, 5), 0),
            *variants.drifts(shard, 16, 0),
            *variants.recalls(shard, 16, 4, (4,), 0),
            variants.restored(shard, "shard", torch.tensor(subject.tokens(6), device=DEVICE), 1),
            *variants.scratch(TRITON, DEVICE, 4, 64, 6),
        ]
    assert len(findings) == 19
    assert [finding for finding in findings if finding.failed] == []
