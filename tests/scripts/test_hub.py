"""``--model owner/name``: the hub's cache first, then what is missing of what is asked for, one line for what fails.

The cache is a folder as huggingface_hub makes it, the hub a folder of files at huggingface_hub's own functions.
"""

import errno
import hashlib
import json
import os
import shutil
import subprocess
import sys
from argparse import Namespace
from types import SimpleNamespace

import huggingface_hub
import pytest
from huggingface_hub import errors

from fathom.model.checkpoint.checkpoint import Checkpoint
from fathom.model.checkpoint.folder import INDEX
from fathom.model.errors import ConfigError
from fathom.runtime import hub
from fathom.runtime.options import DEMO
from fathom.scripts import compare, inspect, plan, record
from fathom.scripts import hub as names
from fathom.scripts.cli import run
from tests.by_hand import ROOT

NAME, COMMIT = "acme/demo", "0123456789abcdef0123456789abcdef01234567"
ALL = sorted(path.name for path in DEMO.iterdir() if path.name != "README.md")
SHARDS = [name for name in ALL if name.endswith(".safetensors")]


class Hub:
    """A cache of some files of the demo, and what was asked of the hub."""

    def __init__(self, cache):
        self.cache, self.asked = cache, []
        self.folder = cache / "models--acme--demo" / "snapshots" / COMMIT

    def put(self, *files):
        """As huggingface_hub does: the bytes under their hash, a link in the snapshot, the commit of a branch."""
        root = self.folder.parents[1]
        for folder in (root / "blobs", root / "refs", self.folder):
            folder.mkdir(parents=True, exist_ok=True)
        (root / "refs" / "main").write_text(COMMIT)
        for file in files:
            blob = root / "blobs" / hashlib.sha256(file.encode()).hexdigest()
            shutil.copy(DEMO / file, blob)
            (self.folder / file).symlink_to(os.path.relpath(blob, self.folder))

    def hf_hub_download(self, name, file, *, revision=None):
        self.asked.append(file)
        assert (name, revision) in ((NAME, None), (NAME, COMMIT), (NAME, "v1"))
        if not (DEMO / file).exists():
            raise made(errors.RemoteEntryNotFoundError)
        self.put(file)
        return str(self.folder / file)

    def snapshot_download(self, name, *, revision, allow_patterns):
        assert (name, revision) == (NAME, COMMIT)
        self.asked += allow_patterns
        self.put(*allow_patterns)
        return str(self.folder)

    def get_paths_info(self, name, paths, *, revision):
        assert (name, revision) == (NAME, COMMIT)
        return [SimpleNamespace(size=(DEMO / path).stat().st_size) for path in paths]

    def get_safetensors_metadata(self, name, *, revision):
        assert (name, revision) == (NAME, COMMIT)
        self.asked.append("headers")
        files = {}
        for stored, tensor in Checkpoint.open(DEMO).tensors.items():
            files.setdefault(tensor.shard.name, {})[stored] = SimpleNamespace(
                dtype=tensor.dtype, shape=list(tensor.shape)
            )
        return SimpleNamespace(
            files_metadata={file: SimpleNamespace(tensors=tensors) for file, tensors in files.items()},
            weight_map=hub.weight_map(DEMO / INDEX),
        )


def made(kind):
    """An error of huggingface_hub, whose constructors want a response of the network."""
    error = kind.__new__(kind)
    error.args = ("said",)
    return error


@pytest.fixture
def remote(tmp_path, monkeypatch):
    found = Hub(tmp_path / "cache")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(found.cache))
    for name in ("hf_hub_download", "snapshot_download", "get_safetensors_metadata"):
        monkeypatch.setattr(huggingface_hub, name, getattr(found, name))
    monkeypatch.setattr(
        huggingface_hub.HfApi, "get_paths_info", lambda _, *given, **named: found.get_paths_info(*given, **named)
    )
    monkeypatch.chdir(tmp_path)
    return found


def test_what_the_cache_has_is_run_without_asking(tmp_path):
    """The library itself, offline, over a cache that a test made."""
    cached = Hub(tmp_path / "cache")
    cached.put(*ALL)
    environment = os.environ | {"HF_HUB_CACHE": str(cached.cache), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "scripts.generate", "--raw", "--prompt", "The capital of France is"]
    options = {"capture_output": True, "text": True, "cwd": ROOT, "env": environment}
    done = subprocess.run([*command, "--model", NAME, "--json", tmp_path / "run.json"], check=False, **options)
    assert done.stdout == " Paris.\n", done.stderr
    assert json.loads((tmp_path / "run.json").read_text())["checkpoint"] == f"{NAME}@{COMMIT}"
    (cached.folder / SHARDS[2]).unlink()
    for model, says in (
        ("acme/other", "no such folder here, and not in the hub's cache"),
        (NAME, f"1 of its files, {SHARDS[2]} first, are not in the hub's cache"),
    ):
        done = subprocess.run([*command, "--model", model], check=False, **options)
        assert (done.returncode, done.stdout) == (2, "")
        assert done.stderr == f"{model}: {says}, and the hub cannot be asked (offline, or no connection)\n"


def test_a_folder_of_that_name_comes_first(remote, tmp_path, capsys):
    shutil.copytree(DEMO, tmp_path / NAME)
    assert inspect.main(["--model", NAME]) == 0
    assert "every parameter filled" in capsys.readouterr().out
    assert run(lambda: inspect.main(["--model", NAME, "--revision", "v1"])) == 2
    assert capsys.readouterr().err == f"--revision v1: of a model on the hub, and {NAME} is a folder\n"
    assert remote.asked == []


def test_all_that_is_missing_is_downloaded_once_and_of_one_commit(remote):
    remote.put(SHARDS[1])
    at = hub.locate(NAME, "v1")
    hub.fetch(at)
    assert sorted(remote.asked) == sorted(set(ALL) - {SHARDS[1]})
    assert at == (NAME, COMMIT, remote.folder)
    assert Checkpoint.open(at.folder).shapes() == Checkpoint.open(DEMO).shapes()
    remote.asked.clear()
    hub.fetch(hub.locate(NAME))
    assert remote.asked == [], "the cache has all of it"


def test_a_model_of_one_file_needs_no_index(remote, monkeypatch):
    real = remote.hf_hub_download
    shard = {INDEX: errors.RemoteEntryNotFoundError, "tokenizer.json": errors.RemoteEntryNotFoundError}

    def download(name, file, *, revision=None):
        if file in shard:
            raise made(shard[file])
        return real(name, file, revision=revision)

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", download)
    assert hub.shards(hub.locate(NAME)) == ["model.safetensors"]


def test_layers_need_the_shards_that_hold_them(remote):
    remote.put("config.json", INDEX, "tokenizer.json")
    files = json.loads((DEMO / INDEX).read_text())["weight_map"]
    wanted = {file for name, file in files.items() if name.startswith(("layers.1.", "layers.3."))}
    at = hub.locate(NAME)
    hub.fetch(at, {1, 3}, ends=False)
    assert set(remote.asked) == wanted < set(SHARDS)
    ends = {file for name, file in files.items() if not name.startswith("layers.")}
    assert set(hub.shards(at, {1, 3})) == wanted | ends


def test_compare_downloads_what_it_judges(remote, tmp_path, capsys):
    (tmp_path / "ids.json").write_text(json.dumps([0, *range(100, 130)]))
    recording = ["--recording", str(tmp_path / "ours.safetensors")]
    assert record.main(["--tokens", "ids.json", "--out", recording[1], "--sites", "streams,attention.kv"]) == 0
    assert run(lambda: compare.main([*recording, "--model", NAME, "--layers", "2", "--no-identify"])) == 0
    assert "agrees" in capsys.readouterr().out
    downloaded = {file for file in remote.asked if file in SHARDS}
    files = json.loads((DEMO / INDEX).read_text())["weight_map"]
    assert downloaded == {file for name, file in files.items() if name.startswith("layers.2.")}


def test_inspect_and_plan_read_headers_where_there_are_no_files(remote, tmp_path, capsys):
    for command, flags in ((inspect, []), (plan, ["--context", "1000"])):
        written = []
        for model in (NAME, str(DEMO)):
            assert command.main(["--model", model, *flags, "--json", str(tmp_path / "out")]) == 0
            written.append(json.loads((tmp_path / "out").read_text()))
        assert written[0] == written[1]
    capsys.readouterr()
    assert remote.asked.count("headers") == 2
    assert not set(remote.asked) & set(SHARDS)
    remote.put(*SHARDS)
    assert inspect.main(["--model", NAME]) == 0
    assert remote.asked.count("headers") == 2, "the cache has the files"


@pytest.mark.usefixtures("remote")
@pytest.mark.parametrize(
    ("error", "says"),
    [
        (made(errors.RepositoryNotFoundError), "no such folder here, and no such model on the hub"),
        (made(errors.GatedRepoError), f"gated: accept its terms at https://huggingface.co/{NAME} and log in"),
        (made(errors.RevisionNotFoundError), "the hub has no revision v1 of it"),
        (made(errors.RemoteEntryNotFoundError), "has no config.json on the hub"),
        (made(errors.LocalEntryNotFoundError), "no such folder here, and not in the hub's cache, and "),
        (made(errors.HFValidationError), "no name of a model on the hub"),
        (made(errors.HfHubHTTPError), "the hub: HfHubHTTPError: said"),
        (OSError(errno.ENOSPC, "No space left on device"), "the hub's cache: No space left on device"),
    ],
)
def test_what_fails_is_one_line(monkeypatch, capsys, error, says):
    def fail(*_, **__):
        raise error

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", fail)
    assert run(lambda: inspect.main(["--model", NAME, "--revision", "v1"])) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith(f"{NAME}: {says}")
    assert err.count("\n") == 1


@pytest.mark.usefixtures("remote")
def test_a_bug_is_not_told_as_the_hubs(monkeypatch):
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", lambda: None)
    with pytest.raises(TypeError):
        hub.locate(NAME)


def test_a_download_that_the_disk_cannot_hold_is_not_begun(remote, monkeypatch):
    remote.put("config.json", INDEX, "tokenizer.json")
    monkeypatch.setattr("shutil.disk_usage", lambda _: SimpleNamespace(free=3_000_000))
    at = hub.locate(NAME)
    with pytest.raises(ConfigError, match=rf"^{NAME}: 6 files of 0\.0 GiB are to be downloaded, .*/cache has room for"):
        hub.fetch(at)
    assert remote.asked == []
    (remote.folder.parents[1] / "blobs" / "x.incomplete").write_bytes(bytes(2_000_000))
    hub.fetch(at)
    assert set(remote.asked) == set(SHARDS), "what an earlier download left takes room already"


@pytest.mark.usefixtures("remote")
def test_a_file_that_the_index_alone_has(monkeypatch):
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda *_, **__: None)
    with pytest.raises(ConfigError, match=f"{SHARDS[0]} is in its index, and not on the hub at {COMMIT}"):
        hub.fetch(hub.locate(NAME))


def test_headers_that_do_not_agree_with_the_index(remote, monkeypatch):
    found = remote.get_safetensors_metadata(NAME, revision=COMMIT)
    del found.files_metadata[SHARDS[0]]
    monkeypatch.setattr(huggingface_hub, "get_safetensors_metadata", lambda *_, **__: found)
    with pytest.raises(ValueError, match="the index names it, no shard holds it"):
        hub.headers(hub.locate(NAME))


def test_one_rank_of_a_machine_asks_and_the_others_hear_of_it(remote):
    heard = {}

    def args():
        return Namespace(model=NAME, revision=None, hub_needs=names.WEIGHTS, models_read=[])

    def watch(rank, local_rank):
        launch = SimpleNamespace(rank=rank, local_rank=local_rank)
        return SimpleNamespace(launch=launch, tell=heard.__setitem__, hear=heard.__getitem__)

    first, second = args(), args()
    names.locate(first, watch(8, 0))
    asked = list(remote.asked)
    names.locate(second, watch(9, 1))
    assert first.model == second.model == remote.folder
    assert remote.asked == asked
