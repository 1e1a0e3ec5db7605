"""Compiling what a CPU runs, before the run."""

import sys
from typing import Any, Final

from numba import types

from fathom.kernels import compiled
from fathom.kernels.formats.cpu import FORMS
from fathom.model.checkpoint.census import Census
from fathom.model.checkpoint.tensor_mapping import Form

SECONDS: Final = 20  # that it takes on two cores
_WIDE, _NARROW = types.float32[::1], types.uint16[::1]  # activations in fp32 and in bfloat16
# Forms that a run in bfloat16 may multiply in fp32 too: the compressors and the router are given that, and of scales in
# fp32 it is known when they are read whether they are powers of two.
_WIDE_TOO: Final = {
    "fathom.kernels.linear.cpu._linear": ("BF16", "FP8_F32"),
    "fathom.kernels.experts.cpu._experts": ("FP8_F32",),
}
_TWINS: Final = {"bf16": _WIDE, "fp32": _NARROW}  # activations that a run of the other dtype has


def prepare_loops(census: Census, dtype: str, *, say: bool) -> None:
    """Compile what a run of a checkpoint calls in this dtype; nothing is compiled after the load.

    `say`: on stderr, where that is not on disk already and takes long.
    """
    wants = wanted(census, dtype)
    if say and not compiled.kept(wants):
        where = compiled.folder()
        after = f"kept in {where}" if where else "anew in each run, as no folder for them can be written"
        print(f"compiling loops for this processor, about {SECONDS} s, {after}", file=sys.stderr, flush=True)
    compiled.prepare(wants)


def wanted(census: Census, dtype: str) -> compiled.Wants:
    """Which functions a run calls, and with which types: of its forms of weights, and of activations in its dtype."""
    forms = {name: mapping.form for name, mapping in census.mappings.items() if name.endswith(".weight")}
    held = {_kind(form) for form in forms.values()}
    routed = {_kind(form) for name, form in forms.items() if ".ffn.experts." in name}

    def wants(name: str, signature: compiled.Signature) -> bool:
        weights = [kind for kind in signature if kind in _KINDS]
        if any(kind not in (routed if name.endswith("_experts") else held) for kind in weights):
            return False
        if dtype == "bf16" and any(FORMS[form] in signature for form in _WIDE_TOO.get(name, ())):
            return True
        return _TWINS[dtype] not in signature or not _paired(name, signature, _TWINS[dtype])

    return wants


_KINDS: Final = set(FORMS.values())


def _kind(form: Form) -> Any:
    return FORMS.get(form.name)


def _paired(name: str, signature: compiled.Signature, twin: Any) -> bool:
    """Whether a function has the same types with activations of the run's dtype in place of the other's."""
    other = _NARROW if twin == _WIDE else _WIDE
    return any(
        one != signature and _one_dtype(one) == _one_dtype(signature) and other in one
        for one in compiled.signatures(name)
    )


def _one_dtype(signature: compiled.Signature) -> compiled.Signature:
    return tuple(_WIDE if kind == _NARROW else kind for kind in signature)
