"""Address spaces, checked by clang: the kernels' texts respect them, and every violation is found."""

from __future__ import annotations

import pytest

from saccade.backends.metal import texts
from saccade.backends.metal.recurrent import PLACES
from saccade.backends.metal.shapes import shape
from saccade.testing.metal.spaces import diagnostics

OPTIONS = (
    "SOFTCAP",
    "BIAS",
    "ALIBI",
    "RELATIVE",
    "GATES",
    "DROPOUT",
    "HEADS_FIRST",
    "MERGE",
    "SINKS",
    "DLSE",
    "SLOPES",
    "SUMS",
    "FAR",
)
OPTIONS += ("EACH_B", "EACH_H", "BY_DISTANCE")
LINEAR = {"K": 40, "V": 24, "MAP": 1, "C": 32, "BC": 32, "VC": 24, "THREADS": 128, "SIMDGROUPS": 4, "KB": 32, "DC": 32}


def text_of(name: str, dtype: str = "float16", on: bool = True, **more: object) -> str:
    """The text of a kernel with all of its options, or none."""
    constants: dict[str, object] = {"T": dtype, "U": "float32", **dict.fromkeys(OPTIONS, on)}
    if name.startswith("linear"):
        flags = ("NORMALIZE", "CAUSAL", "TOTALS", "BACKWARD", "INITIAL", "KEEP")
        return texts.kernel(name, constants | LINEAR | {"LEFT": 3} | dict.fromkeys(flags, on) | more).text
    sizes = {"D": 72, "DV": 40, "LIST": 32, "ROWS": 4, **shape(72, 40, 2, name == "gradients").constants}
    flags = {"PACKED": on, "KEYS": on, "FIRST": True, "SECOND": on, "ROPE": 2 * on, "CODES": 0, "GROUP": 1, "S": dtype}
    return texts.kernel(name, constants | sizes | flags | more).text


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("name", texts.NAMES)
def test_every_kernel(name, dtype) -> None:
    for on in (False, True):
        assert diagnostics(text_of(name, dtype, on)) == []


@pytest.mark.parametrize("codes", [1, 2, 3])
def test_keys_as_codes(codes) -> None:
    assert diagnostics(text_of("forward", CODES=codes, GROUP=32, S="uint8")) == []


@pytest.mark.parametrize("place", PLACES.values())
def test_every_output_of_linear_attention(place) -> None:
    assert diagnostics(text_of("linear_outputs", LEFT=place)) == []


# (kernel, old, new, clang's message) by mistake
BROKEN = {
    "a tile in place of device memory": ("forward", "rows_of(k, k_scales)", "queries", "no matching function"),
    "device memory in place of a tile": (
        "forward", "stage(staged, rows_of(k", "stage(o, rows_of(k", "no matching function",
    ),
    "a pointer without a space": (
        "forward", "device const int* segment = side", "const int* segment = side", "cannot initialize",
    ),
    "another space": (
        "gradients", "device const int* segment = side", "threadgroup const int* segment = side", "cannot initialize",
    ),
    "a reference without a space": (
        "restate", "Numbers dims = *reinterpret_cast<device const Dims*>",
        "const Dims& dims = *reinterpret_cast<const Dims*>", "is not allowed",
    ),
    "an input written": (
        "combine", "float y = 0.0f;", "float y = 0.0f; partial_lse[0] = 0.0f;", "read-only|const-qualified",
    ),
    "a matrix from the thread's memory": (
        "linear_states", "add<true, VC / 8>(more, keys", "float own[64]; add<true, VC / 8>(more, own",
        "no matching function",
    ),
    "a tile of the whole program": (
        "linear_outputs", "threadgroup float* tile = tiles", "device float* tile = tiles", "cannot initialize",
    ),
    "an attribute that does not exist": (
        "forward", "lane = thread_index_in_simdgroup", "lane = thread_index_in_quadgroup", "undeclared",
    ),
}  # fmt: skip


@pytest.mark.parametrize("mistake", BROKEN)
def test_violations_are_found(mistake) -> None:
    name, old, new, message = BROKEN[mistake]
    text = text_of(name)
    assert old in text
    found = diagnostics(text.replace(old, new, 1))
    assert any(part in line for part in message.split("|") for line in found), found
