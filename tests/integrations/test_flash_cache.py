"""flash_attn_with_kvcache: refusals, which leave the cache unchanged, and calls on a device and in graphs."""

from __future__ import annotations

from unittest import mock

import pytest
import torch

from saccade import Unsupported
from saccade.caches import torch as tensors
from saccade.integrations import flash_arguments, flash_places
from saccade.integrations.flash_attn import flash_attn_func, flash_attn_with_kvcache
from saccade.mask import causal

B, T, HQ, HK, D, PAGE = 2, 2, 4, 2, 16, 8


def rand(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def ints(*numbers: int) -> torch.Tensor:
    return torch.tensor(numbers, dtype=torch.int32)


def bytes_of(*tensors: torch.Tensor) -> list[bytes]:
    return [x.contiguous().view(torch.uint8).numpy().tobytes() for x in tensors]


def new(**changes):
    """Arguments of an append that fits, with some of them replaced."""
    given = {
        "q": rand(B, 1, HQ, D), "k_cache": rand(B, PAGE, HK, D, seed=1), "v_cache": rand(B, PAGE, HK, D, seed=2),
        "k": rand(B, T, HK, D, seed=3), "v": rand(B, T, HK, D, seed=4), "cache_seqlens": ints(3, 5),
    }  # fmt: skip
    return {**given, **changes}


def paged(table: list[list[int]], **changes):
    pages = {"k_cache": rand(6, PAGE, HK, D, seed=1), "v_cache": rand(6, PAGE, HK, D, seed=2)}
    return new(**pages, block_table=torch.tensor(table, dtype=torch.int32), **changes)


def described(given, **changes):
    """The arguments as the modules below hand them on, and the new tokens."""
    empty = dict.fromkeys(flash_places.CacheArguments._fields[:15])
    arrays = {name: given[name] for name in ("q", "k_cache", "v_cache", "k", "v", "cache_seqlens")}
    call = flash_places.CacheArguments(**{**empty, **arrays, "table": given.get("block_table"), **changes})
    return call, flash_places.NewTokens(call.k, call.v, T)


ROTARY = {"rotary_cos": rand(4, 8), "rotary_sin": rand(4, 8)}
REFUSED = {
    "heads of k": (new(k=rand(B, T, 1, D)), ValueError, r"k has shape \[2, 2, 1, 16\]; expected \[2, 2, 2, 16\]"),
    "heads of v": (new(v=rand(B, T, 1, D)), ValueError, r"v has shape \[2, 2, 1, 16\]; expected \[2, 2, 2, 16\]"),
    "batch of k": (new(k=rand(1, T, HK, D)), ValueError, r"k has shape \[1, 2"),
    "batch of v": (new(v=rand(1, T, HK, D)), ValueError, r"v has shape \[1, 2"),
    "tokens of v": (new(v=rand(B, 1, HK, D)), ValueError, r"v has shape \[2, 1"),
    "size of v": (new(v=rand(B, T, HK, 8)), ValueError, r"v has shape \[2, 2, 2, 8\]"),
    "k 3-D": (new(k=rand(B, HK, D)), ValueError, r"k has shape \[2, 2, 16\]; expected \[2, 'T', 2, 16\]"),
    "dtype of k": (new(k=rand(B, T, HK, D).half()), TypeError, "k is torch.float16 .*; expected torch.float32"),
    "dtype of v": (new(v=rand(B, T, HK, D).double()), TypeError, "v is torch.float64"),
    "place of k": (new(k=rand(B, T, HK, D).to("meta")), TypeError, "k is .* on meta; expected .* on cpu"),
    "array as k": (new(k=rand(B, T, HK, D).numpy()), TypeError, "k is ndarray; expected a torch tensor"),
    "k alone": (new(v=None), ValueError, "k is given without v; expected both or neither"),
    "v alone": (new(k=None), ValueError, "v is given without k; expected both or neither"),
    "caches differ": (new(v_cache=rand(B, 7, HK, D)), ValueError, "v_cache has shape"),
    "few rows": (new(k_cache=rand(1, 8, HK, D), v_cache=rand(1, 8, HK, D)), ValueError, "k_cache has 1 rows"),
    "heads of q": (new(q=rand(B, 1, 3, D)), ValueError, "3 heads"),
    "size of q": (new(q=rand(B, 1, HQ, 8)), ValueError, "q"),
    "dtype of q": (new(q=rand(B, 1, HQ, D).half()), TypeError, "float16"),
    "softcap": (new(softcap=-1.0), ValueError, "softcap is -1.0"),
    "scale": (new(softmax_scale="a"), TypeError, "softmax_scale is 'a'"),
    "slopes": (new(alibi_slopes=torch.rand(3)), ValueError, r"alibi_slopes has shape \[3\]; expected \[4\]"),
    "list of slopes": (new(alibi_slopes=[1.0] * HQ), TypeError, "alibi_slopes is list; expected a torch tensor"),
    "window": (new(window_size=(1, 2, 3)), ValueError, r"window_size is \(1, 2, 3\); expected \(left, right\)"),
    "overrun": (new(cache_seqlens=ints(3, 7)), ValueError, r"cache_seqlens\[1\] is 7, and k brings 2 more: the cache "
        "would hold 9 tokens; expected at most 8"),
    "negative": (new(cache_seqlens=ints(-1, 5)), ValueError, r"cache_seqlens\[0\] is -1; expected at least 0"),
    "number too large": (new(cache_seqlens=7), ValueError, "cache_seqlens is 7, and k brings 2 more"),
    "list of lengths": (new(cache_seqlens=[3, 5]), TypeError, "cache_seqlens is list; expected an int, or a tensor"),
    "boolean": (new(cache_seqlens=True), TypeError, "cache_seqlens is bool"),
    "float lengths": (new(cache_seqlens=torch.tensor([3.7, 5.0])), ValueError, "cache_seqlens is torch.float32"),
    "bool lengths": (new(cache_seqlens=torch.tensor([True, False])), ValueError, "cache_seqlens is torch.bool"),
    "2-D lengths": (new(cache_seqlens=ints(3, 5)[:, None]), ValueError, r"\[2, 1\]; expected integers \[2\]"),
    "padding": (new(cache_leftpad=2), TypeError, "cache_leftpad is int; expected a torch tensor"),
    "one padding": (new(cache_leftpad=ints(2)), ValueError, r"cache_leftpad is torch.int32 \[1\]; expected integers"),
    "negative padding": (new(cache_leftpad=ints(2, -1)), ValueError, r"cache_leftpad is \[2, -1\]; expected 0 to 8"),
    "row out of range": (new(cache_batch_idx=ints(0, -1)), ValueError, r"cache_batch_idx\[1\] is -1; expected 0 <= "),
    "row twice": (new(cache_batch_idx=ints(1, 1), cache_seqlens=3), ValueError, "cache_batch_idx gives two tokens"),
    "page -1": (paged([[0, -1], [3, -1]], cache_seqlens=8), ValueError, r"block_table\[0, 1\] is -1; expected 0 <= "),
    "page 6": (paged([[0, 1], [3, 6]], cache_seqlens=ints(2, 7)), ValueError, r"block_table\[1, 1\] is 6; .* < 6"),
    "page before": (paged([[-1, 1], [3, 4]], cache_seqlens=8), ValueError, r"block_table\[0, 0\] is -1"),
    "page twice": (paged([[2], [2]], cache_seqlens=3), ValueError, "block_table gives two tokens of k the same slot"),
    "short table": (paged([[0], [1]], cache_seqlens=ints(7, 2)), ValueError, "1 pages of 8 in block_table"),
    "table of long": (new(block_table=torch.tensor([[0.0], [1.0]])), ValueError, "block_table is torch.float32"),
    "table of one": (paged([[0]]), ValueError, r"block_table is torch.int32 \[1, 1\]; expected integers \[2, n\]"),
    "both": (paged([[0], [1]], cache_batch_idx=ints(0, 1)), ValueError, "block_table is given with cache_batch_idx"),
    "short rotary": (new(**ROTARY), ValueError, "rotary_cos has 4 rows; expected at least 7"),
    "half a rotary": (new(rotary_cos=rand(9, 8)), ValueError, "rotary_cos needs rotary_sin"),
    "rotary shapes": (new(rotary_cos=rand(9, 8), rotary_sin=rand(9, 4)), ValueError, "rotary_cos, rotary_sin have"),
    "rotary of nothing": (new(k=None, v=None, rotary_cos=rand(9, 8), rotary_sin=rand(9, 8)), ValueError, "new keys k"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_a_refused_call_leaves_the_cache_byte_identical(name) -> None:
    given, kind, words = REFUSED[name]
    before = bytes_of(given["k_cache"], given["v_cache"])
    with pytest.raises(kind, match=words):
        flash_attn_with_kvcache(**given)
    assert bytes_of(given["k_cache"], given["v_cache"]) == before


@pytest.mark.parametrize("name", ["q", "k", "v", "alibi_slopes"])
def test_a_gradient_that_would_vanish_raises(name) -> None:
    given = new(alibi_slopes=torch.rand(HQ))
    given[name].requires_grad_()
    before = bytes_of(given["k_cache"])
    with pytest.raises(Unsupported, match=rf"{name} requires grad.*{name}\.detach\(\).*torch\.no_grad\(\)"):
        flash_attn_with_kvcache(**given)
    assert bytes_of(given["k_cache"]) == before
    with torch.no_grad():
        flash_attn_with_kvcache(**given)


def test_an_overrun_of_pages_names_the_table() -> None:
    pool = rand(4, 256, 1, 64)
    with pytest.raises(ValueError, match="257 tokens; expected at most 256, 1 pages of 256 in block_table"):
        flash_attn_with_kvcache(
            rand(1, 1, 1, 64), pool, pool, cache_seqlens=ints(257), block_table=torch.zeros(1, 1, dtype=torch.int32)
        )


def test_left_padding_over_pages() -> None:
    given = paged([[4, 1], [0, 3]], cache_seqlens=ints(5, 9), cache_leftpad=ints(2, 3))
    o = flash_attn_with_kvcache(**given)
    for b, (first, stop) in enumerate(((2, 7), (3, 11))):
        k, v = (
            given[n][given["block_table"][b].long()].flatten(0, 1)[None, first:stop] for n in ("k_cache", "v_cache")
        )
        torch.testing.assert_close(o[b : b + 1], flash_attn_func(given["q"][b : b + 1], k, v))


# tables and lengths as on a GPU, where they are not checked: the tokens that are written and read of each entry
UNSEEN = {
    "page -1": ([[0, -1], [3, -1]], (7, 8), [(0, 7, 0)], (8, 8)),
    "page beyond": ([[0, 6], [3, 4]], (7, 7), [(0, 7, 0), (3, 7, 0), (4, 0, 1)], (8, 9)),
    "first page": ([[-1, 5], [3, 4]], (1, 1), [(3, 1, 0), (3, 2, 1)], (0, 3)),
    "beyond the capacity": ([[0, 1], [3, 4]], (15, 40), [(1, 7, 0)], (16, 16)),
    "negative length": ([[0, 1], [3, 4]], (-1, -9), [(0, 0, 1)], (1, 0)),
    "none": ([[-1, 5], [-1, 4]], (1, 1), [], (0, 0)),
}


@pytest.mark.parametrize("kernel", [True, False])
@pytest.mark.parametrize("name", UNSEEN)
def test_on_a_device_no_page_out_of_range_is_written_or_read(name, kernel) -> None:
    """(page, slot, token) of what is written; the last page keeps its numbers."""
    table, lengths, written, after = UNSEEN[name]
    given = paged(table, cache_seqlens=ints(*lengths))
    want = given["k_cache"].clone(), given["v_cache"].clone()
    for page, slot, token in written:
        b = next(b for b in range(B) if page in table[b])
        want[0][page, slot], want[1][page, slot] = given["k"][b, token], given["v"][b, token]
    append = tensors.append_of("cpu") if kernel else None
    with (
        mock.patch.object(flash_places, "looked_at", return_value=False),
        mock.patch.object(tensors, "append_of", return_value=append),
    ):
        o, lse = flash_attn_with_kvcache(**given, return_softmax_lse=True)
    assert torch.equal(given["k_cache"], want[0])
    assert torch.equal(given["v_cache"], want[1])
    for b, n in enumerate(after):
        pages = [page for page in table[b] if 0 <= page < 6]
        k, v = (x[pages].flatten(0, 1)[None, :n] for x in want)
        torch.testing.assert_close(o[b : b + 1], flash_attn_func(given["q"][b : b + 1], k, v))
        assert (lse[b] == -torch.inf).all() == (n == 0)


@pytest.mark.parametrize("name", UNSEEN)
def test_a_write_that_waits_for_no_device_drops_the_same_tokens(name) -> None:
    """The operations that a GPU without the kernel, and a compiled graph, run; here on the CPU."""
    table, lengths, written, _ = UNSEEN[name]
    given = paged(table, cache_seqlens=ints(*lengths))
    want = given["k_cache"].clone()
    for page, slot, token in written:
        want[page, slot] = given["k"][next(b for b in range(B) if page in table[b]), token]
    with mock.patch.object(torch.compiler, "is_compiling", return_value=True):
        call, fresh = described(given)
        flash_places.append(call, flash_places.entries(call, B, fresh), fresh)
    assert torch.equal(given["k_cache"], want)


@pytest.mark.parametrize("where", ["block_table", "cache_batch_idx", "rows"])
def test_nothing_waits_for_a_device(where) -> None:
    """Tensors on the meta device have no contents, so that a look at them raises."""
    given = paged([[0, 1], [2, 3]]) if where == "block_table" else new()
    given = {name: x.to("meta") for name, x in given.items()}
    index = given["cache_seqlens"] if where == "cache_batch_idx" else None
    call, fresh = described(given, cache_batch_idx=index, mask=causal())
    at = flash_places.entries(call, B, fresh)
    cos, sin = (torch.zeros(at.capacity, 4, device="meta") for _ in range(2))
    flash_places.rotated_both(call._replace(cos=cos, sin=sin), at, fresh)
    flash_places.append(call, at, fresh)
    with pytest.raises(RuntimeError):
        int(at.after.max())


@pytest.mark.parametrize("lengths", [(3, 5), (7, -1), (8, 8)])
def test_an_append_compiles_with_fullgraph(lengths) -> None:
    """Lengths on a device are not read: tokens beyond the capacity are dropped."""

    def call(q, k, v, n, k_cache, v_cache):
        return flash_attn_with_kvcache(q, k_cache, v_cache, k, v, cache_seqlens=n)

    given = new(cache_seqlens=ints(*lengths))
    want = given["k_cache"].clone()
    for b, n in enumerate(lengths):
        for t in range(T):
            if 0 <= n + t < PAGE:
                want[b, n + t] = given["k"][b, t]
    compiled = torch.compile(call, backend="aot_eager", fullgraph=True)
    o = compiled(*(given[n] for n in ("q", "k", "v", "cache_seqlens", "k_cache", "v_cache")))
    assert torch.equal(given["k_cache"], want)
    for b, n in enumerate(lengths):
        stop = min(n + T, PAGE)
        seen = (given[x][b : b + 1, :stop] for x in ("k_cache", "v_cache"))
        torch.testing.assert_close(o[b : b + 1], flash_attn_func(given["q"][b : b + 1], *seen))


@pytest.mark.skipif(torch.__version__ < "2.10", reason="Dynamo of torch 2.9 cannot break a graph where tuples are made")
def test_pages_break_a_graph_and_fullgraph_says_why() -> None:
    def broken(q, k_cache, v_cache, n, table):
        return flash_attn_with_kvcache(q * 2, k_cache, v_cache, cache_seqlens=n, block_table=table) + 1

    def whole(q, k_cache, v_cache, n, table):
        return flash_attn_with_kvcache(q, k_cache, v_cache, cache_seqlens=n, block_table=table)

    x = paged([[4, 1], [0, 3]])
    given = x["q"], x["k_cache"], x["v_cache"], x["cache_seqlens"], x["block_table"]
    torch.testing.assert_close(torch.compile(broken, backend="aot_eager")(*given), broken(*given))
    with pytest.raises(Exception, match="leave fullgraph out"):
        torch.compile(whole, backend="aot_eager", fullgraph=True)(*given)


def test_arguments_that_cannot_be_looked_at_in_a_graph() -> None:
    assert flash_arguments.looked_at(torch.zeros(1))
    assert not flash_arguments.looked_at(torch.zeros(1), torch.zeros(1, device="meta"))


def test_tables_of_float64_rotate_in_float64() -> None:
    q, k, v = (rand(1, 1, 2, 8, seed=n).double() for n in range(3))
    k_cache, v_cache = (torch.zeros(1, 16, 2, 8, dtype=torch.float64) for _ in range(2))
    angles = rand(16, 4, seed=3).double()
    tables = {"rotary_cos": angles.cos(), "rotary_sin": angles.sin()}
    flash_attn_with_kvcache(q, k_cache, v_cache, k, v, **tables, cache_seqlens=3, causal=True)
    turned = torch.view_as_complex(k[0, 0].unflatten(-1, (4, 2))) * torch.polar(torch.ones_like(angles[3]), angles[3])
    torch.testing.assert_close(k_cache[0, 3], torch.view_as_real(turned).flatten(-2), rtol=0, atol=1e-14)


def test_caches_whose_tokens_share_places() -> None:
    q, k, v = (rand(2, 1, 1, 8, seed=n) for n in range(3))
    one, own = torch.zeros(1, 10, 1, 8), torch.zeros(2, 10, 1, 8)
    with pytest.raises(ValueError, match="v_cache is expanded"):
        flash_attn_with_kvcache(q, own, one.expand(2, -1, -1, -1), k, v, cache_seqlens=0)
    with pytest.raises(ValueError, match="k_cache and v_cache share their memory"):
        flash_attn_with_kvcache(q, own, own, k, v, cache_seqlens=0)
    assert not own.any()
    flash_attn_with_kvcache(q, own, own, k, k, cache_seqlens=0)
    assert torch.equal(own[:, :1], k)
