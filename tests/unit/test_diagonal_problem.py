"""Recurrences with diagonal states: a wrong call raises one clear error."""

from __future__ import annotations

import numpy as np
import pytest

from saccade import recurrent
from saccade.testing import diagonal as catalogue
from saccade.testing import recurrent as run
from saccade.testing.recurrent import Sizes

SCAN, GATED, CONV = (
    next(op for op in catalogue.OPS if op.name == name) for name in ("selective_scan", "rg_lru", "causal_conv1d")
)


def wrong(op, *, remove=(), **changes):
    """The arrays of a row with some of them changed, and its options."""
    arrays = {**run.make(op, Sizes(), "float32"), **op.options}
    arrays = {n: changes.pop(n)(x) if callable(changes.get(n)) else x for n, x in arrays.items() if n not in remove}
    return {**arrays, **changes}


BAD = [
    (SCAN, {"u": lambda x: x[0]}, r"u has shape \[65, 48\]; expected \[B, T, D\]"),
    (SCAN, {"delta": lambda x: x[:, :-1]}, r"delta has shape \[2, 64, 48\]; expected that of u"),
    (SCAN, {"A": lambda x: x[:-1]}, r"A has shape \[47, 8\]; expected \[D, N\]"),
    (SCAN, {"B": lambda x: x[..., :-1]}, r"B has shape \[2, 65, 2, 7\]; expected \[B, T, G, N\] = \[2, 65, 2, 8\]"),
    (SCAN, {"B": lambda x: x[..., None]}, r"B has shape .*; expected \[B, T, G, N\], \[B, T, N\], \[D, N\] or \[N\]"),
    (SCAN, {"B": lambda x: x.repeat(5, 2)[:, :, :5]}, r"B has 5 groups and u 48 channels; expected G to divide D"),
    (SCAN, {"B": lambda x: x[:, :, 0]}, r"B has 1 groups and C has 2; expected the same"),
    (SCAN, {"C": lambda x: x.astype(np.float64)}, r"C has dtype float64; expected float32: cast it first"),
    (SCAN, {"D": lambda x: x[None]}, r"D has shape \[1, 48\]; expected \[D\]"),
    (SCAN, {"z": lambda x: x[:1]}, r"z has shape"),
    (SCAN, {"delta": None}, r"delta is None; expected an array"),
    (SCAN, {"delta": 1.0}, r"delta is float"),
    (SCAN, {"u": [1.0]}, r"u is list; expected a torch tensor or a NumPy array"),
    (SCAN, {"u": lambda x: x.astype(np.int32)}, r"u has dtype int32; expected one of"),
    (SCAN, {"initial_state": lambda x: x[:1]}, r"initial_state has shape \[1, 48, 8\]; expected .* = \[2, 48, 8\]"),
    (SCAN, {"initial_state": lambda x: x.astype(np.float16)}, r"initial_state has dtype float16; expected float32"),
    (SCAN, {"delta_softplus": 1}, r"delta_softplus is 1; expected True or False"),
    (SCAN, {"chunk": 0}, r"chunk is 0; expected 1 to 1024"),
    (SCAN, {"chunk": 2.0}, r"chunk is 2.0; expected None or an integer"),
    (SCAN, {"cu_seqlens": np.array([0, 65])}, r"cu_seqlens with a batch of 2; expected B = 1"),
    (SCAN, {"cu_seqlens": np.array([0.0, 65.0])}, r"cu_seqlens has dtype float64; expected int32 or int64"),
    (GATED, {"r": lambda x: x[..., :-1]}, r"r has shape \[2, 65, 47\]; expected that of x"),
    (GATED, {"i": None}, r"i is None; expected an array"),
    (GATED, {"a_param": lambda x: x[:-1]}, r"a_param has shape \[47\]; expected \[D\] = \[48\]"),
    (CONV, {"weight": lambda x: x[:, :0]}, r"weight has shape \[48, 0\]; expected \[D, K\].* K from 1 to 8"),
    (CONV, {"weight": lambda x: x.repeat(3, 1)}, r"weight has shape \[48, 12\]"),
    (CONV, {"bias": lambda x: x[:-1]}, r"bias has shape \[47\]; expected \[D\]"),
    (CONV, {"activation": "gelu"}, r"activation is 'gelu'; expected None or 'silu'"),
    (CONV, {"initial_state": lambda x: x[..., :-1]}, r"initial_state has shape \[2, 48, 2\]"),
]


@pytest.mark.parametrize("op, changes, message", BAD, ids=range(len(BAD)))
def test_bad_input(op, changes, message) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        op.call(**wrong(op, **changes))


def test_borders_that_decrease() -> None:
    arrays = run.make(SCAN, Sizes(B=1, borders=(0, 30, 65)), "float32")
    for borders in ([0, 40, 30], [1, 30, 65], [0, 30, 64]):
        arrays["cu_seqlens"] = np.array(borders)
        with pytest.raises(ValueError, match=r"cu_seqlens is \[.*\]; expected numbers from 0 to T = 65"):
            recurrent.selective_scan(**arrays)
