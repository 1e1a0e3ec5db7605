"""One parameter and the stored tensors that make it up: which form they have, and whether they fit together.

The form is decided for each parameter from its own tensors: checkpoints mix forms, and the keys of config.json that
claim one form for all are known to be wrong (vLLM read an MXFP4 draft head as NVFP4 that way).
"""

from collections.abc import Mapping, Sequence
from enum import StrEnum
from typing import Final, NamedTuple

from fathom.model.checkpoint.names import Parameter, Role
from fathom.model.errors import quoted

Stored = tuple[str, Sequence[int]]  # dtype as safetensors writes it, and shape


class Form(StrEnum):
    """The form in which one parameter is stored."""

    FP8 = "FP8, E8M0 scales"
    FP8_F32 = "FP8, F32 scales"
    FP8_ROWS = "FP8 rows, E8M0 scales"  # V4.1's Engram tables
    FP4 = "FP4, E8M0 scales"
    NVFP4 = "NVFP4, E4M3 scales"
    BF16 = "BF16"
    F16 = "F16"  # Llama family only
    F32 = "F32"
    I64 = "I64"
    I32 = "I32"


ROUNDED: Final = (Form.FP8, Form.FP8_F32, Form.FP4)  # whose inputs deployed numerics round to FP8

_PLAIN: Final = {"BF16": Form.BF16, "F32": Form.F32}
_TABLE: Final = {"I64": Form.I64, "I32": Form.I32}


class Slice(NamedTuple):
    """The part of a stacked tensor that is one expert's matrix: ``stacked[expert, start:stop]``."""

    expert: int
    start: int
    stop: int


class TensorMapping(NamedTuple):
    """Which stored tensors make up one parameter."""

    form: Form
    weight: str  # stored name
    scale: str | None = None  # stored name
    global_scale: str | None = None  # stored name
    part: Slice | None = None  # of a stacked weight
    block: int = 0  # rows and columns that share a scale of FP8; 0: of another form


class Source(NamedTuple):
    """A stored tensor, or the part of a stack."""

    name: str
    part: Slice | None = None


class Wrong(Exception):
    """Tensors that do not make up a parameter: the kind of fault, for grouping, and which tensors."""

    def __init__(self, kind: str, text: str) -> None:
        super().__init__(kind, text)
        self.kind, self.text = kind, text


def map_parameter(
    name: str, parameter: Parameter, roles: Mapping[Role, Source], tensors: Mapping[str, Stored], block: int
) -> TensorMapping:
    """The form of one parameter, read off its own tensors.

    Parameters
    ----------
    name : str
        Official name.
    parameter : Parameter
        What the architecture demands.
    roles : Mapping[Role, Source]
        The stored tensors that claim to be part of it; may be empty.
    tensors : Mapping[str, Stored]
        Stored name -> dtype and shape.
    block : int
        Rows and columns that share a scale of FP8.

    Raises
    ------
    Wrong
        When they do not make up one supported form of the demanded shape.
    """
    if Role.WEIGHT not in roles:
        if roles:
            raise Wrong("scale without its weight", ", ".join(quoted(source.name) for source in roles.values()))
        raise Wrong("missing", name)
    stored, part = roles[Role.WEIGHT]
    dtype = tensors[stored][0]
    if parameter.kind == "rows":
        return _map_rows(parameter.shape, roles, tensors)
    plain = _TABLE if parameter.kind == "i64" else _PLAIN
    if dtype in plain:
        _want_roles(roles, {Role.WEIGHT})
        if part is None:
            _want_shape(stored, tensors, parameter.shape)
        return TensorMapping(plain[dtype], stored, part=part)
    if parameter.kind != "matrix" or part is not None or dtype not in ("F8_E4M3", "I8", "U8"):
        raise Wrong("wrong type", f"{quoted(stored)} is {dtype}, want {' or '.join(plain)}")
    if dtype == "F8_E4M3":
        return _map_fp8(parameter.shape, roles, tensors, block)
    quantised = {"I8": _map_fp4, "U8": _map_nvfp4}[dtype]
    return quantised(parameter.shape, roles, tensors)


def _map_rows(shape: tuple[int, ...], roles: Mapping[Role, Source], tensors: Mapping[str, Stored]) -> TensorMapping:
    _want_roles(roles, {Role.WEIGHT, Role.SCALE})
    weight, scale = roles[Role.WEIGHT].name, roles[Role.SCALE].name
    _want_blocks(weight, shape, 32)
    _want_type(weight, tensors, ("F8_E4M3",))
    _want_shape(weight, tensors, shape)
    _want_type(scale, tensors, ("F8_E8M0",))
    _want_shape(scale, tensors, (shape[0], shape[1] // 32))
    return TensorMapping(Form.FP8_ROWS, weight, scale)


def _map_fp8(
    shape: tuple[int, ...], roles: Mapping[Role, Source], tensors: Mapping[str, Stored], block: int
) -> TensorMapping:
    _want_roles(roles, {Role.WEIGHT, Role.SCALE})
    weight, scale = roles[Role.WEIGHT].name, roles[Role.SCALE].name
    dtype = tensors[scale][0]
    _want_shape(weight, tensors, shape)
    _want_type(scale, tensors, ("F8_E8M0", "F32"))
    _want_shape(scale, tensors, (-(-shape[0] // block), -(-shape[1] // block)))
    return TensorMapping(Form.FP8 if dtype == "F8_E8M0" else Form.FP8_F32, weight, scale, block=block)


def _map_fp4(shape: tuple[int, ...], roles: Mapping[Role, Source], tensors: Mapping[str, Stored]) -> TensorMapping:
    _want_roles(roles, {Role.WEIGHT, Role.SCALE})
    weight, scale = roles[Role.WEIGHT].name, roles[Role.SCALE].name
    _want_blocks(weight, shape, 32)
    _want_shape(weight, tensors, (shape[0], shape[1] // 2))
    _want_type(scale, tensors, ("F8_E8M0",))
    _want_shape(scale, tensors, (shape[0], shape[1] // 32))
    return TensorMapping(Form.FP4, weight, scale)


def _map_nvfp4(shape: tuple[int, ...], roles: Mapping[Role, Source], tensors: Mapping[str, Stored]) -> TensorMapping:
    _want_roles(roles, {Role.WEIGHT, Role.NVFP4_SCALE, Role.NVFP4_GLOBAL_SCALE})
    weight, scale = roles[Role.WEIGHT].name, roles[Role.NVFP4_SCALE].name
    overall = roles[Role.NVFP4_GLOBAL_SCALE].name
    _want_blocks(weight, shape, 16)
    _want_shape(weight, tensors, (shape[0], shape[1] // 2))
    _want_type(scale, tensors, ("F8_E4M3",))
    _want_shape(scale, tensors, (shape[0], shape[1] // 16))
    _want_type(overall, tensors, ("F32",))
    _want_shape(overall, tensors, (), (1,))
    return TensorMapping(Form.NVFP4, weight, scale, overall)


def _want_roles(roles: Mapping[Role, Source], want: set[Role]) -> None:
    weight = quoted(roles[Role.WEIGHT].name)
    for role in sorted(want - roles.keys()):
        raise Wrong("scale missing", f"{role} of {weight}")
    for role in sorted(roles.keys() - want - {Role.NVFP4_INPUT_SCALE}):
        raise Wrong("scale not of this form", f"{quoted(roles[role].name)} beside {weight}")


def _want_blocks(name: str, shape: tuple[int, ...], width: int) -> None:
    if shape[1] % width != 0:
        raise Wrong("misshapen", f"{quoted(name)}: its {shape[1]} columns are no multiple of {width}")


def _want_type(name: str, tensors: Mapping[str, Stored], want: tuple[str, ...]) -> None:
    if tensors[name][0] not in want:
        raise Wrong("wrong type", f"{quoted(name)} is {tensors[name][0]}, want {' or '.join(want)}")


def _want_shape(name: str, tensors: Mapping[str, Stored], *want: tuple[int, ...]) -> None:
    if tuple(tensors[name][1]) not in want:
        either = " or ".join(str(list(shape)) for shape in want)
        raise Wrong("misshapen", f"{quoted(name)} is {list(tensors[name][1])}, want {either}")
