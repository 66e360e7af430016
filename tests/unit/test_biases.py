"""Terms that are added to the scores: their sums, what they refuse, pruning by gates, and gates in caches."""

import numpy as np
import pytest

import saccade
from saccade import KVCache, PagedKVCache, alibi, attention, decode, gates, mask, paged_attention, reference, relative
from saccade.pruning import pruned

B, T, HQ, HK, D = 2, 40, 4, 2, 16


def draw(rng, heads, T=T):
    return rng.standard_normal((B, T, heads, D)).astype(np.float32)


def gate_logs(rng, T=T, mean=0.3):
    return -rng.exponential(mean, (B, T, HQ)).astype(np.float32)


def converted(kind):
    if kind == "numpy":
        return lambda x: x, {}
    torch = pytest.importorskip("torch")
    return torch.from_numpy, {"dtype": torch.float32}


@pytest.fixture(params=["numpy", "torch"])
def kind(request):
    return converted(request.param)


def test_t5_is_a_table(rng) -> None:
    # buckets of distances, some of which share a weight
    q, k, v = draw(rng, HQ), draw(rng, HK), draw(rng, HK)
    weights = rng.standard_normal((HQ, 6)).astype(np.float32)
    bucket = np.minimum(np.log2(1 + np.arange(-T, T).clip(0)).astype(int), 5)
    i, j = np.arange(T)[:, None], np.arange(T)
    dense = weights[:, bucket[(i - j) + T]][None]
    got = attention(q, k, v, mask.causal(), bias=relative(weights[:, bucket], T))
    np.testing.assert_allclose(got, attention(q, k, v, mask.causal(), bias=dense), atol=2e-6)


def test_alibi_is_a_table(rng) -> None:
    q, k, v = draw(rng, HQ), draw(rng, HK), draw(rng, HK)
    slopes = rng.uniform(0.1, 0.5, HQ).astype(np.float32)
    table = -slopes[:, None] * abs(np.arange(1 - T, T)).astype(np.float32)
    np.testing.assert_allclose(
        attention(q, k, v, bias=relative(table, T - 1)), attention(q, k, v, bias=alibi(slopes)), atol=2e-6
    )


def test_sums_are_sums(rng) -> None:
    q, k, v = draw(rng, HQ), draw(rng, HK), draw(rng, HK)
    array, slopes = rng.standard_normal((1, HQ, 1, T)).astype(np.float32), rng.uniform(0, 1, HQ).astype(np.float32)
    near, far = (rng.standard_normal((HQ, n)).astype(np.float32) for n in (5, 61))
    logs = gate_logs(rng)
    i, j = np.arange(T)[:, None], np.arange(T)
    tables = [t[:, (i - j + at).clip(0, t.shape[1] - 1)] for t, at in ((near, 2), (far, 50))]
    c = np.cumsum(logs, 1, dtype=np.float64).swapaxes(1, 2)
    dense = array + sum(tables) - slopes[:, None, None] * abs(i - j) + (c[..., :, None] - c[..., None, :])
    bias = relative(near, 2) + array + alibi(slopes) + relative(far, 50) + gates(logs)
    want = attention(q, k, v, mask.causal(), bias=dense.astype(np.float32))
    np.testing.assert_allclose(attention(q, k, v, mask.causal(), bias=bias), want, atol=5e-6)
    np.testing.assert_allclose(attention(q, k, v, mask.causal(), bias=array + (bias + -array)), want, atol=5e-6)


@pytest.mark.parametrize("origin", [-500, 0, 30, 500])
def test_a_table_is_clipped(rng, origin) -> None:
    q, k, v = draw(rng, HQ), draw(rng, HK), draw(rng, HK)
    table = rng.standard_normal((HQ, 31)).astype(np.float32)
    i, j = np.arange(T)[:, None], np.arange(T)
    dense = table[:, (i - j + origin).clip(0, 30)][None]
    np.testing.assert_allclose(
        attention(q, k, v, bias=relative(table, origin)), attention(q, k, v, bias=dense), atol=2e-6
    )


def test_documents_start_anew(rng) -> None:
    # gates before a document are passed by none of its pairs
    q, k, v, logs = draw(rng, HQ), draw(rng, HK), draw(rng, HK), gate_logs(rng)
    packed = attention(q, k, v, mask.causal() & mask.documents(cu_seqlens=np.array([0, 15, T])), bias=gates(logs))
    for part in (slice(0, 15), slice(15, T)):
        alone = attention(q[:, part], k[:, part], v[:, part], mask.causal(), bias=gates(logs[:, part]))
        np.testing.assert_allclose(packed[:, part], alone, atol=2e-6)


def test_gradients_of_gates_have_memory_of_their_own(rng) -> None:
    """torch takes no negative strides."""
    q, k, v, logs = (x.astype(np.float64) for x in (draw(rng, HQ), draw(rng, HK), draw(rng, HK), gate_logs(rng)))
    o, lse = attention(q, k, v, mask.causal(), bias=gates(logs), return_lse=True)
    *_, more = saccade.attention_backward(np.ones_like(o), q, k, v, o, lse, mask.causal(), bias=gates(logs))
    assert min(more["log_f"].strides) > 0


def test_long_sums_keep_their_digits(rng) -> None:
    n, last = 131072, 4
    k, v = (rng.standard_normal((1, n, 1, 8)).astype(np.float32) for _ in range(2))
    q, logs = rng.standard_normal((1, last, 1, 8)).astype(np.float32), np.full((1, n, 1), -1.3, np.float32)
    whole = attention(q, k, v, mask.causal(), bias=gates(logs))
    end = slice(n - 64, n)
    np.testing.assert_allclose(
        whole, attention(q, k[:, end], v[:, end], mask.causal(), bias=gates(logs[:, end])), atol=1e-6
    )


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (lambda x, log: gates(log, prune=0.0), ValueError, "0 < prune < 1"),
        (lambda x, log: gates(log, prune=0.1) + alibi(np.ones(HQ, np.float32)), ValueError, "gates alone"),
        (lambda x, log: gates(log[0]), ValueError, r"\[B, Tk, Hq\]"),
        (lambda x, log: relative(log, 0.5), TypeError, "origin"),
        (lambda x, log: relative([1.0], 0), TypeError, "an array"),
        (lambda x, log: relative(memoryview(x[0, 0]), 0) + relative(x[0, 0], 1), TypeError, "table of .* is memo"),
        (lambda x, log: attention(x, x, x, bias=gates(log)), ValueError, "causal"),
        (lambda x, log: attention(x, x, x, mask.window(3, 1), bias=gates(log)), ValueError, "later key"),
        (lambda x, log: attention(x, x, x, mask.causal(), bias=gates(-log)), ValueError, "none above 0"),
        (lambda x, log: attention(x, x, x, mask.causal(), bias=gates(log * np.inf)), ValueError, "finite"),
        (lambda x, log: attention(x, x, x, mask.causal(), bias=gates(log * np.nan)), ValueError, "finite"),
        (lambda x, log: attention(x, x, x, mask.causal(), bias=gates(log[:, 1:])), ValueError, "log_f has shape"),
        (lambda x, log: attention(x, x, x, bias=relative(log[0].T[:3], 0)), ValueError, "relative has a table"),
        (lambda x, log: attention(x, x, x, mask.causal(-1), bias=gates(log, prune=0.1)), ValueError, "own position"),
        (lambda x, log: attention(x, x, x, bias=gates(log, prune=0.1)), ValueError, "its own position"),
    ],
)  # fmt: skip
def test_refused(rng, call, error, words) -> None:
    with pytest.raises(error, match=words):
        call(draw(rng, HQ), gate_logs(rng))


@pytest.mark.parametrize("share", [0.3, 1e-3, 1e-8])
def test_a_pruned_row_loses_no_more_than_it_may(rng, share, kind) -> None:
    put, _ = kind
    n = 300
    q, k, logs = draw(rng, HQ, n), draw(rng, HK, n), gate_logs(rng, n, 2.0)
    m = mask.causal() & mask.documents(np.repeat([0, 1], n // 2)) & mask.window(250, 0)
    some = pruned(m, put(q), put(k), gates(put(logs), prune=share), None, None)
    before, after = (x.evaluate(B, HQ, n, n) for x in (m, some))
    c = np.cumsum(logs, 1, dtype=np.float64).swapaxes(1, 2)
    s = np.einsum("bthd,bshd->bhts", q.astype(np.float64), k.repeat(HQ // HK, 2)) / D**0.5
    s = np.where(before, s + c[..., :, None] - c[..., None, :], -np.inf)
    p = np.exp(s - s.max(-1, keepdims=True))
    p /= p.sum(-1, keepdims=True)
    assert (after <= before).all()
    assert after.mean() < before.mean()
    assert np.where(after, 0, p).sum(-1).max() <= share
    v = draw(rng, HK, n)
    got, want = (attention(*map(put, (q, k, v)), m, bias=gates(put(logs), prune=x)) for x in (share, None))
    np.testing.assert_allclose(got, want, atol=2 * share * abs(v).max() + 2e-6)


def test_few_keys_are_pruned_where_scores_may_be_large(rng) -> None:
    q, k, logs = draw(rng, HQ), draw(rng, HK), gate_logs(rng)
    m = mask.causal()
    assert (
        pruned(m, 100 * q, k, gates(logs, prune=0.1), None, None).evaluate(B, HQ, T, T).sum()
        == B * HQ * T * (T + 1) // 2
    )
    capped = pruned(m, 100 * q, k, gates(10 * logs, prune=0.1), None, 1.0)
    assert capped.evaluate(B, HQ, T, T).sum() < B * HQ * T * (T + 1) // 2


def last_rows(q, k, v, logs, positions=None):
    """o of the last queries of one sequence, by a bias that holds every pair."""
    c = np.cumsum(logs.astype(np.float64), 1)
    c = c if positions is None else c[:, positions]
    k, v = (x if positions is None else x[:, positions] for x in (k, v))
    bias = (c[:, -q.shape[1] :, None] - c[:, None]).transpose(0, 3, 1, 2).astype(np.float32)
    return attention(q, k, v, mask.causal(), bias=bias)[0]


def test_a_cache_holds_sums(rng, kind) -> None:
    put, options = kind
    q, k, v, logs = draw(rng, HQ, 3), draw(rng, HK), draw(rng, HK), gate_logs(rng)
    cache = KVCache(B, 64, HK, D, gate_heads=HQ, **options)
    parts = ((0, 20), (0, 15)), ((20, 37), (15, 29))
    for first, second in parts:
        n = max(first[1] - first[0], second[1] - second[0])
        one = [np.stack([x[0, first[0] :][:n], x[1, second[0] :][:n]]) for x in (k, v, logs)]
        counts = np.array([first[1] - first[0], second[1] - second[0]])
        cache.append(put(one[0]), put(one[1]), put(counts), log_f=put(one[2]))
    for b, n in enumerate((37, 29)):
        want = last_rows(q[b : b + 1], k[b : b + 1, :n], v[b : b + 1, :n], logs[b : b + 1, :n])
        np.testing.assert_allclose(decode(put(q), cache)[b], want, atol=2e-6)
    cache.evict(4, 10)
    for b, n in enumerate((37, 29)):
        positions = np.r_[:4, n - 10 : n]
        want = last_rows(q[b : b + 1], k[b : b + 1, :n], v[b : b + 1, :n], logs[b : b + 1, :n], positions)
        np.testing.assert_allclose(decode(put(q), cache)[b], want, atol=2e-6)
    cache.reset()
    cache.append(put(k[:, :5]), put(v[:, :5]), log_f=put(logs[:, :5]))
    want = last_rows(q[:1], k[:1, :5], v[:1, :5], logs[:1, :5])
    np.testing.assert_allclose(decode(put(q), cache)[0], want, atol=2e-6)


def test_pages_hold_sums(rng, kind) -> None:
    put, options = kind
    q, k, v, logs = draw(rng, HQ, 3), draw(rng, HK), draw(rng, HK), gate_logs(rng)
    pool = PagedKVCache(40, 8, HK, D, gate_heads=HQ, **options)
    sequences = pool.add(), pool.add()
    for ends in (((0, 20), (0, 15)), ((20, 37), (15, 29))):
        joined = [np.concatenate([x[b, i:j] for b, (i, j) in enumerate(ends)]) for x in (k, v, logs)]
        cu = np.cumsum([0] + [j - i for i, j in ends])
        pool.append(sequences, put(joined[0]), put(joined[1]), cu, log_f=put(joined[2]))
    fork = pool.fork(sequences[0], 30)
    pool.append([fork], put(k[1, :5]), put(v[1, :5]), log_f=put(logs[1, :5]))
    of_fork = [np.concatenate([x[0, :30], x[1, :5]])[None] for x in (k, v, logs)]
    o = paged_attention(put(q.reshape(-1, HQ, D)[:6]), pool.view(sequences))
    np.testing.assert_allclose(o[:3], last_rows(q[:1], k[:1, :37], v[:1, :37], logs[:1, :37]), atol=2e-6)
    np.testing.assert_allclose(o[3:], last_rows(q[1:], k[1:, :29], v[1:, :29], logs[1:, :29]), atol=2e-6)
    np.testing.assert_allclose(paged_attention(put(q[0]), pool.view([fork])), last_rows(q[:1], *of_fork), atol=2e-6)
    pool.evict(sequences[0], 4, 10)
    want = last_rows(q[:1], k[:1, :37], v[:1, :37], logs[:1, :37], np.r_[:4, 27:37])
    np.testing.assert_allclose(paged_attention(put(q[0]), pool.view(sequences[:1])), want, atol=2e-6)


def test_gates_of_a_cache_are_asked_for(rng, kind) -> None:
    put, options = kind
    k, logs = put(draw(rng, HK)), gate_logs(rng)
    cache, plain = KVCache(B, 64, HK, D, gate_heads=HQ, **options), KVCache(B, 64, HK, D, **options)
    with pytest.raises(ValueError, match="log_f is missing"):
        cache.append(k, k)
    with pytest.raises(ValueError, match="without gates"):
        plain.append(k, k, log_f=put(logs))
    with pytest.raises(ValueError, match="none above 0"):
        cache.append(k, k, log_f=put(-logs))
    with pytest.raises(ValueError, match="one gate per query head"):
        cache.append(k, k, log_f=put(logs[..., :2]))
    with pytest.raises(TypeError, match="log_f"):
        cache.append(k, k, log_f=[0.0])
    assert cache.lengths.tolist() == [0, 0]
    cache.append(k, k, log_f=put(logs))
    with pytest.raises(ValueError, match="so has the cache"):
        decode(put(draw(rng, HQ, 1)), cache, bias=gates(put(logs)))
    with pytest.raises(ValueError, match="multiple of 2"):
        KVCache(B, 64, HK, D, gate_heads=3)
    assert "gate_heads=4" in repr(cache)


def test_gradients_reach_buckets_and_gates() -> None:
    torch = pytest.importorskip("torch")
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 8, HQ, D, dtype=torch.float64, requires_grad=True) for _ in range(3))
    weights = torch.randn(HQ, 4, dtype=torch.float64, requires_grad=True)
    logits = torch.randn(1, 8, HQ, dtype=torch.float64, requires_grad=True)
    bucket = torch.tensor([0, 0, 1, 1, 2, 3, 3])

    def run(q, k, v, weights, logits):
        log_f = torch.nn.functional.logsigmoid(logits)
        return saccade.attention(q, k, v, mask.causal(), bias=relative(weights[:, bucket], 2) + gates(log_f))

    assert torch.autograd.gradcheck(run, (q, k, v, weights, logits))


@pytest.mark.parametrize("term", ["bias", "gates"])
def test_pages_take_terms_of_the_tables_size(rng, kind, term) -> None:
    """A bias [.., capacity] and gates [B, capacity, Hq] are cut to the keys in use, for pages as for a cache."""
    put, _ = kind
    lengths, table = np.array([21, 13], np.int32), rng.permutation(10).astype(np.int32).reshape(2, 5)
    q, k, v, logs = draw(rng, HQ, 2), draw(rng, HK), draw(rng, HK), gate_logs(rng)
    array, (pages_k, pages_v) = rng.standard_normal((B, HQ, 1, T)).astype(np.float32), np.empty((2, 10, 8, HK, D), "f")
    for x, pages in ((k, pages_k), (v, pages_v)):
        pages[table] = x.reshape(B, 5, 8, HK, D)
    given = put(array) if term == "bias" else gates(put(logs))
    cache = saccade.PagedKeys(put(pages_k), put(pages_v), put(table), put(lengths))
    got = decode(put(q), cache, mask=mask.causal(), bias=given)
    for b, n in enumerate(lengths):
        terms = {"bias": array[b : b + 1, :, :, :n]} if term == "bias" else {"log_f": logs[b : b + 1, :n]}
        one = (x[b : b + 1, :n].astype(np.float64) for x in (q, k, v))
        np.testing.assert_allclose(got[b], reference.forward(*one, mask.causal(), **terms)[0][0], atol=2e-6)


def test_arrays_without_a_batch_are_pruned(rng, kind) -> None:
    """q [T, Hq, D] with gates [1, T, Hq] is a batch of one."""
    put, _ = kind
    q, k, v, logs = draw(rng, HQ)[0], draw(rng, HK)[0], draw(rng, HK)[0], 10 * gate_logs(rng)[:1]
    m, bias = mask.causal(), gates(put(logs), prune=1e-3)
    some = pruned(m, put(q), put(k), bias, None, None).evaluate(1, HQ, T, T)
    assert np.array_equal(some, pruned(m, put(q[None]), put(k[None]), bias, None, None).evaluate(1, HQ, T, T))
    assert some.sum() < HQ * T * (T + 1) // 2
    got = attention(put(q), put(k), put(v), m, bias=bias)
    np.testing.assert_allclose(got, attention(q, k, v, m, bias=gates(logs)), atol=2e-3 * abs(v).max())
