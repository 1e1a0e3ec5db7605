"""The machine code of the kernels that time goes into is what was recorded: a slow edit is seen without a GPU.

What one Triton makes of one text is the same to the byte, so no figure here has noise. A few instructions in a loop of
hundreds are let pass all the same: replays of a captured token lay 0.8 % of their median and more apart on the card of
the first run, and no timing would show less.
"""

import copy
import json

import pytest

from fathom.scripts.bench.gpu import CAPABILITIES
from fathom.scripts.bench.sass import COUNTED, RECORDED, TAKEN, counted
from tests.grids import on_demand
from tests.kernels.compilation import OLDEST, compiler, oldest_version
from tests.kernels.hot_kernels import HOT, found

SLACK = 0.01  # of the instructions of a loop
ANEW = "python -m tests.kernels.hot_kernels writes audits/gpu-compiled.json anew"


def differences(now, before):
    """What is other than it was, a line each."""
    told = []
    for label in dict.fromkeys((*before, *now)):
        if label not in before or label not in now:
            told.append(f"{label}: {'no longer' if label in before else 'not'} recorded")
            continue
        old, new = before[label], now[label]
        if abs(new["instructions"] / old["instructions"] - 1) > SLACK:
            told.append(f"{label}: {new['instructions']} instructions, {old['instructions']} before")
        if "per number" in old and abs(new.get("per number", 0) / old["per number"] - 1) > SLACK:
            told.append(f"{label}: {new.get('per number')} instructions a number, {old['per number']} before")
        # registers are given out by eight to a thread
        exact = {"registers": lambda kernel: -(-kernel["registers"] // 8)}
        for name in (*TAKEN, *(name for name in COUNTED if name != "instructions")):
            value = exact.get(name, lambda kernel, name=name: kernel[name])
            if value(old) != value(new):
                told.append(f"{label}: {name} {new[name]}, {old[name]} before")
    return told


@pytest.mark.parametrize(
    ("version", "capability"),  # Hopper has kernels of its own, and is what was measured
    [
        *(("installed", capability) for capability in CAPABILITIES),
        ("oldest", CAPABILITIES[0]),
        *on_demand(*(("oldest", capability) for capability in CAPABILITIES[1:])),
    ],
)
def test_hot_kernels_are_as_they_were(version, capability, tmp_path):
    before = (OLDEST,) if version == "oldest" else ()
    assert all(folder.is_dir() for folder in before), f"no {OLDEST}: `make test` brings Triton {oldest_version()} there"
    which, now = found(compiler(capability, tmp_path, *before))
    recorded = json.loads(RECORDED.read_text("utf-8"))
    assert which in recorded, f"nothing was recorded by Triton {which}: {ANEW}"
    told = differences(now, recorded[which][f"sm_{capability}"])
    assert not told, "\n".join([*told, ANEW])


LISTING = """
_kernel:
.text._kernel:
        /*0000*/                   LDC R1, c[0x0][0x28] ;
        /*0010*/                   LDG.E.64 R2, desc[UR12][R2.64] ;
.L_x_1:
        /*0020*/                   LDG.E.128.CONSTANT R4, desc[UR4][R8.64] ;
.L_x_2:
        /*0030*/              @!P0 LDGSTS.E.BYPASS.128 [R16], desc[UR4][R20.64] ;
        /*0040*/                   LDGSTS.E [R16+0x10], desc[UR4][R20.64] ;
        /*0050*/               @P1 LDG.E.U8 R12, desc[UR4][R8.64] ;
        /*0060*/                   LDG.E.U16.CONSTANT R12, desc[UR4][R8.64] ;
        /*0070*/                   LDGDEPBAR ;
        /*0080*/                   DEPBAR.LE SB0, 0x1 ;
        /*0090*/                   WARPGROUP.ARRIVE ;
        /*00a0*/                   HGMMA.64x64x16.F32.BF16 R24, gdesc[UR12], R24, gsb0 ;
        /*00b0*/                   WARPGROUP.DEPBAR.LE gsb0, 0x0 ;
        /*00c0*/               @P2 BRA `(.L_x_2) ;
        /*00d0*/                   BRA `(.L_x_3) ;
.L_x_3:
        /*00e0*/                   UTMALDG.3D [UR8], [UR4] ;
        /*00f0*/                   UTCHMMA gdesc[UR10], gdesc[UR12], tmem[UR8], tmem[UR14], idesc[UR15] ;
        /*0100*/                   HMMA.16816.F32 R4, R8, R12, R4 ;
        /*0110*/         @P0       SYNCS.PHASECHK.TRANS64.TRYWAIT P1, [UR4], R2 ;
        /*0120*/              @UP0 BRA.U `(.L_x_1) ;
        /*0130*/                   EXIT ;
.L_x_4:
        /*0140*/                   BRA `(.L_x_4);
        /*0150*/                   NOP;
.L_x_5:
"""


def test_what_is_counted():
    """By hand: the inner of two loops; a branch forward and the trap behind the end are none."""
    told = counted(LISTING)
    loads = {"1": 1, "16": 1, "2": 1, "4": 1}
    assert told["loop"] == {"instructions": 10, "loads": loads, "products": 1, "waits": 2}
    loads |= {"16": 2, "8": 1, "bulk": 1}
    assert told["whole"] == {"instructions": 22, "loads": loads, "products": 3, "waits": 3}
    straight = counted(LISTING.replace(".L_x_1:", ".L_x_6:").replace(".L_x_2:", ".L_x_7:"))
    assert straight == {"loop": None, "whole": told["whole"]}


def test_every_kind_of_difference_is_told():
    recorded = json.loads(RECORDED.read_text("utf-8"))
    before = recorded[oldest_version()]["sm_90"]
    assert set(before) == set(HOT)
    assert differences(before, before) == []
    label = next(iter(HOT))
    changes = {
        "stack": 8, "registers": before[label]["registers"] + 8, "shared": 1, "products": 1, "waits": 99,
        "loads": {"1": 4}, "instructions": int(before[label]["instructions"] * (1 + SLACK)) + 1, "per number": 99.0,
    }  # fmt: skip
    for name, value in changes.items():
        now = copy.deepcopy(before)
        now[label][name] = value
        (line,) = differences(now, before)
        assert line.startswith(f"{label}: ")
        assert str(value) in line
    within = copy.deepcopy(before)
    within[label]["instructions"] += int(before[label]["instructions"] * SLACK)
    assert differences(within, before) == []
    assert differences({}, before) == [f"{label}: no longer recorded" for label in before]
