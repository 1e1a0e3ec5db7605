"""Which bytes of a checkpoint's files a rank looks at: its own, by the kernel's count of the pages it has mapped."""

import mmap
import sys
from typing import NamedTuple

import pytest
import torch

from runtime.load import load
from runtime.options import RunOptions
from runtime.resident import touched_bytes
from tests.gloo import run
from tests.make_checkpoint import tiny_config, write_checkpoint

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the count is Linux's")
AROUND = 64 << 10  # that Linux maps around a page that is read, see man 5 proc_sys_vm and `touched_bytes`


class Looked(NamedTuple):
    before: int  # bytes touched when the model is built
    after: int  # a call that uses every expert
    held: int  # bytes of the rows that the rank holds
    stretches: int  # of these, in the files


def look(group, directory):
    loaded = load(directory, RunOptions("plain"), group=group)
    before = touched_bytes(directory)
    tokens = torch.arange(400) % loaded.model.config.vocab_size
    loaded.model.logits(loaded.model(tokens, loaded.model.new_state(400, 400))[-1:])
    return Looked(before, touched_bytes(directory), sum(loaded.held.values()), len(loaded.held))


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
    """All but rank 0, which reads both ends of every tensor for the fingerprint; here that maps the files whole."""
    write_checkpoint(tmp_path, tiny_config(moe_intermediate_size=2048), seed=1)
    size = sum(path.stat().st_size for path in tmp_path.glob("*.safetensors"))
    whole, *others = run(4, look, tmp_path)
    assert size <= whole.after < size + AROUND
    for rank in others:
        assert rank.before < 0.1 * size
        assert rank.held < 0.45 * size
        # half of AROUND at each end of a stretch, on average
        assert rank.held <= rank.after <= rank.held + AROUND * rank.stretches < 0.75 * size
