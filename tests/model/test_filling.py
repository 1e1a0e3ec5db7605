"""Copies of weights have the bits of the mapped views; what goes wrong in a thread that fills them ends the load."""

import errno
import itertools
import os
import threading
from pathlib import Path

import pytest
import torch

from fathom.kernels.formats.stored import as_stack, member, nbytes
from fathom.kernels.triton_ops import TRITON
from fathom.model.checkpoint import filling
from fathom.model.checkpoint.census import census
from fathom.model.checkpoint.checkpoint import Checkpoint
from fathom.model.checkpoint.names import axis, parameters
from fathom.model.checkpoint.weights import CPU, open_weights
from fathom.model.config import ModelConfig
from fathom.model.errors import CheckpointError
from fathom.probes.shared.alive import peak_alive
from fathom.runtime.load import load
from fathom.runtime.options import DEMO, RunOptions
from fathom.runtime.sharding import sharding_plan
from tests.make_checkpoint import FORMATS, make_tensors, tiny_config, write_checkpoint, write_tensors

# Every axis splits over two ranks.
WIDE = {"head_dim": 144, "hidden_size": 512, "index_head_dim": 64, "index_n_heads": 8, "num_attention_heads": 32}
CONFIG = tiny_config(**WIDE, o_groups=8, o_lora_rank=64, compress_ratios=[0, 4], num_hidden_layers=2)
FUSED = "fused"  # BF16, a layer's experts in two tensors
PIECE = 33333  # bytes: matrices are cut, scales are joined, and no piece ends where a plane does


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    root = tmp_path_factory.mktemp("checkpoints")
    for formats in FORMATS:
        write_checkpoint(root / formats, CONFIG, seed=1, formats=formats)
    write_checkpoint(root / FUSED, CONFIG, seed=1, formats="bf16", shards=1)
    write_tensors(root / FUSED, fused(make_tensors(CONFIG, seed=1, formats="bf16")), shards=1)
    return root


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch):
    monkeypatch.setattr(filling, "PIECE", PIECE)


def fused(tensors):
    """A layer's experts as two tensors."""
    found = {name: tensor for name, tensor in tensors.items() if ".ffn.experts." not in name}
    for layer in range(CONFIG["num_hidden_layers"]):
        experts = range(CONFIG["n_routed_experts"])
        w1, w2, w3 = (
            torch.stack([tensors[f"layers.{layer}.ffn.experts.{e}.{part}.weight"] for e in experts])
            for part in ("w1", "w2", "w3")
        )
        found[f"layers.{layer}.mlp.experts.gate_up_proj"] = torch.cat((w1, w3), 1)
        found[f"layers.{layer}.mlp.experts.down_proj"] = w2
    return found


def opened(directory, *, size=1, rank=0, copied=False):
    """The weights of one of `size` ranks, and the names of what it holds, by what they are asked for as."""
    checkpoint, config = Checkpoint.open(directory), ModelConfig.from_json(CONFIG, "")
    sharding = sharding_plan(config, size)

    def held(name, rows):
        return sharding.rows(name, rows, rank)

    weights = open_weights(checkpoint, census(checkpoint.shapes(), config), CPU, (), held, copied=copied)
    asked = {"matrix": [], "operand": []}
    for name, parameter in parameters(config).items():
        if parameter.kind != "i64":
            asked["matrix" if parameter.kind == "matrix" else "operand"].append(name)
    return weights, asked


def fill(weights, names):
    with weights.filling():
        return [weights.matrix(name) for name in names]


def bits(tensor):
    return tensor.contiguous().flatten().view(torch.uint8)


def assert_same(one, other):
    assert type(one) is type(other)
    for plane, same in zip(one, other, strict=True) if isinstance(one, tuple) else ((one, other),):
        assert (plane.dtype, plane.shape) == (same.dtype, same.shape)
        assert torch.equal(bits(plane), bits(same))


@pytest.mark.parametrize("formats", [*FORMATS, FUSED])
@pytest.mark.parametrize(("size", "rank"), [(1, 0), (2, 0), (2, 1)])
def test_copies_have_the_bits_of_views(checkpoints, formats, size, rank):
    views, asked = opened(checkpoints / formats, size=size, rank=rank)
    copies, _ = opened(checkpoints / formats, size=size, rank=rank, copied=True)
    assert size == 1 or {axis(name) for names in asked.values() for name in names} >= {"attention heads"}
    with copies.filling():
        matrices = [copies.matrix(name) for name in asked["matrix"]]
        operands = [copies.operand(name) for name in asked["operand"]]
    for name, copy in zip(asked["matrix"], matrices, strict=True):
        assert_same(copy, views.matrix(name))
    for name, copy in zip(asked["operand"], operands, strict=True):
        assert_same(copy, views.operand(name))
    assert copies.handed() == views.handed()


@pytest.mark.parametrize("formats", [*FORMATS, FUSED])
def test_experts_that_lie_together_have_the_bits_of_views(checkpoints, formats):
    """On the CPU too, and outside of `filling`: their values are there when they are handed out."""
    views, _ = opened(checkpoints / formats)
    copies, _ = opened(checkpoints / formats)
    for part in ("w1", "w2", "w3"):
        names = [f"layers.1.ffn.experts.{e}.{part}.weight" for e in range(CONFIG["n_routed_experts"])]
        matrices = copies.matrices(names, together=True)
        stacked = as_stack(matrices)
        for index, name in enumerate(names):
            assert_same(member(stacked, index), views.matrix(name))


@pytest.mark.skipif(not Path("/proc/self/io").exists(), reason="reads Linux's account of what a process has read")
@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_reads_the_bytes_of_its_own_rows_alone(checkpoints, rank):
    """Of a GPU; on the CPU nothing is read, and Linux maps the pages in which they lie."""

    def read():
        return int(Path("/proc/self/io").read_text(encoding="ascii").split()[1])

    weights, asked = opened(checkpoints / "official", size=2, rank=rank, copied=True)
    before, unseen = read(), read()
    with weights.filling():
        for name in asked["matrix"]:
            weights.matrix(name)
    taken = read() - unseen - (unseen - before)  # less what reading the account itself reads
    held = sum(weights.handed().values())
    assert held <= taken <= held + 1024, (held, taken)
    assert held < 0.6 * sum(path.stat().st_size for path in (checkpoints / "official").glob("*.safetensors"))


def test_nothing_is_held_twice(checkpoints):
    """Beside the buffers, memory is what was handed out; the thread's are not counted."""
    weights, asked = opened(checkpoints / "official", copied=True)
    experts = [name for name in asked["matrix"] if ".experts." in name and ".w1." in name and "shared" not in name]
    held = []

    def load_all():
        with weights.filling():
            held.extend(weights.matrices(experts, together=True))
            held.extend(weights.matrix(name) for name in asked["matrix"] if name not in experts)

    assert peak_alive(load_all) == sum(map(nbytes, held)) == sum(weights.handed().values())


def test_each_byte_that_is_held_is_read_once_and_no_other(checkpoints, monkeypatch):
    weights, asked = opened(checkpoints / "official", size=2, rank=1, copied=True)
    read, real = [], os.preadv
    monkeypatch.setattr(
        filling.os, "preadv", lambda fd, into, at: read.append((fd, at, real(fd, into, at))) or read[-1][2]
    )
    monkeypatch.setattr(Checkpoint, "read", lambda *_: pytest.fail("a mapped file was looked at"))
    fill(weights, asked["matrix"])
    assert sum(size for _, _, size in read) == sum(weights.handed().values())
    for (fd, at, size), (then_fd, then_at, _) in itertools.pairwise(sorted(read)):
        assert fd != then_fd or at + size <= then_at


def test_short_reads_go_on(checkpoints, monkeypatch):
    """A system may read less than it was asked for."""
    real = os.preadv
    monkeypatch.setattr(filling.os, "preadv", lambda fd, into, at: real(fd, [into[0][:777]], at))
    name = "layers.0.attn.wq_a.weight"
    copy = opened(checkpoints / "official", copied=True)[0].matrix(name)
    assert_same(copy, opened(checkpoints / "official")[0].matrix(name))


class LateLane(filling.HostLane):
    """Copies run as late as they may: when somebody waits for them."""

    def copy(self, target, source, ready):
        del ready
        late = filling.HostLane()
        late.synchronize = lambda: target.copy_(source)
        return late


def test_a_buffer_is_read_into_again_only_when_its_copy_is_done(checkpoints, monkeypatch):
    monkeypatch.setattr(filling, "HostLane", LateLane)
    views, asked = opened(checkpoints / "official")
    copies, _ = opened(checkpoints / "official", copied=True)
    for name, copy in zip(asked["matrix"], fill(copies, asked["matrix"]), strict=True):
        assert_same(copy, views.matrix(name))


def test_scales_that_several_threads_check_are_refused_in_the_order_of_names(tmp_path):
    """As a load onto a device does; for the check alone it need not be one that holds anything."""
    tensors = make_tensors(CONFIG, seed=1, formats="official")
    for expert in (6, 1, 3):
        tensors[f"layers.1.ffn.experts.{expert}.w2.scale"].view(torch.uint8)[5, 0] = 255
    write_checkpoint(tmp_path, CONFIG, seed=1, shards=2)
    write_tensors(tmp_path, tensors, shards=2)
    checkpoint, config = Checkpoint.open(tmp_path), ModelConfig.from_json(CONFIG, "")
    with pytest.raises(CheckpointError, match=r"layers\.1\.ffn\.experts\.1\.w2\.scale': scale \[5, 0\] is nan"):
        open_weights(checkpoint, census(checkpoint.shapes(), config), torch.device("meta"))


# What goes wrong


def filling_threads():
    return [thread for thread in threading.enumerate() if thread.name.startswith("fill")]


def refuse(*_):
    raise OSError(errno.EIO, os.strerror(errno.EIO))


def test_a_file_that_shrank_before_it_is_read_is_named(tmp_path):
    write_checkpoint(tmp_path, CONFIG, seed=1, shards=1)
    weights, _ = opened(tmp_path, copied=True)
    os.truncate(tmp_path / "model.safetensors", 5000)
    with pytest.raises(CheckpointError, match=r"model\.safetensors: its size changed after it was opened$"):
        weights.matrix("layers.0.attn.wq_a.weight")
    assert not filling_threads()


def test_a_file_that_shrinks_while_it_is_read_is_named(tmp_path, monkeypatch):
    write_checkpoint(tmp_path, CONFIG, seed=1, shards=1)
    weights, asked = opened(tmp_path, copied=True)
    size = (tmp_path / "model.safetensors").stat().st_size
    monkeypatch.setattr(filling, "regular_file_size", lambda _: size)
    os.truncate(tmp_path / "model.safetensors", size // 2)
    with pytest.raises(CheckpointError, match=r"model\.safetensors: its size changed"):
        fill(weights, asked["matrix"])
    assert not filling_threads()


@pytest.mark.parametrize("failing", [1, filling.THREADS])
def test_an_error_of_the_disk_names_the_file(checkpoints, monkeypatch, failing):
    """In one thread or in all of them."""
    real, count = os.preadv, itertools.count()
    monkeypatch.setattr(
        filling.os, "preadv", lambda *given: refuse() if failing > 1 or next(count) == 7 else real(*given)
    )
    weights, asked = opened(checkpoints / "official", copied=True)
    with pytest.raises(CheckpointError, match=r"safetensors: cannot be read: Input/output error$"):
        fill(weights, asked["matrix"])
    assert not filling_threads()


def test_a_model_that_cannot_be_built_ends_the_threads(checkpoints):
    weights, asked = opened(checkpoints / "official", copied=True)
    with pytest.raises(CheckpointError, match="has no parameter 'none'"):
        fill(weights, [asked["matrix"][0], "none"])
    assert not filling_threads()
    assert_same(weights.matrix(asked["matrix"][0]), opened(checkpoints / "official")[0].matrix(asked["matrix"][0]))


def test_a_load_ends_with_what_a_thread_met(monkeypatch):
    monkeypatch.setattr(filling.os, "preadv", refuse)
    with pytest.raises(CheckpointError, match=r"safetensors: cannot be read: Input/output error$"):
        load(DEMO, RunOptions("plain", "fp32"), TRITON)
