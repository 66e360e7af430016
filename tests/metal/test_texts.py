"""The kernels' texts: constants, parts for MLX, and rules of Metal that the emulator cannot check."""

from __future__ import annotations

import re

import pytest

from saccade.backends import plan_encoding
from saccade.backends.metal import texts
from saccade.backends.metal.shapes import shape

FILES = sorted(path.stem for path in texts.KERNELS.glob("*.metal"))
# types that a pointer or a reference may point to
POINTED = r"(?:T|U|S|N|uchar|ushort|float|int|uint|Dims|Place|Corners|Rows|Chunk|Given|simdgroup_float8x8)"


@pytest.mark.parametrize("name", FILES)
def test_every_pointer_has_an_address_space(name) -> None:
    """Metal requires an address space for every pointer; C++ has none, so the emulator cannot check it."""
    text = texts.without_comments(texts.source(name))
    for found in re.finditer(rf"([\w ]*)\b{POINTED}\s*[*&]\s*\w+", text):
        words = found[1].split()
        assert {"device", "constant", "thread", "threadgroup"} & set(words), found[0]


@pytest.mark.parametrize("name", FILES)
def test_reads_only_what_it_may(name) -> None:
    """No const is cast away, and no float has 64 bits."""
    text = texts.without_comments(texts.source(name))
    assert "const_cast" not in text
    assert not re.search(r"\bdouble\b", text)
    # a C-style cast could change a pointer's address space
    assert not re.search(r"\([\w ]*\*+\s*\)\s*[\w(&]", text)
    for cast in re.findall(r"reinterpret_cast<([^>]*)>", text):
        assert cast == "device const Dims*"


def test_fields_of_dims_match_the_text() -> None:
    text = texts.kernel("delta", {"T": "float32", "U": "float32", "DV": 8}).text
    body = re.search(r"struct Dims \{(.*?)\n\};", texts.without_comments(text), re.S)
    assert body is not None
    fields = [(kind, names.split(", ")) for kind, names in re.findall(r"(int|uint|float) ([^;]*);", body[1])]
    assert [name for _, names in fields for name in names] == [*plan_encoding.INTEGERS, *plan_encoding.FLOATS]
    assert {name for kind, names in fields if kind == "float" for name in names} == set(plan_encoding.FLOATS)


@pytest.mark.parametrize("name", texts.NAMES)
def test_header_and_body_make_up_the_text(name) -> None:
    constants = {"T": "float16", "U": "float32", "D": 40, "BC": 16, **shape(40, 40, 2).constants, "ALIBI": True}
    made = texts.kernel(name, constants)
    found = texts.signature(made.text)
    assert found.name == name
    assert made.name.startswith(name)
    assert made.body in made.text
    assert made.header in made.text
    assert "constant constexpr bool ALIBI = true;" in made.header
    assert "typedef half T;" in made.header
    assert len(made.inputs) + len(made.outputs) == sum(p.buffer for p in found.parameters) <= 31
    numbers = [int(p.attribute[7:-1]) for p in found.parameters if p.buffer]
    assert numbers == list(range(len(numbers)))
    # MLX finds attributes by the names of parameters in the body, so each name must be its attribute
    for p in found.parameters:
        if not p.buffer:
            assert re.search(rf"\b{p.name}\b", made.body)
            assert p.attribute == p.name


def test_other_constants_are_another_kernel() -> None:
    a, b = (texts.kernel("delta", {"T": "float32", "U": "float32", "DV": n}) for n in (8, 16))
    assert a.name != b.name
    assert texts.kernel("delta", {"DV": 8, "U": "float32", "T": "float32"}) is a


def test_unknown_names() -> None:
    with pytest.raises(ValueError, match="kernel is 'backwards'; expected one of single_head"):
        texts.kernel("backwards", {})
