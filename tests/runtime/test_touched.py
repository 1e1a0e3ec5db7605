"""Which bytes of a checkpoint's files a rank looks at: its own, by the kernel's count of the pages it has mapped."""

import mmap
import sys
from typing import NamedTuple

import pytest
import torch

from fathom.model.checkpoint.census import census
from fathom.model.checkpoint.checkpoint import Checkpoint
from fathom.model.config import ModelConfig
from fathom.runtime.load import load
from fathom.runtime.options import RunOptions
from fathom.runtime.resident import touched_bytes
from fathom.runtime.sharding import sharding_plan
from tests.gloo import run
from tests.make_checkpoint import make_tensors, tiny_config, write_checkpoint, write_tensors

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the count is Linux's")
AROUND = 64 << 10  # that Linux maps around a page that is read, see man 5 proc_sys_vm and `touched_bytes`


class Looked(NamedTuple):
    before: int  # bytes touched when the model is built
    after: int  # a call that uses every expert
    held: int  # bytes of the rows that the rank holds
    logits: torch.Tensor  # of that call


def look(group, directories):
    loaded = load(directories[group.rank], RunOptions("plain"), group=group)
    before = touched_bytes(loaded.directory)
    tokens = torch.arange(400) % loaded.model.config.vocab_size
    logits = loaded.model.logits(loaded.model(tokens, loaded.model.new_state(400, 400))[-1:])
    return Looked(before, touched_bytes(loaded.directory), sum(loaded.held.values()), logits)


def write_but_for(rank, size, directory, config, tensors):
    """Write a checkpoint in which all bytes are set of rows that only other ranks hold: NaN, of scales too."""
    write_checkpoint(directory, config, seed=1, shards=1)
    facts = ModelConfig.from_json(config, "tiny")
    counted, sharding = census(Checkpoint.open(directory).shapes(), facts), sharding_plan(facts, size)
    spoiled = {name: tensor.clone() for name, tensor in tensors.items()}
    for name, mapping in counted.mappings.items():
        rows = counted.demanded[name].shape[0]
        shard = sharding.rows(name, rows, rank)
        for stored in filter(None, (mapping.weight, mapping.scale)) if shard.split else ():
            tensor = spoiled[stored]
            several = -(-rows // len(tensor))  # rows of the parameter to one of the tensor
            for others in (tensor[: shard.start // several], tensor[-(-shard.stop // several) :]):
                others.view(torch.uint8).fill_(255)
    write_tensors(directory, spoiled, shards=1)


def test_pages_are_counted_and_those_of_other_files_are_not(tmp_path):
    for name in ("a.safetensors", "b.bin"):
        (tmp_path / name).write_bytes(bytes(1 << 20))
    with (tmp_path / "a.safetensors").open("rb") as ours, (tmp_path / "b.bin").open("rb") as other:
        maps = [mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) for file in (ours, other)]
        assert touched_bytes(tmp_path) == 0
        assert maps[1][0] == 0
        assert touched_bytes(tmp_path) == 0
        assert maps[0][:: mmap.PAGESIZE] == bytes((1 << 20) // mmap.PAGESIZE)
        assert touched_bytes(tmp_path) == 1 << 20
        for one in maps:
            one.close()
    assert touched_bytes(tmp_path) == 0


def test_a_link_to_a_shard_is_followed(tmp_path):
    folder, blobs = tmp_path / "snapshot", tmp_path / "blobs"
    folder.mkdir()
    blobs.mkdir()
    (blobs / "0a").write_bytes(bytes(1 << 16))
    (folder / "a.safetensors").symlink_to(blobs / "0a")
    with (folder / "a.safetensors").open("rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as mapped:
        assert mapped[:: mmap.PAGESIZE] == bytes((1 << 16) // mmap.PAGESIZE)
        assert touched_bytes(folder) == 1 << 16


def test_a_rank_looks_at_its_own_rows_alone(tmp_path):
    """All but rank 0, which reads what the fingerprint covers; here that maps the files whole."""
    write_checkpoint(tmp_path, tiny_config(moe_intermediate_size=2048), seed=1)
    size = sum(path.stat().st_size for path in tmp_path.glob("*.safetensors"))
    whole, *others = run(4, look, [tmp_path] * 4)
    assert size <= whole.after < size + AROUND
    for rank in others:
        assert rank.before < 0.15 * size
        assert rank.held < 0.45 * size
        assert rank.held <= rank.after  # how much Linux maps around what is read is its own to say


def test_rows_of_other_ranks_may_be_anything(tmp_path):
    config = tiny_config()
    tensors = make_tensors(config, seed=1)
    folders = [tmp_path / str(rank) for rank in range(4)]
    for rank, folder in enumerate(folders):
        write_but_for(rank, 4, folder, config, tensors)
    write_checkpoint(tmp_path / "whole", config, seed=1, shards=1)
    for spoiled, right in zip(run(4, look, folders), run(4, look, [tmp_path / "whole"] * 4), strict=True):
        assert right.logits.isfinite().all()
        assert spoiled.logits.equal(right.logits)
