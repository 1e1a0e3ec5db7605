"""The demo checkpoint with a random draft head, as `model/demo-mtp` and `model/demo-dspark` have trained ones."""

import json
import shutil
from pathlib import Path

from safetensors.torch import load_file

from fathom.model.checkpoint.mtp import Head
from fathom.runtime.options import DEMO
from tests.make_checkpoint import DSPARK, make_tensors, write_tensors


def write_demo_with(head: Head, directory: Path, *, seed: int = 1) -> None:
    """Write a checkpoint of the demo's model and a random head."""
    directory.mkdir()
    config = json.loads((DEMO / "config.json").read_text(encoding="utf-8"))
    if head is Head.DSPARK:
        config |= DSPARK
    (directory / "config.json").write_text(json.dumps(config), encoding="utf-8")
    shutil.copy(DEMO / "tokenizer.json", directory)
    drawn = make_tensors(config, seed=seed, head=head)
    tensors = {name: tensor for name, tensor in drawn.items() if name.startswith("mtp.")}
    for file in sorted(DEMO.glob("*.safetensors")):
        tensors |= load_file(file)
    write_tensors(directory, tensors, shards=2)
