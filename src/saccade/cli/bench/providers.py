"""The providers: one function for each, which prepares a case and returns the call that is timed.

Each peer gets its arrays in its fastest layout, made contiguous before the clock starts; a dense boolean mask and
a compiled kernel are made before it starts too. The timed call is one that a user would write.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from itertools import count
from typing import Any

import numpy as np

from .cases import Case
from .clocks import Function
from .inputs import Inputs


class Skip(Exception):
    """This provider cannot run this case here; the text says why."""


@dataclass(frozen=True)
class Runner:
    """`call` is timed; `heads_first` says that its arrays are [B, H, T, D], not [B, T, H, D]."""

    call: Function
    heads_first: bool = False


def _runner(x: Inputs, forward: Callable[[Any, Any, Any], Any], *, heads_first: bool) -> Runner:
    def lay(a: Any) -> Any:
        a = a.transpose(1, 2).contiguous() if heads_first else a
        return a.detach().requires_grad_(x.case.kind == "backward" or x.case.grad)

    import torch

    q, k, v = lay(x.q), lay(x.k), lay(x.v)
    if x.case.kind != "backward":
        return Runner(lambda: forward(q, k, v), heads_first)
    o = forward(q, k, v)
    do = x.do.transpose(1, 2).contiguous() if heads_first else x.do
    return Runner(lambda: torch.autograd.grad(o, (q, k, v), do, retain_graph=True), heads_first)


def saccade(x: Inputs, quantised: str | None = None) -> Runner:
    """Saccade in the layout of its own interface; quantised: the codes in which the cache of a decode stores keys."""
    import saccade as s

    case, mask = x.case, x.mask
    if case.kind == "decode":
        device = getattr(x.k, "device", None)
        cache = s.KVCache(case.B, case.Tk, case.Hk, case.D, dtype=x.k.dtype, device=device, quantised=quantised)
        cache.append(x.k, x.v)
        return Runner(lambda: s.decode(x.q, cache, mask=mask))
    if isinstance(x.q, np.ndarray):
        if case.kind == "backward":
            o, lse = s.attention(x.q, x.k, x.v, mask, return_lse=True)
            return Runner(lambda: s.attention_backward(x.do, x.q, x.k, x.v, o, lse, mask)[:3])
        if case.grad:
            raise Skip("gradients of a call: torch is not installed")
        return Runner(lambda: s.attention(x.q, x.k, x.v, mask))
    return _runner(x, lambda q, k, v: s.attention(q, k, v, mask), heads_first=False)


def paged(page_size: int) -> Callable[[Inputs], Runner]:
    """Saccade over keys in pages of `page_size` tokens, in random order."""

    def runner(x: Inputs) -> Runner:
        import saccade as s

        if x.case.kind != "decode":
            raise Skip("keys in pages: decode alone is measured")
        pages = x.case.B * -(-x.case.Tk // page_size)
        cache = s.PagedKVCache(pages, page_size, x.case.Hk, x.case.D, dtype=x.k.dtype, device=x.k.device)
        # pages that are freed in random order are taken again in that order
        every = [cache.add() for _ in range(pages)]
        for one in every:
            cache.append([one], x.k[0, :1], x.v[0, :1])
        for one in np.random.default_rng(0).permutation(every).tolist():
            cache.remove(one)
        sequences = [cache.add() for _ in range(x.case.B)]
        cache.append(sequences, x.k.flatten(0, 1), x.v.flatten(0, 1))
        view, q = cache.view(sequences), x.q.flatten(0, 1)
        return Runner(lambda: s.paged_attention(q, view, mask=x.mask).reshape(x.q.shape))

    return runner


def sdpa(x: Inputs) -> Runner:
    """torch.nn.functional.scaled_dot_product_attention, with its causal flag if that suffices, else a boolean mask."""
    from torch.nn.functional import scaled_dot_product_attention as attend

    options: dict[str, Any] = {"enable_gqa": True} if x.case.Hq != x.case.Hk else {}
    if x.case.mask == "causal()" and x.case.Tq == x.case.Tk:
        options["is_causal"] = True
    elif x.mask is not None:
        options["attn_mask"] = x.allowed()
    return _runner(x, lambda q, k, v: attend(q, k, v, **options), heads_first=True)


def naive(x: Inputs) -> Runner:
    """Two matrix products with the scores materialised between them, in torch."""
    import torch

    group, scale = x.case.Hq // x.case.Hk, x.case.D**-0.5
    allowed = None if x.mask is None else x.allowed()

    def attend(q: Any, k: Any, v: Any) -> Any:
        if group > 1:
            k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
        s = q @ k.transpose(-1, -2) * scale
        if allowed is not None:
            s = s.masked_fill(~allowed, float("-inf"))
        return torch.softmax(s, -1) @ v

    return _runner(x, attend, heads_first=True)


def flex(x: Inputs) -> Runner:
    """torch FlexAttention, compiled, with its block mask made beforehand."""
    import torch
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    case = x.case
    if case.kind == "backward" or case.grad:
        raise Skip("FlexAttention has no backward on the CPU")
    torch.compiler.reset()
    block = None
    if x.mask is not None:
        block = create_block_mask(mask_mod(x.mask), None, None, case.Tq, case.Tk, device="cpu")
    compiled = torch.compile(flex_attention)
    gqa = case.Hq != case.Hk
    return _runner(x, lambda q, k, v: compiled(q, k, v, block_mask=block, enable_gqa=gqa), heads_first=True)


def mask_mod(mask: Any) -> Callable[[Any, Any, Any, Any], Any]:
    """FlexAttention's form of the masks that the cases use, for Tq = Tk; raises Skip for any other."""
    if mask.kind == "and":
        first, *rest = (mask_mod(child) for child in mask.children)
        return first if not rest else lambda b, h, i, j: first(b, h, i, j) & rest[0](b, h, i, j)
    if mask.kind == "causal":
        return lambda b, h, i, j: j <= i
    if mask.kind == "window" and mask.args[0] is not None:
        left = int(mask.args[0])
        return lambda b, h, i, j: j >= i - left
    if mask.kind == "strided":
        step = int(mask.args[0])
        return lambda b, h, i, j: (i - j) % step == 0
    raise Skip(f"no mask_mod written for {mask.kind}")


def onnxruntime(x: Inputs) -> Runner:
    """ONNX Runtime's CPU kernel of the standard Attention operator (opset 23), arrays bound beforehand."""
    case = x.case
    if case.dtype != "float32" or case.kind != "forward" or case.grad:
        raise Skip("ONNX Runtime's CPU kernel: fp32 forward alone is measured")
    if case.mask not in ("", "causal()"):
        raise Skip("ONNX Runtime: causal and full masks alone are measured")
    try:
        onnx, ort = importlib.import_module("onnx"), importlib.import_module("onnxruntime")
    except ImportError as error:
        raise Skip(f"{error.name} is not installed") from None
    import torch

    helper, kind = onnx.helper, onnx.TensorProto.FLOAT
    node = helper.make_node("Attention", ["q", "k", "v"], ["o"], is_causal=int(case.mask == "causal()"))
    values = {n: helper.make_tensor_value_info(n, kind, [None] * 4) for n in "qkvo"}
    graph = helper.make_graph([node], "attention", [values[n] for n in "qkv"], [values["o"]])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 23)], ir_version=10)
    options = ort.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    session = ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    binding = session.io_binding()
    arrays = {n: np.ascontiguousarray(a.transpose(1, 2).numpy()) for n, a in zip("qkv", (x.q, x.k, x.v), strict=True)}
    for name, array in arrays.items():
        binding.bind_ortvalue_input(name, ort.OrtValue.ortvalue_from_numpy(array))
    binding.bind_output("o")

    def call() -> Any:
        session.run_with_iobinding(binding)
        return binding.get_outputs()[0].numpy()

    return Runner(call, heads_first=True)


def dense(x: Inputs) -> Runner:
    """Saccade on all pairs, without the mask."""
    return saccade(replace(x, mask=None))


PROVIDERS: dict[str, Callable[[Inputs], Runner]] = {
    "saccade": saccade,
    "dense": dense,
    "paged16": paged(16),
    "paged64": paged(64),
    "paged1": paged(1),
    "int8": partial(saccade, quantised="int8"),
    "fp8": partial(saccade, quantised="fp8"),
    "int4": partial(saccade, quantised="int4"),
    "sdpa": sdpa,
    "naive": naive,
    "flex": flex,
    "onnxruntime": onnxruntime,
}


def _fresh_ids(tokens: int) -> Iterator[Any]:
    # other document lengths each time, so that no cache can answer
    for seed in count():
        cuts = np.sort(
            np.random.default_rng(seed).choice(np.arange(1, tokens), size=max(1, tokens // 1024), replace=False)
        )
        yield np.searchsorted(cuts, np.arange(tokens), side="right").astype(np.int32)


def plan_call(case: Case) -> Function:
    """Saccade for a plan case: makes mask, problem and plan from integers or ids that are new in each call."""
    from saccade import backends
    from saccade.mask import causal, documents, window
    from saccade.plan import make_plan
    from saccade.problem import Problem

    core = backends.load("cpu")
    ids = [array for array, _ in zip(_fresh_ids(case.Tk), range(4), strict=False)]
    turn = count()

    def call() -> Any:
        n = next(turn)
        mask = causal()
        if "documents" in case.mask:
            mask = mask & documents(ids[n % len(ids)])
        if "window" in case.mask:
            mask = mask & window(1023 + n, 0)
        elif "documents" not in case.mask:
            mask = causal(offset=n % case.Tk)
        problem = Problem(case.B, case.Tq, case.Tk, case.Hq, case.Hk, case.D, case.D, case.dtype, mask)
        return make_plan(problem, core.limits(problem))

    return call


def plan_flex(case: Case) -> Function:
    """The peer of a plan case: a compiled and warm create_block_mask, with its ids captured as a tensor."""
    import torch
    from torch.nn.attention.flex_attention import create_block_mask

    torch.compiler.reset()
    ids = torch.from_numpy(next(_fresh_ids(case.Tk)))
    documents, windowed = "documents" in case.mask, "window" in case.mask

    def allowed(b: Any, h: Any, i: Any, j: Any) -> Any:
        near = j <= i
        if windowed:
            near = near & (j >= i - 1023)
        return near & (ids[i] == ids[j]) if documents else near

    make = torch.compile(create_block_mask)
    return lambda: make(allowed, None, None, case.Tq, case.Tk, device="cpu")
