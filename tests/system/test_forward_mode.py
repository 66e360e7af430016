"""Forward mode in torch: jvp, jacfwd, hessian, dual levels, a MeanFlow step, what is refused, and memory."""

from __future__ import annotations

import gc
import subprocess
import sys
import weakref
from collections.abc import Callable
from typing import Any

import pytest

import saccade
from saccade import Unsupported
from saccade import mask as masks

torch = pytest.importorskip("torch")
forward_ad = torch.autograd.forward_ad
func = torch.func

WIDE = torch.float64
MASK = masks.causal() & masks.window(3, 0) | masks.prefix(2)


@pytest.fixture(autouse=True)
def same_numbers(seed: int) -> None:
    torch.manual_seed(seed)


def naive(q: Any, k: Any, v: Any, mask: Any, sinks: Any = None, bias: Any = None, softcap: Any = None) -> Any:
    """(o, lse) by torch's own functions."""
    G = q.shape[2] // k.shape[2]
    k, v = (x.repeat_interleave(G, 2) for x in (k, v))
    s = torch.einsum("bthd,bjhd->bhtj", q, k) / q.shape[-1] ** 0.5
    s = s if softcap is None else softcap * torch.tanh(s / softcap)
    s = s if bias is None else s + bias
    if mask is not None:
        s = s.masked_fill(~torch.tensor(mask.evaluate(*s.shape)).expand(s.shape), -torch.inf)
    lse = s.logsumexp(-1) if sinks is None else torch.logaddexp(s.logsumexp(-1), sinks[:, None])
    return torch.einsum("bhtj,bjhd->bthd", torch.exp(s - lse[..., None]), v), lse.transpose(1, 2)


def ours(q: Any, k: Any, v: Any, mask: Any, **options: Any) -> Any:
    return saccade.attention(q, k, v, mask, return_lse=True, **options)


def qkv(B: int = 2, T: int = 5, D: int = 3, dtype: Any = WIDE) -> list[Any]:
    return [torch.randn(B, *shape, dtype=dtype) for shape in ((T, 4, D), (T, 2, D), (T, 2, 2))]


def both(make: Callable[[Callable[..., Any]], Any]) -> None:
    """What `make` returns for our attention equals what it returns for the naive one."""
    got, ref = make(ours), make(naive)
    torch.testing.assert_close(got, ref, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("mask", [None, MASK], ids=str)
def test_jvp_of_every_argument(mask: Any) -> None:
    x = [*qkv(), torch.randn(4, dtype=WIDE), torch.randn(1, 4, 5, 5, dtype=WIDE)]
    t = [torch.randn_like(y) for y in x]
    both(lambda f: func.jvp(lambda q, k, v, s, b: f(q, k, v, mask, sinks=s, bias=b, softcap=2.0), tuple(x), tuple(t)))


def test_jacfwd() -> None:
    q, k, v = qkv(1, 4)
    both(lambda f: func.jacfwd(lambda q, k, v: f(q, k, v, MASK), argnums=(0, 1, 2))(q, k, v))


def test_jacfwd_of_arguments_without_a_batch() -> None:
    sinks, (q, k, v) = torch.randn(4, dtype=WIDE), qkv()
    bias = torch.randn(2, 1, 5, 5, dtype=WIDE)
    both(lambda f: func.jacfwd(lambda s, b: f(q, k, v, MASK, sinks=s, bias=b), argnums=(0, 1))(sinks, bias))


def test_jacfwd_of_slopes_table_and_gates() -> None:
    q, k, v = qkv(1, 4)
    arrays = torch.rand(4, dtype=WIDE), torch.randn(4, 5, dtype=WIDE), -torch.rand(1, 4, 4, dtype=WIDE)

    def f(slopes: Any, table: Any, log_f: Any) -> Any:
        bias = saccade.alibi(slopes) + saccade.relative(table, 2) + saccade.gates(log_f)
        return saccade.attention(q, k, v, masks.causal(), bias=bias)

    for forward, reverse in zip(func.jacfwd(f, (0, 1, 2))(*arrays), func.jacrev(f, (0, 1, 2))(*arrays), strict=True):
        torch.testing.assert_close(forward, reverse)


@pytest.mark.parametrize("mask", [None, MASK], ids=str)
def test_hessian(mask: Any) -> None:
    x = [*qkv(1, 3, 2), torch.randn(4, dtype=WIDE), torch.randn(1, 4, 3, 3, dtype=WIDE)]

    def make(f: Any) -> Any:
        def loss(q: Any, k: Any, v: Any, sinks: Any, bias: Any) -> Any:
            o, lse = f(q, k, v, mask, sinks=sinks, bias=bias, softcap=2.0)
            return o.sin().sum() + lse.cos().sum()

        return func.hessian(loss, argnums=(0, 1, 2, 3, 4))(*x)

    both(make)


def test_a_tangent_of_only_the_cotangent() -> None:
    """The gradient is linear in do: its tangent is the gradient for the tangent of do."""
    q, k, v = qkv()
    do, moved = torch.randn(2, 5, 4, 2, dtype=WIDE), torch.randn(2, 5, 4, 2, dtype=WIDE)

    def make(f: Any) -> Any:
        _, vjp = func.vjp(lambda q, k, v: f(q, k, v, MASK)[0], q, k, v)
        return func.jvp(vjp, (do,), (moved,))

    both(make)


def test_dual_tensors() -> None:
    q, k, v = qkv()
    moved = torch.randn_like(q)
    with forward_ad.dual_level():
        got = forward_ad.unpack_dual(saccade.attention(forward_ad.make_dual(q, moved), k, v, MASK)).tangent
    ref = func.jvp(lambda q: naive(q, k, v, MASK)[0], (q,), (moved,))[1]
    torch.testing.assert_close(got, ref)


def test_a_backward_within_a_dual_level() -> None:
    """The graph is from before the level, its cotangent has a tangent."""
    q, k, v = qkv()
    leaf, do = q.clone().requires_grad_(), torch.randn(2, 5, 4, 2, dtype=WIDE)
    o = saccade.attention(leaf, k, v, MASK)
    with forward_ad.dual_level():
        dq = torch.autograd.grad(o, leaf, forward_ad.make_dual(do, 2 * do))[0]
        dq, tangent = forward_ad.unpack_dual(dq)
    torch.testing.assert_close(tangent, 2 * dq)


@pytest.mark.skipif(torch.__version__ < "2.10", reason="torch 2.9 reads no numbers of tensors inside of func.jvp")
def test_decode() -> None:
    q, k, v = qkv(dtype=torch.float32)
    cache = saccade.KVCache.like(k, v, capacity=8)
    cache.append(k, v)
    got = func.jvp(lambda q: saccade.decode(q[:, -1:], cache), (q,), (q,))
    torch.testing.assert_close(got, func.jvp(lambda q: naive(q[:, -1:], k, v, None)[0], (q,), (q,)))


def test_finite_differences() -> None:
    x = [y.requires_grad_() for y in qkv(1, 4)]
    f = lambda *x: saccade.attention(*x, MASK, return_lse=True)  # noqa: E731
    assert torch.autograd.gradcheck(f, x, check_forward_ad=True, check_batched_forward_grad=False)


class Net(torch.nn.Module):
    """u(z, r, t): one attention block on tokens z [B, T, 8] with both times."""

    def __init__(self, attend: Any) -> None:
        super().__init__()
        self.attend, self.times = attend, torch.nn.Linear(2, 8)
        self.qkv, self.out = torch.nn.Linear(8, 24), torch.nn.Linear(8, 8)

    def forward(self, z: Any, r: Any, t: Any) -> Any:
        x = z + self.times(torch.stack([r, t], -1))[:, None]
        q, k, v = self.qkv(x).unflatten(-1, (3, 2, 4)).unbind(2)
        return self.out(x + self.attend(q, k, v, None)[0].flatten(2))


def meanflow_loss(net: Any, x: Any, noise: Any, r: Any, t: Any) -> Any:
    """Geng et al., 2025: the mean velocity's target has its derivative along the path, and no gradient."""
    z, velocity = (1 - t)[:, None, None] * x + t[:, None, None] * noise, noise - x
    u, du = func.jvp(net, (z, r, t), (velocity, torch.zeros_like(r), torch.ones_like(t)))
    target = velocity - (t - r)[:, None, None] * du
    return (u - target.detach()).square().mean()


def test_a_meanflow_step() -> None:
    x, noise, r = torch.randn(3, 6, 8), torch.randn(3, 6, 8), torch.rand(3) / 2
    t, gradients = r + torch.rand(3) / 2, []
    for attend in (ours, naive):
        torch.manual_seed(1)
        net = Net(attend)
        meanflow_loss(net, x, noise, r, t).backward()
        gradients.append([p.grad for p in net.parameters()])
    torch.testing.assert_close(gradients[0], gradients[1])


def test_meanflow_trains() -> None:
    net, x, noise, r = Net(ours), torch.randn(8, 4, 8), torch.randn(8, 4, 8), torch.rand(8) / 2
    optimizer, losses = torch.optim.Adam(net.parameters(), 1e-2), []
    for _ in range(40):
        loss = meanflow_loss(net, x, noise, r, r + 0.25)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.8 * losses[0]


def test_a_gradient_through_a_tangent_is_refused() -> None:
    q, k, v = qkv()
    q.requires_grad_()
    tangent = func.jvp(lambda q: saccade.attention(q, k, v), (q,), (torch.ones_like(q),))[1]
    with pytest.raises(Unsupported, match="a gradient through a tangent is not computed: detach"):
        tangent.sum().backward()
    with pytest.raises(Unsupported, match="a gradient through a tangent is not computed"):
        func.jacrev(func.jacfwd(lambda q: saccade.attention(q, k, v).sum()))(q.detach())


def test_a_tangent_of_a_tangent_is_refused() -> None:
    q, k, v = qkv(1, 3)
    with pytest.raises(Unsupported, match="a tangent of a tangent is not computed"):
        func.jacfwd(func.jacfwd(lambda q: saccade.attention(q, k, v).sum()))(q)


def test_third_derivatives_are_refused() -> None:
    q, k, v = qkv(1, 2, 1)
    f = lambda q: saccade.attention(q, k, v).sum()  # noqa: E731
    with pytest.raises(Unsupported, match="a tangent of a tangent"):
        func.jacfwd(func.hessian(f))(q)
    with pytest.raises(Unsupported, match="third derivatives"):
        func.jacfwd(func.jacrev(func.jacrev(f)))(q)


def test_backends_without_it_refuse() -> None:
    q, k, v = qkv(dtype=torch.float32)
    lists = masks.select(torch.zeros(1, 2, 5, 1, dtype=torch.int32))
    with pytest.raises(Unsupported, match="forward-mode derivatives with selected keys are not computed here"):
        func.jvp(lambda q: saccade.attention(q, k, v, lists), (q,), (q,))


@pytest.mark.parametrize("earlier", [False, True])
def test_compiled_calls_are_refused(earlier: bool) -> None:
    """Dynamo drops tangents before torch 2.14, also if it has traced a call before (pytorch issue 192985)."""
    q, k, v = qkv(dtype=torch.float32)

    def step(q: Any) -> Any:
        o = saccade.attention(q, k, v) if earlier else q
        return o, func.jvp(lambda q: saccade.attention(q, k, v), (q,), (q,))

    wanted = step(q)
    torch._dynamo.reset()
    compiled: Any = torch.compile(step, backend="aot_eager")
    if torch.__version__ >= "2.14":
        torch.testing.assert_close(compiled(q), wanted)
        return
    with pytest.raises(Exception, match="forward mode is not compiled, because Dynamo drops tangents"):
        compiled(q)


def test_compiled_calls_of_dual_tensors_are_refused() -> None:
    q, k, v = qkv(dtype=torch.float32)
    compiled = torch.compile(lambda q: saccade.attention(q, k, v), backend="aot_eager")
    compiled(q)
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(q, q)
        with pytest.raises(Exception, match="forward mode is not compiled, because Dynamo drops tangents"):
            compiled(dual)


def test_tensors_are_freed() -> None:
    q, k, v = qkv()
    gc.collect()
    gc.disable()
    try:
        q.requires_grad_()
        o, tangent = func.jvp(lambda q: saccade.attention(q, k, v), (q,), (torch.ones_like(q),))
        kept = weakref.ref(o), weakref.ref(tangent)
        del o, tangent
        assert [x() for x in kept] == [None, None]
    finally:
        gc.enable()


PEAK = """
import sys, torch, saccade
from saccade import mask
from saccade.memory import resident
def go(T, D=16):
    q, k, v, t = (torch.randn(1, T, 1, D) for _ in range(4))
    f = lambda *x: saccade.attention(*x, mask.causal(), return_lse=True)
    _, (do, dlse) = torch.func.jvp(f, (q, k, v), (t, t, t))
    assert torch.isfinite(do).all() and torch.isfinite(dlse).all()
peak = lambda: resident()[1] / 2**20
go(64)
before = peak()
go(int(sys.argv[1]))
print(peak() - before)
"""


def growth(T: int) -> float:
    done = subprocess.run([sys.executable, "-c", PEAK, str(T)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return float(done.stdout)


@pytest.mark.skipif(sys.platform == "win32", reason="Windows does not report the peak")
@pytest.mark.parametrize("T", [16384, pytest.param(131072, marks=[pytest.mark.slow, pytest.mark.timeout(900)])])
def test_memory_grows_with_the_length(T: int) -> None:
    # eight arrays [T, 16] in float32 and two of the rows take 65 MiB at T = 131072; all scores would take 64 GiB
    assert growth(T) < 32 + 160 * T / 131072
