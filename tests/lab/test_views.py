"""The numbers of each view against the library's own definitions."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from saccade import cost, mask, reference
from saccade.errors import Unsupported
from saccade.lab import costs, kernels, masks, online, query, views
from saccade.testing.cases import MASKS

Explained = Callable[[str, int, dict[str, str]], dict[str, Any]]
WIDE = {"tq": "96", "tk": "130"}


def cells(data: dict[str, Any]) -> np.ndarray:
    return np.frombuffer(base64.b64decode(data["states"]), np.uint8).reshape(data["rows"], data["columns"])


@pytest.mark.parametrize(
    "text", [MASKS[name] for name in ("causal", "window", "strided-window", "not-window", "union")]
)
def test_picture_is_the_mask(text: str):
    data = masks.picture({"mask": text, "tq": "70", "tk": "101"})
    np.testing.assert_array_equal(cells(data) == 2, mask.parse(text).evaluate(1, 1, 70, 101)[0, 0])
    assert data["cell"] == 1
    # of larger ones a cell is all or nothing only where its pairs are
    data = masks.picture({"mask": text, "tq": "300", "tk": "300"})
    allowed = mask.parse(text).evaluate(1, 1, 300, 300)[0, 0]
    for (row, column), state in np.ndenumerate(cells(data)):
        inside = allowed[row * 3 : row * 3 + 3, column * 3 : column * 3 + 3]
        assert inside.any() == (state > 0) or (state == 1 and not inside.all())
        assert state != 2 or inside.all()


@pytest.mark.parametrize("device", ["cpu", "h100", "m3", "webgpu"])
@pytest.mark.parametrize("text", ["causal() & (window(20, 0) | strided(16))", "per_head([causal(), strided(4)])"])
def test_segments_cover_what_the_mask_allows(device: str, text: str):
    data = masks.visits({"mask": text, "device": device, "head": "1", **WIDE})
    if "lacks" in data:
        pytest.skip(f"{device}: {data['lacks']}")
    allowed = mask.parse(text).evaluate(1, 2, 96, 130)[0, -1]
    visited = np.zeros((96, 130), int)
    for part in data["parts"]:
        for one in part["classes"]:
            rows = one["start"][0] + part["step"] * np.arange(one["rows"])
            for n, segments in enumerate(one["tiles"]):
                for begin, end, kind in segments:
                    keys = one["start"][1] + part["step"] * np.arange(begin, end)
                    tile = np.ix_(rows[n * data["tile_q"] : (n + 1) * data["tile_q"]], keys)
                    visited[tile] += 1
                    assert kind == 1 or allowed[tile].all()
    assert np.all(visited[allowed])
    heads = 2 if "per_head" in text else 1
    assert data["pairs"] == heads * 96 * 130
    assert data["allowed"] == mask.parse(text).evaluate(1, heads, 96, 130).sum()


SIZES = (("1024", "1024", "bfloat16", "128"), ("300", "500", "float32", "64"), ("2000", "2000", "float16", "256"))


@pytest.mark.sample(12)
@pytest.mark.parametrize("text", masks.EXAMPLES.values(), ids=list(masks.EXAMPLES))
@pytest.mark.parametrize("sizes", SIZES, ids="-".join)
def test_plans_are_those_of_explain(explained: Explained, text: str, sizes: tuple[str, ...]):
    """The same tiles and counts for the same mask, sizes, dtype, head size and device."""
    query = dict(zip(("tq", "tk", "dtype", "d"), sizes, strict=True)) | {"mask": text}
    if "documents" in text:
        query |= {"tq": "1024", "tk": "1024"}
    if "global" in text:
        query |= {"tk": str(max(1024, int(query["tk"])))}
    heads = 4 if "per_head" in text else 1
    for device in ("zen5", "h100", "rtx-4090", "m3", "webgpu"):
        data = masks.visits(query | {"device": device})
        printed = explained(device, heads, query)
        if "lacks" in data:
            assert {"not computed", "not known here"} & set(printed["kernels"]), (device, data["lacks"])
            continue
        assert (data["tile_q"], data["tile_k"], data["plan"]) == (printed["tile_q"], printed["tile_k"], printed["plan"])
        counts = ("tiles", "full", "partial", "pairs", "visited", "allowed", "exact", "skipped")
        assert {name: data[name] for name in counts} == {name: printed["count"][name] for name in counts}, device


def test_a_plan_depends_on_the_dtype_and_the_head_size():
    """The Hopper kernels compute 16-bit heads of 128 in tiles of 128 × 128."""
    pytest.importorskip("triton")
    pytest.importorskip("torch")
    tiles = {
        (dtype, d): (data["tile_q"], data["tile_k"])
        for dtype in ("bfloat16", "float32")
        for d in ("64", "128")
        for data in [masks.visits({"mask": "causal()", "device": "h100", "dtype": dtype, "d": d})]
    }
    assert tiles["bfloat16", "128"] == (128, 128)
    assert tiles["float32", "128"] != (128, 128)


def test_worked_example_of_known_weights():
    """The rows of weights come back from their logarithms."""
    data = online.trace({"example": "weights"})
    skipped = [(step["i"], step["j"]) for step in data["steps"] if "s" not in step]
    assert skipped == [(0, 1)]
    rows = np.concatenate([step["o"] for step in data["steps"] if "o" in step])
    for row, weights in zip(rows, online.WEIGHTS, strict=True):
        # printed with four digits, they add up to 1 within two of the last
        np.testing.assert_allclose(row[: len(weights)], weights, atol=2e-4)
        assert not row[len(weights) :].any()


def test_worked_example_of_a_grid():
    """8 tokens of 128 numbers in blocks of 2: a grid of 4 × 4 steps of 2 × 2 scores, outputs of 2 × 128."""
    data = online.trace({"example": "grid"})
    assert [(step["i"], step["j"]) for step in data["steps"]] == [(i, j) for i in range(4) for j in range(4)]
    assert all(np.shape(step["s"]) == (2, 2) and np.shape(step["acc"]) == (2, 128) for step in data["steps"])


@pytest.mark.parametrize(
    "text", ["full()", "causal()", "causal() & window(3, 0)", "strided(3)", "keys(0)", "prefix(2)"]
)
@pytest.mark.parametrize("tiles", [(1, 1), (2, 3), (4, 2), (8, 8)])
def test_steps_end_at_the_oracle(text: str, tiles: tuple[int, int]):
    head = online.example("own", 11, 5, 3, mask.parse(text))
    found = online.steps(head, *tiles)
    o, lse = reference.forward(head.q[None, :, None], head.k[None, :, None], head.v[None, :, None], head.mask)
    ends = {step["i"]: step for step in found if "o" in step}
    for i in range(-(-11 // tiles[0])):
        rows = slice(i * tiles[0], (i + 1) * tiles[0])
        if i in ends:
            np.testing.assert_allclose(ends[i]["o"], o[0, rows, 0], atol=1e-14)
            np.testing.assert_allclose(ends[i]["lse"], lse[0, rows, 0], atol=1e-14)
        else:
            assert np.all(lse[0, rows, 0] == -np.inf)
    allowed = np.broadcast_to(mask.parse(text).evaluate(1, 1, 11, 11)[0, 0], (11, 11))
    for step in found:
        tile = allowed[step["i"] * tiles[0] :, step["j"] * tiles[1] :][: tiles[0], : tiles[1]]
        assert "s" in step or not tile.any()


def test_steps_of_ones_own_scores():
    """Each row of the output is the softmax of a row of scores; the naive sum overflows where exp does."""
    data = online.trace({"example": "scores", "scores": "1, 2 3 100\n4 3 2 1; -1 0.5 2e1 7", "bq": "2", "bk": "3"})
    assert (data["queries"], data["keys"]) == (3, 4)
    scores = np.array([[1, 2, 3, 100], [4, 3, 2, 1], [-1, 0.5, 20, 7]])
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    weights /= weights.sum(-1, keepdims=True)
    ends = [step for step in data["steps"] if "o" in step]
    np.testing.assert_allclose(np.concatenate([step["o"] for step in ends]), weights, atol=1e-15)
    naive = [x for step in ends for x in step["naive"]]
    assert naive[0] == "overflow"
    np.testing.assert_allclose(naive[1:], np.exp(scores[1:]).sum(-1), rtol=1e-6)
    # before the step with 100, the sum of the first row is finite
    np.testing.assert_allclose(data["steps"][0]["naive"][0], np.exp(scores[0, :3]).sum(), rtol=1e-6)


@pytest.mark.parametrize(
    ("scores", "words"),
    [
        ("1 2\n3", "Scores have 2 lines of 2, 1 numbers"), ("", "Scores have 0 lines of no numbers"),
        ("1 two", "Scores have 'two'"), ("1 nan", "outside ±1e+06"), ("1e9", "outside ±1e+06"),
        (" ".join(["1"] * 40), "at most 32"),
    ],
)  # fmt: skip
def test_scores_that_are_refused(scores: str, words: str):
    status, data = views.answer(online.trace, {"example": "scores", "scores": scores})
    assert (status, data["field"]) == (400, "scores")
    assert words in data["error"]


@pytest.mark.parametrize("text", [*masks.EXAMPLES.values(), "documents([0, 0, 1])", "dense([[1, 0], [1, 1]])"])
def test_a_copy_in_python_makes_the_mask(text: str):
    made: dict[str, Any] = {}
    exec(masks.python_of(str(mask.parse(text))), made)
    assert str(made["mask"]) == str(mask.parse(text))


def test_roofline_of_the_rows():
    data = costs.roofline({"device": "h100"})
    assert data["ridge"] == pytest.approx(298.5, abs=0.05)
    by_kind = {work["kind"]: work for work in data["works"]}
    assert by_kind["prefill"]["bound"] == "compute"
    assert by_kind["decode"]["bound"] == by_kind["naive"]["bound"] == "bandwidth"
    assert by_kind["decode"]["intensity"] == pytest.approx(4, rel=0.01)
    assert by_kind["prefill"]["pairs"] == 32 * 4096 * 4097 // 2
    assert by_kind["backward"]["flops"] == 2.5 * by_kind["prefill"]["flops"]


def test_caches_of_the_rows():
    data = costs.caches({"model": "llama-2-70b"})
    own = next(g for g in data["groupings"] if g["own"])
    assert own["bytes"] == cost.MODELS["llama-2-70b"].cache_bytes(4096, 64) == 80 * 1024**3
    assert not own["fits"]
    assert (own["token"].split(" (")[0], own["sequence"].split(" (")[0]) == ("320 KiB", "1.25 GiB")
    wide = {g["grouping"]: g["smaller"] for g in costs.caches({"model": "gpt-3-175b"})["groupings"]}
    assert wide == {"MHA": 1, "GQA": 12, "MQA": 96}


def test_caches_of_latents_and_windows():
    data = costs.caches({"model": "deepseek-v3", "tokens": "1000", "batch": "2"})
    own = [g for g in data["groupings"] if g["own"]]
    assert [(g["grouping"], g["kv_heads"], g["bytes"]) for g in own] == [("MLA", None, 2 * 1000 * 61 * 576 * 2)]
    assert own[0]["smaller"] == pytest.approx(71.11, abs=0.01)
    data = costs.caches({"model": "gemma-3-27b", "tokens": "2048", "batch": "1"})
    (own,) = [g for g in data["groupings"] if g["own"]]
    assert own["bytes"] == (10 * 2048 + 52 * 1024) * 16 * 256 * 2
    listed = {m["name"]: m["bytes"] for m in data["models"]}
    assert listed == {name: model.cache_bytes(2048, 1) for name, model in cost.MODELS.items()}


@pytest.mark.parametrize("direction, outputs", [("forward", 2), ("backward", 5), ("decode", 1)])
@pytest.mark.parametrize("which", ["documented", "tiled"])
def test_jobs_are_complete(which: str, direction: str, outputs: int):
    pytest.importorskip("wgpu")
    limits = {"max-storage-buffers-per-shader-stage": "10"}
    data = query.plain(kernels.job({"set": which, "direction": direction, "t": "40", "d": "32", **limits}))
    assert len(data["tolerance"]) == outputs
    sizes = [buffer["size"] for buffer in data["buffers"]]
    for step in data["steps"]:
        assert f"fn {step['entry']}(" in data["texts"][step["text"]]
        assert len(step["bindings"]) == len(step["kinds"])
        assert all(offset + size <= sizes[n] for n, offset, size in step["bindings"])
    for name, tolerance in data["tolerance"].items():
        array = data["arrays"][name]
        assert 4 * np.prod(array["shape"]) <= sizes[array["buffer"]]
        assert isinstance(tolerance, str) or 0 < tolerance < 1e-4
    bits = np.unpackbits(np.frombuffer(base64.b64decode(data["allowed"]), np.uint8))
    assert bits.sum() == (40 if direction == "decode" else 40 * 41 // 2)


@pytest.mark.parametrize(
    "view, given, message",
    [
        (masks.picture, {"mask": "__import__('os')"}, "unknown mask"),
        (masks.picture, {"tq": "0"}, "Queries is '0'; expected an integer from 1 to 4096"),
        (masks.picture, {"tq": "9" * 5000}, "expected an integer"),
        (masks.visits, {"device": "abacus"}, "Device is 'abacus'; expected one of cpu"),
        (masks.visits, {"d": "0"}, "Head size is '0'"),
        (masks.visits, {"dtype": "int8"}, "Dtype is 'int8'; expected one of bfloat16"),
        (masks.visits, {"mask": "per_head([causal()])", "tk": "٣"}, "expected an integer"),
        (online.trace, {"example": "none"}, "expected one of grid"),
        (costs.roofline, {"heads": "32", "kv": "5"}, "expected a number that divides"),
        (costs.caches, {"device": "toaster"}, "expected one of h100"),
        (kernels.job, {"d": "30"}, "multiple of 4"),
        (kernels.job, {"t": "1024", "heads": "32"}, "at most"),
        (kernels.job, {"direction": "decode", "t": "8192", "heads": "32", "d": "256"}, "at most"),
        (kernels.job, {"set": "documented", "mask": "full()"}, "choose causal()"),
    ],
)
def test_what_does_not_fit_is_refused(view: Any, given: dict[str, str], message: str):
    with pytest.raises(ValueError) as error:
        view(given)
    assert message in str(error.value)


def test_a_device_too_small_is_told():
    pytest.importorskip("wgpu")
    with pytest.raises(Unsupported) as error:
        kernels.job({"set": "documented", "direction": "backward"})
    assert "9 storage buffers" in str(error.value)


@pytest.mark.parametrize(
    ("view", "given", "words"),
    [
        ("mask", {"tq": "1000000"}, "Queries is '1000000'"), ("softmax", {"bq": "0"}, "Queries per tile is '0'"),
        ("roofline", {"heads": "3", "kv": "2"}, "KV heads is 2"), ("roofline", {"d": "x"}, "Head size is 'x'"),
        ("kernel", {"d": "5"}, "Head size is 5"),
        ("visits", {"backend": "webgpu"}, "'backend' is no field of this view; its fields are mask, tq"),
    ],
)  # fmt: skip
def test_errors_name_fields_as_the_page_does(view: str, given: dict[str, str], words: str) -> None:
    status, data = views.answer(views.VIEWS[view], given)
    assert status == 400
    assert words in data["error"]


@pytest.mark.parametrize("text", ["keys(99)", "global_tokens([0, 99])", "documents(cu_seqlens=[0, 99])"])
def test_a_mask_that_a_call_refuses_has_no_view(text: str):
    sizes = {"mask": {"tq": "64", "tk": "64"}, "visits": {"tq": "64", "tk": "64"}}
    sizes |= {"roofline": {"t": "64"}, "softmax": {"t": "8", "example": "own"}}
    for name, fields in sizes.items():
        status, data = views.answer(views.VIEWS[name], {"mask": text, **fields})
        assert (status, data["field"]) == (400, "mask"), name
        assert "to 99, expected 0 to" in data["error"]


def test_a_deeply_nested_mask_is_refused():
    text = "~(causal & " * 190 + "full" + ")" * 190
    status, data = views.answer(views.VIEWS["mask"], {"mask": text})
    assert (status, data["field"]) == (400, "mask")


def test_a_name_that_is_no_text_is_sent_as_an_escape():
    assert json.loads(views.encoded(200, {"model": "a\udcff"})[1])["model"] == "a\udcff"
