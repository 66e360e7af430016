"""Bad input: one clear error each, raised before anything is computed."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import saccade
from saccade import Unsupported
from saccade import mask as masks

try:
    import torch
except ImportError:
    torch = None

Q, K, V = (np.ones(s, np.float32) for s in ((2, 5, 6, 8), (2, 7, 3, 8), (2, 7, 3, 4)))
O, LSE = np.ones((2, 5, 6, 4), np.float32), np.ones((2, 5, 6), np.float32)


def attend(q: Any = Q, k: Any = K, v: Any = V, mask: Any = None, **options: Any) -> Callable[[], Any]:
    return lambda: saccade.attention(q, k, v, mask, **options)


def backward(do: Any = O, o: Any = O, lse: Any = LSE, **options: Any) -> Callable[[], Any]:
    return lambda: saccade.attention_backward(do, Q, K, V, o, lse, **options)


def cached(lengths: Any, q: Any = Q, k: Any = K, v: Any = V, **options: Any) -> Callable[[], Any]:
    return lambda: saccade.decode(q, SimpleNamespace(k=k, v=v, lengths=lengths), **options)


def masked(make: Callable[[], Any]) -> Callable[[], Any]:
    return lambda: saccade.attention(Q, K, V, make())


half = Q.astype(np.float16)
nan = float("nan")
inf = float("inf")
ragged = np.array([7, 3], np.int32)

CASES: dict[str, tuple[Callable[[], Any], type[Exception], str]] = {
    # arrays
    "q is a list": (attend(q=[[1.0]]), TypeError, r"q is list; expected a torch tensor or a NumPy array"),
    "q is None": (attend(q=None), TypeError, r"q is NoneType"),
    "k is a list": (attend(k=[[1.0]]), TypeError, r"k is list; expected a NumPy array"),
    "v is None": (attend(v=None), TypeError, r"v is NoneType"),
    "q masked array": (attend(q=np.ma.masked_array(Q, Q > 0)), TypeError, r"q is MaskedArray"),
    "q foreign bytes": (attend(q=Q.astype(Q.dtype.newbyteorder())), TypeError, r"byte order"),
    "q of integers": (
        attend(Q.astype(int), K.astype(int), V.astype(int)),
        TypeError,
        r"int64; expected one of float32",
    ),
    "q of booleans": (attend(Q > 0, K > 0, V > 0), TypeError, r"bool; expected one of float32"),
    "q complex": (attend(Q + 0j, K + 0j, V + 0j), TypeError, r"complex.*expected one of float32"),
    "q wider than k": (attend(q=Q.astype(float)), TypeError, r"dtypes float64, float32, float32; expected one dtype"),
    "v narrower": (attend(v=V.astype(np.float16)), TypeError, r"float32, float32, float16"),
    # ranks and sizes
    "q of rank 1": (attend(q=Q[0, 0, 0]), ValueError, r"q has shape \[8\]; expected \[B, Tq, Hq, D\]"),
    "q of rank 2": (attend(q=Q[0, 0]), ValueError, r"q has shape \[6, 8\]"),
    "q of rank 3, k of rank 4": (attend(q=Q[0]), ValueError, r"q has shape \[5, 6, 8\]"),
    "k of rank 3": (attend(k=K[0]), ValueError, r"k has shape \[7, 3, 8\]; expected \[B, Tk, Hk, D\]"),
    "v of rank 5": (attend(v=V[None]), ValueError, r"v has shape \[1, 2, 7, 3, 4\]"),
    "q of rank 0": (attend(q=np.ones((), np.float32)), ValueError, r"q has shape \[\]"),
    "batch of q and k": (attend(q=Q[:1]), ValueError, r"differ in batch, 1 and 2"),
    "batch of k and v": (attend(v=V[:1]), ValueError, r"k .* and v .* differ in batch, 2 and 1"),
    "length of k and v": (attend(v=V[:, :6]), ValueError, r"differ in length, 7 and 6"),
    "heads of k and v": (attend(v=V[:, :, :1]), ValueError, r"differ in number of heads, 3 and 1"),
    "heads that do not divide": (attend(q=Q[:, :, :4]), ValueError, r"q has 4 heads and k has 3"),
    "fewer heads than k": (attend(q=Q[:, :, :1]), ValueError, r"q has 1 heads and k has 3"),
    "no heads": (attend(Q[:, :, :0], K[:, :, :0], V[:, :, :0]), ValueError, r"expected at least one"),
    "head sizes": (attend(q=Q[..., :7]), ValueError, r"differ in head size, 7 and 8"),
    "head size 0": (attend(Q[..., :0], K[..., :0]), ValueError, r"D = 0 and Dv = 4; expected at least 1"),
    "value head size 0": (attend(v=V[..., :0]), ValueError, r"D = 8 and Dv = 0"),
    # masks
    "mask is an array": (attend(mask=np.ones((5, 7), bool)), TypeError, r"saccade\.mask\.from_dense"),
    "mask is text": (attend(mask="causal()"), TypeError, r"saccade\.mask\.parse"),
    "mask is True": (attend(mask=True), TypeError, r"mask is bool; expected None or an expression"),
    "mask is a constructor": (attend(mask=masks.causal), TypeError, r"mask is function"),
    "mask in and": (masked(lambda: masks.causal() and masks.prefix(1)), TypeError, r"&"),
    "mask & array": (masked(lambda: masks.causal() & np.ones((5, 7), bool)), TypeError, r"dense"),
    "negative window": (masked(lambda: masks.window(-1, 0)), ValueError, r"left -1 given"),
    "window of floats": (masked(lambda: masks.window(1.5)), TypeError, r"left is an integer, got 1\.5"),
    "stride 0": (masked(lambda: masks.strided(0)), ValueError, r"s 0 given, expected an integer >= 1"),
    "phase beyond the stride": (masked(lambda: masks.strided(4, 4)), ValueError, r"phase 4 given"),
    "negative radius": (masked(lambda: masks.dilated(-1, 2)), ValueError, r"radius -1 given"),
    "chunks of 0": (masked(lambda: masks.chunked(0)), ValueError, r"size 0 given"),
    "negative prefix": (masked(lambda: masks.prefix(-1)), ValueError, r"n -1 given"),
    "ids that decrease": (masked(lambda: masks.documents(np.array([0, 1, 0, 1, 1, 1, 1]))), ValueError, r"decrease"),
    "ids of floats": (masked(lambda: masks.documents(np.ones(7))), TypeError, r"integer array"),
    "too few ids": (masked(lambda: masks.documents(np.zeros(5, int))), ValueError, r"ids.*7"),
    "no document source": (masked(masks.documents), TypeError, r"documents takes one of"),
    "bounds that decrease": (masked(lambda: masks.documents(cu_seqlens=[0, 5, 3])), ValueError, r"decrease"),
    "bounds beyond the keys": (masked(lambda: masks.documents(cu_seqlens=[0, 5, 30])), ValueError, r"30"),
    "rows that end too soon": (masked(lambda: masks.columns([2] * 7, [1] * 7)), ValueError, r"start <= stop"),
    "columns of another length": (masked(lambda: masks.columns(np.zeros(5, int))), ValueError, r"start.*\[7\]"),
    "stops of another batch": (masked(lambda: masks.keys(np.array([1, 2, 3]))), ValueError, r"\[B\] = \[2\]"),
    "dense of another size": (masked(lambda: masks.dense(np.ones((7, 7), bool))), ValueError, r"dense"),
    "dense of floats": (masked(lambda: masks.dense(np.ones((5, 7)))), TypeError, r"boolean array"),
    "tiles of another size": (masked(lambda: masks.tiles(np.ones((9, 9), bool), 4)), ValueError, r"tiles"),
    "per_head of another length": (masked(lambda: masks.per_head([None] * 5)), ValueError, r"5 masks.*6 query heads"),
    "text that is no mask": (lambda: masks.parse("__import__('os')"), ValueError, r"mask"),
    # options
    "scale nan": (attend(scale=nan), ValueError, r"scale is nan; expected a finite number"),
    "scale inf": (attend(scale=inf), ValueError, r"scale is inf"),
    "scale text": (attend(scale="1"), TypeError, r"scale is '1' \(str\)"),
    "scale array": (attend(scale=np.ones(2)), TypeError, r"scale is .*ndarray"),
    "scale True": (attend(scale=True), TypeError, r"scale is True"),
    "softcap 0": (attend(softcap=0.0), ValueError, r"softcap is 0\.0; expected a positive number"),
    "softcap negative": (attend(softcap=-1.0), ValueError, r"softcap is -1\.0"),
    "softcap inf": (attend(softcap=inf), ValueError, r"softcap is inf"),
    "sinks of another length": (attend(sinks=np.ones(3, np.float32)), ValueError, r"sinks has shape \[3\]; .*\[6\]"),
    "sinks of rank 2": (attend(sinks=np.ones((2, 6), np.float32)), ValueError, r"sinks has shape \[2, 6\]"),
    "sinks of integers": (attend(sinks=np.ones(6, int)), TypeError, r"sinks has dtype int64"),
    "sinks a number": (attend(sinks=1.0), TypeError, r"sinks is float"),
    "bias of another length": (
        attend(bias=np.ones((5, 6), np.float32)),
        ValueError,
        r"broadcasts to \[B, Hq, Tq, Tk\]",
    ),
    "bias of rank 5": (
        attend(bias=np.ones((1, 2, 6, 5, 7), np.float32)),
        ValueError,
        r"bias has shape \[1, 2, 6, 5, 7\]",
    ),
    "bias of booleans": (attend(bias=np.ones((5, 7), bool)), TypeError, r"booleans go to mask="),
    "bias a number": (attend(bias=1.0), TypeError, r"bias is float"),
    "slopes of another length": (attend(bias=saccade.alibi(np.ones(3, np.float32))), ValueError, r"slopes .*\[3\]"),
    "slopes of rank 3": (attend(bias=saccade.alibi(np.ones((1, 1, 6), np.float32))), ValueError, r"slopes"),
    "slopes a list": (lambda: saccade.alibi([0.5] * 6), TypeError, r"slopes is list"),
    "dropout 1": (attend(dropout=1.0), ValueError, r"dropout is 1\.0; expected 0 <= dropout < 1"),
    "dropout negative": (attend(dropout=-0.1), ValueError, r"dropout is -0\.1"),
    "dropout nan": (attend(dropout=nan), ValueError, r"dropout is nan"),
    "dropout None": (attend(dropout=None), TypeError, r"dropout is None"),
    "seed negative": (attend(dropout=0.5, seed=-1), ValueError, r"seed is -1"),
    "seed too large": (attend(dropout=0.5, seed=1 << 64), ValueError, r"0 <= seed < 2\*\*64"),
    "seed a float": (attend(dropout=0.5, seed=1.0), TypeError, r"seed is float 1\.0"),
    "seed an array": (attend(dropout=0.5, seed=np.ones(2, int)), TypeError, r"seed is ndarray of shape \[2\]"),
    "descale of float32": (attend(descale=(1.0, 1.0, 1.0)), ValueError, r"descale .* 8-bit floats"),
    # backends
    "backend unknown": (attend(backend="cuda"), ValueError, r"backend is 'cuda'; expected None or one of cpu"),
    "backend a number": (attend(backend=1), TypeError, r"backend is int"),
    "backend elsewhere": (attend(backend="triton"), Unsupported, r"triton"),
    "head size beyond the backend": (
        attend(
            np.ones((1, 1, 1, 4096), np.float32), np.ones((1, 1, 1, 4096), np.float32), V[:1, :1, :1], backend="cpu"
        ),
        Unsupported,
        r"4096",
    ),
    # backward
    "do of another shape": (backward(do=O[:, :4]), ValueError, r"do has shape \[2, 4, 6, 4\]; expected \[2, 5, 6, 4\]"),
    "do of another dtype": (backward(do=O.astype(float)), TypeError, r"do has dtype float64; expected float32"),
    "o of another shape": (backward(o=O[..., :3]), ValueError, r"o has shape"),
    "lse of another shape": (backward(lse=LSE[..., None]), ValueError, r"lse has shape \[2, 5, 6, 1\]"),
    "lse of another dtype": (backward(lse=LSE.astype(float)), TypeError, r"lse has dtype float64"),
    "lse None": (backward(lse=None), TypeError, r"lse is NoneType"),
    "dlse of another shape": (backward(dlse=LSE[:1]), ValueError, r"dlse has shape \[1, 5, 6\]"),
    "gradient of nothing": (backward(grads=("bias",)), ValueError, r"grads asks for \['bias'\]"),
    "gradient unknown": (backward(grads=("q",), sinks=np.ones(6, np.float32)), ValueError, r"grads asks for \['q'\]"),
    "dropout without its seed": (backward(dropout=0.5), ValueError, r"give the seed of the forward call"),
    "gradient of a bias per query": (
        backward(bias=np.ones((1, 1, 5, 1), np.float32)),
        ValueError,
        r"only \[1\|B, 1\|Hq, Tq, Tk\] and \[1\|B, 1\|Hq, 1, Tk\]",
    ),
    # caches
    "deterministic as another text": (
        lambda: saccade.attention(Q, K, V, deterministic="rows"),
        ValueError,
        r"deterministic is 'rows'; expected True, False or \"batch\"",
    ),
    "deterministic as a number": (
        lambda: saccade.attention_backward(Q, Q, K, V, Q, Q[..., 0], deterministic=1),
        TypeError,
        r"deterministic is 1; expected True, False or \"batch\"",
    ),
    "causal as a mask": (
        lambda: saccade.decode(Q, saccade.KVCache(1, 4, 2, 8), causal=masks.causal()),
        TypeError,
        r"causal is causal\(\); expected True or False",
    ),
    "no cache": (lambda: saccade.decode(Q, (K, V)), TypeError, r"cache is tuple; expected a saccade\.KVCache"),
    "lengths beyond the capacity": (cached(np.array([7, 8])), ValueError, r"\[7, 8\].*capacity, 7"),
    "negative lengths": (cached(np.array([7, -1])), ValueError, r"0 <= length"),
    "lengths of another batch": (cached(np.array([7])), ValueError, r"lengths int64 \[1\]; expected .* \[2\]"),
    "cache of another dtype": (cached(ragged, q=half), TypeError, r"float16, float32, float32"),
    "cache of another batch": (cached(ragged, q=Q[:1]), ValueError, r"differ in batch"),
    "decode with an array mask": (cached(ragged, mask=np.ones((5, 7), bool)), TypeError, r"dense"),
}


def torch_cases() -> dict[str, tuple[Callable[[], Any], type[Exception], str]]:
    q, k, v = (torch.from_numpy(x) for x in (Q, K, V))
    column = torch.ones(1, 1, 5, 1, requires_grad=True)
    small = [x.to(torch.float8_e4m3fn) for x in (q, k, v)]
    six, three = torch.ones(6), torch.ones(3)
    nested = torch.nested.nested_tensor([torch.ones(2, 6, 8), torch.ones(3, 6, 8)], layout=torch.jagged)
    return {
        "torch q, NumPy k": (attend(q=q), TypeError, r"ndarray; expected a torch tensor"),
        "NumPy q, torch k": (attend(k=k), TypeError, r"k is Tensor; expected a NumPy array"),
        "torch q, NumPy sinks": (attend(q, k, v, sinks=np.ones(6, np.float32)), TypeError, r"sinks is ndarray"),
        "torch q, no v": (attend(q, k, None), TypeError, r"v is NoneType; expected a torch tensor"),
        "torch mixed dtypes": (attend(q.double(), k, v), TypeError, r"float64, float32, float32"),
        "torch mixed devices": (attend(q, k.to("meta"), v), ValueError, r"cpu, meta, cpu; expected one device"),
        "torch of integers": (attend(q.int(), k.int(), v.int()), TypeError, r"int32"),
        "torch sparse": (attend(q.to_sparse(), k, v), TypeError, r"sparse|Sparse"),
        "torch nested": (attend(nested, nested, nested), Unsupported, r"saccade\.mask\.documents"),
        "torch ranks": (attend(q[0], k, v), ValueError, r"q has shape \[5, 6, 8\]"),
        "torch mask is an array": (attend(q, k, v, torch.ones(5, 7) > 0), TypeError, r"dense"),
        "torch bias that has no gradient": (attend(q, k, v, bias=column), ValueError, r"needs a gradient"),
        "torch backend elsewhere": (attend(q, k, v, backend="triton"), Unsupported, r"triton"),
        "torch seed of two": (attend(q, k, v, dropout=0.5, seed=torch.ones(2).long()), TypeError, r"shape \[2\]"),
        "torch 8-bit floats without factors": (attend(*small), ValueError, r"descale is NoneType .* three float32"),
        "torch factor for a head too many": (
            attend(*small, descale=(six, three, six)),
            ValueError,
            r"descale of v has shape \[6\]; expected \[3\] or \[2, 3\]",
        ),
        "torch factors of float64": (
            attend(*small, descale=(six.double(), three, three)),
            ValueError,
            r"descale of q is float64",
        ),
        "torch factors of NumPy": (
            attend(*small, descale=(np.ones(6, np.float32), three, three)),
            TypeError,
            r"descale of q is ndarray",
        ),
        "torch 8-bit floats on the CPU": (attend(*small, descale=(six, three, three)), Unsupported, r"not computed on"),
        "torch sinks of integers": (attend(q, k, v, sinks=torch.ones(6).int()), TypeError, r"sinks has dtype int32"),
        "torch meta sinks": (attend(q, k, v, sinks=torch.ones(6, device="meta")), ValueError, r"sinks lives on meta"),
    }


if torch is not None:
    CASES.update(torch_cases())


@pytest.mark.parametrize("name", CASES)
def test_bad_input(name: str) -> None:
    act, kind, message = CASES[name]
    with pytest.raises(kind, match=message) as caught:
        act()
    text = str(caught.value)
    # not an internal error: the message is not empty and not long
    assert 20 < len(text) < 400
    assert caught.type is kind


@pytest.mark.parametrize("name", CASES)
def test_the_error_comes_every_time(name: str) -> None:
    act, kind, message = CASES[name]
    for _ in range(2):
        with pytest.raises(kind, match=message):
            act()


def test_there_are_enough() -> None:
    assert len(CASES) >= 60
