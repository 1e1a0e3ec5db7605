"""Show what a checkpoint is: its config, its layers, and a census of its tensors. No weight is read, or downloaded.

With --config and --tensors it works on a bare list of tensors (JSON, also gzipped: name -> [dtype, shape]), so a
published checkpoint can be checked against this project without downloading it.
"""

import argparse
import gzip
import sys
import zlib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.table import Table

from fathom.model.architectures import Config, config_from_file
from fathom.model.checkpoint import strict_json
from fathom.model.checkpoint.census import Census, Tally, census
from fathom.model.checkpoint.tensor_mapping import Stored
from fathom.model.config import LayerKind, ModelConfig
from fathom.model.errors import CheckpointError, ConfigError, quoted
from fathom.model.files import regular_file_size
from fathom.model.llama.config import LlamaConfig
from fathom.runtime.options import DEMO
from fathom.runtime.output import write_json
from fathom.scripts.cli import arguments, run_alone
from fathom.scripts.console import Console
from fathom.scripts.flags import add_json, add_model
from fathom.scripts.hub import HEADERS
from fathom.scripts.paths import Reads

LAYER_FIELDS = ("compress_ratios", "layer_kinds", "rope_scaling", "num_hash_layers")  # shown in the table of layers

MAX_LIST_BYTES = 1 << 25  # of a list of tensors, unpacked; V4-Pro's takes 11 MiB


def parser() -> argparse.ArgumentParser:
    """Return the command line."""
    p = argparse.ArgumentParser(prog="python -m scripts.inspect", description=__doc__)
    add_model(p, HEADERS, default=None)
    p.add_argument("--config", action=Reads, help="a config.json, together with --tensors")
    p.add_argument("--tensors", action=Reads, help="a list of tensors, .json or .json.gz: name -> [dtype, shape]")
    add_json(p, "the same")
    return p


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit status."""
    args = arguments(parser(), argv)
    if (args.config is None) != (args.tensors is None) or (args.config is not None and args.model is not None):
        raise ConfigError("--config and --tensors go together, and without --model")
    config = config_from_file(args.config or (args.model or DEMO) / "config.json")
    listed = None if args.tensors is None else read_list(args.tensors)
    return run(args, config, listed)


def read_list(path: Path) -> dict[str, Stored]:
    """Read a list of tensors, name -> [dtype, shape]; CheckpointError names the file and the tensor at fault."""
    regular_file_size(path)
    try:
        with (gzip.open if path.suffix == ".gz" else open)(path, "rb") as file:
            data = file.read(MAX_LIST_BYTES + 1)
        if len(data) > MAX_LIST_BYTES:
            raise CheckpointError(f"{path}: more than {MAX_LIST_BYTES} bytes")
        obj = strict_json.parse(data)
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise CheckpointError(f"{path}: damaged gzip file: {error}") from None
    except ValueError as error:
        raise CheckpointError(f"{path}: {str(error).removeprefix(f'{path}: ')}") from None
    if not isinstance(obj, dict):
        raise CheckpointError(f"{path}: want a JSON object, name -> [dtype, shape]")
    for name, entry in obj.items():
        if not _is_stored(entry):
            raise CheckpointError(f"{path}: tensor {quoted(name)}: want [dtype, shape]")
    return {name: (dtype, tuple(shape)) for name, (dtype, shape) in obj.items()}


def _is_stored(entry: Any) -> bool:
    if not isinstance(entry, list) or len(entry) != 2 or not isinstance(entry[0], str):
        return False
    return isinstance(entry[1], list) and all(type(size) is int and size >= 0 for size in entry[1])


def run(args: argparse.Namespace, config: Config, listed: Mapping[str, Stored] | None) -> int:
    """Show the census of a list of tensors, or of what --model names, of this config; returns the exit status."""
    from fathom.model.llama.census import census as llama_census

    tensors, unlisted = _tensors(args) if listed is None else (listed, ())
    where = str(args.tensors or args.model or DEMO)
    if isinstance(config, LlamaConfig):
        counted = llama_census(tensors, config, where)
    else:
        counted = census(tensors, config, where)
    data = summary(config, counted) | {"files_not_read": list(unlisted), "head": _head(tensors, config, counted)}
    console = Console()
    layers = _llama_layer_table if isinstance(config, LlamaConfig) else _layer_table
    for table in (_config_table(config), layers(data["layers"]), *_census_tables(counted)):
        console.print(table)
    console.say(*_remarks(data))
    if args.json is not None:
        write_json(args.json, data)
    return 0


def _tensors(args: argparse.Namespace) -> tuple[Mapping[str, Stored], Sequence[str]]:
    """The tensors, and safetensors files beside them that no index names."""
    from fathom.model.checkpoint.checkpoint import Checkpoint

    if args.headers is not None:
        return args.headers, ()
    checkpoint = Checkpoint.open(args.model or DEMO)
    return checkpoint.shapes(), checkpoint.unlisted


def summary(config: Config, counted: Census) -> dict[str, Any]:
    """Everything that is shown, as JSON values."""
    return {
        "config": config.to_json(),
        "config_fingerprint": config.fingerprint,
        "layers": _layers(config),
        "tensors": counted.tensors,
        "bytes": counted.nbytes,
        "parameters": len(counted.mappings),
        "weights": counted.weights,
        "by_form": {form.value: asdict(tally) for form, tally in counted.by_form.items()},
        "by_kind": {kind: asdict(tally) for kind, tally in counted.by_kind.items()},
        "by_dtype": {dtype: asdict(tally) for dtype, tally in counted.by_dtype.items()},
        "ignored": dict(Counter(counted.ignored.values())),
        "mtp_stages": counted.mtp_stages,
        "mtp_head": counted.mtp_head,
    }


def _head(tensors: Mapping[str, Stored], config: Config, counted: Census) -> dict[str, Any] | None:
    """The draft head, and why it cannot be run, where it cannot; None where there is none."""
    if isinstance(config, LlamaConfig) or counted.mtp_head is None:
        return None
    told = {"kind": counted.mtp_head.value, "stages": counted.mtp_stages}
    if config.v41 is not None:
        return told | {"not_run_because": "--draft is not built for DeepSeek-V4.1", "weights": None, "bytes": None}
    try:
        whole = census(tensors, config, head=True)
    except CheckpointError as error:
        return told | {"not_run_because": str(error), "weights": None, "bytes": None}
    sizes = [sum(tally.nbytes for tally in one.by_form.values()) for one in (whole, counted)]
    return told | {"not_run_because": None, "weights": whole.weights - counted.weights, "bytes": sizes[0] - sizes[1]}


def _layers(config: Config) -> list[dict[str, Any]]:
    if not isinstance(config, LlamaConfig):
        return [_layer(config, layer) for layer in range(config.num_hidden_layers)]
    scaling = config.to_json()["rope_scaling"]
    heads = {"heads": config.num_attention_heads, "kv_heads": config.num_key_value_heads}
    alike = heads | {"window": config.sliding_window, "rope_base": config.rope_theta, "rope_scaling": scaling}
    return [{"layer": layer, "kind": "gqa", **alike} for layer in range(config.num_hidden_layers)]


def _layer(config: ModelConfig, layer: int) -> dict[str, Any]:
    compressed = config.layer_kind(layer) is not LayerKind.SWA
    return {
        "layer": layer,
        "kind": config.layer_kind(layer).value,
        "ratio": config.ratio(layer),
        "rope_base": config.compress_rope_theta if compressed else config.rope_theta,
        "yarn": asdict(config.rope_scaling) if compressed and config.rope_scaling else None,
        "experts": "by token id" if config.is_hash(layer) else "by score",
    } | ({} if config.v41 is None else {"reads": _shared(config, layer)})


def _shared(config: ModelConfig, layer: int) -> str:
    """Whose entries and selection a layer of V4.1 reads, and whether n-grams are added before it."""
    own = config.v41
    assert own is not None, "asked of V4.1 alone"
    parts = ["Engram"] if layer in own.engram.layer_ids else []
    if config.ratio(layer):
        entries, selection = config.entry_source(layer), config.selection_source(layer)
        parts.append("own entries" if entries == layer else f"entries of {entries}")
        parts.append("own selection" if selection == layer else f"selection of {selection}")
        parts += ["publishes candidates"] if layer == own.candidate_source else []
        parts += ["among candidates"] if selection == layer > own.candidate_source else []
    return ", ".join(parts) or "-"


def _config_table(config: Config) -> Table:
    table = Table("field", "value", title="config")
    for name, value in config.to_json().items():
        if name not in LAYER_FIELDS:
            table.add_row(name, f"{value:g}" if isinstance(value, float) else str(value))
    return table


def _layer_table(layers: Sequence[Mapping[str, Any]]) -> Table:
    shared = ["reads"] if layers and "reads" in layers[0] else []
    table = Table("layer", "kind", "ratio", "RoPE base", "YaRN", "experts", *shared, title="layers")
    for row in layers:
        yarn = row["yarn"]
        scaling = f"x{yarn['factor']:g} of {yarn['original_max_position_embeddings']}" if yarn else "-"
        base = f"{row['rope_base']:g}"
        of_layer = (str(row["layer"]), row["kind"], str(row["ratio"] or "-"), base, scaling, row["experts"])
        table.add_row(*of_layer, *(row[name] for name in shared))
    return table


def _llama_layer_table(layers: Sequence[Mapping[str, Any]]) -> Table:
    table = Table("layer", "kind", "heads", "KV heads", "window", "RoPE base", "scaling", title="layers")
    for row in layers:
        scaling = row["rope_scaling"]
        said = f"{scaling['rope_type']} x{scaling['factor']:g}" if scaling else "-"
        window = "all" if row["window"] is None else str(row["window"])
        heads = (str(row["heads"]), str(row["kv_heads"]))
        table.add_row(str(row["layer"]), row["kind"], *heads, window, f"{row['rope_base']:g}", said)
    return table


def _census_tables(counted: Census) -> list[Table]:
    forms = Table("stored as", "named parameters", "weights", "bytes with scales", title="parameters by form")
    kinds = Table("kind", "tensors", "elements", "bytes", title="stored tensors by kind")
    dtypes = Table("dtype", "tensors", "elements", "bytes", title="stored tensors by dtype")
    _fill(forms, {form.value: tally for form, tally in counted.by_form.items()})
    _fill(kinds, counted.by_kind)
    _fill(dtypes, counted.by_dtype)
    return [forms, kinds, dtypes]


def _fill(table: Table, tallies: Mapping[str, Tally]) -> None:
    for column in table.columns[1:]:
        column.justify = "right"
    for name, tally in tallies.items():
        table.add_row(name, f"{tally.tensors:,}", f"{tally.elements:,}", f"{tally.nbytes:,}")
    total = [sum(values) for values in zip(*(asdict(tally).values() for tally in tallies.values()), strict=True)]
    table.add_section()
    table.add_row("all", *(f"{value:,}" for value in total))


def _remarks(data: Mapping[str, Any]) -> list[str]:
    lines = [f"ignored, {count:,} tensors: {reason}" for reason, count in data["ignored"].items()]
    if head := data["head"]:
        kind, why = f"{head['kind']}, stages: {head['stages']}", head["not_run_because"]
        sizes = "" if why else f"{head['weights']:,} weights, {head['bytes']:,} bytes"
        lines.append(f"draft head, not run: {kind}; {why}" if why else f"draft head: {kind}, {sizes}, see --draft")
    lines += [f"not named by the index, not read: {name}" for name in data["files_not_read"]]
    lines.append(f"config fingerprint {data['config_fingerprint']}")
    used, skipped = data["tensors"] - sum(data["ignored"].values()), sum(data["ignored"].values())
    lines.append(
        f"all {data['tensors']:,} tensors accounted for: {used:,} used, {skipped:,} ignored;"
        f" {data['weights']:,} weights, every parameter filled"
    )
    return lines


if __name__ == "__main__":
    sys.exit(run_alone(main))
