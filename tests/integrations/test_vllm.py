"""vLLM's backend with mocks of its interface: batches of mixed steps compared with attention over whole sequences."""

from __future__ import annotations

import enum
import importlib
import sys
import types
from abc import ABC, abstractmethod

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import saccade  # noqa: E402
from saccade import Unsupported, mask, reference  # noqa: E402

HQ, HK, D, PAGE = 4, 2, 16, 4


def stand_ins() -> dict[str, types.ModuleType]:
    """Modules with what vllm.v1.attention.backend and its registry ask of a backend, and nothing else."""
    backend = types.ModuleType("vllm.v1.attention.backend")
    registry = types.ModuleType("vllm.v1.attention.backends.registry")

    class AttentionBackend(ABC):
        @staticmethod
        @abstractmethod
        def get_name(): ...
        @staticmethod
        @abstractmethod
        def get_impl_cls(): ...
        @staticmethod
        @abstractmethod
        def get_builder_cls(): ...
        @staticmethod
        @abstractmethod
        def get_kv_cache_shape(num_blocks, block_size, num_kv_heads, head_size, cache_dtype_str="auto"): ...

    class AttentionImpl(ABC):
        @abstractmethod
        def __init__(self, num_heads, head_size, scale): ...
        @abstractmethod
        def forward(self, layer, query, key, value, kv_cache, attn_metadata, output): ...

    class AttentionMetadataBuilder(ABC):
        @abstractmethod
        def __init__(self, kv_cache_spec, layer_names, vllm_config, device):
            self.device = device

        @abstractmethod
        def build(self, common_prefix_len, common_attn_metadata, fast_build=False): ...

    class AttentionType(str, enum.Enum):
        DECODER, ENCODER = "decoder", "encoder"

    class AttentionBackendEnum(enum.Enum):
        CPU_ATTN, CUSTOM = "vllm.cpu", None

    for kind in (AttentionBackend, AttentionImpl, AttentionMetadataBuilder, AttentionType):
        setattr(backend, kind.__name__, kind)
    registry.AttentionBackendEnum = AttentionBackendEnum
    registry.taken = {}
    registry.register_backend = registry.taken.__setitem__
    parents = ("vllm", "vllm.v1", "vllm.v1.attention", "vllm.v1.attention.backends")
    return {
        **{name: types.ModuleType(name) for name in parents},
        backend.__name__: backend,
        registry.__name__: registry,
    }


@pytest.fixture
def door(monkeypatch: pytest.MonkeyPatch):
    for name, module in stand_ins().items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.delitem(sys.modules, "saccade.integrations.vllm", raising=False)
    yield importlib.import_module("saccade.integrations.vllm")
    sys.modules.pop("saccade.integrations.vllm", None)


def common(cu: list[int], lengths: list[int], table: torch.Tensor, slots: list[int], padded: int, **changes):
    """CommonAttentionMetadata of a step, its arrays padded as vLLM pads them."""
    options = {"causal": True, **changes}
    return types.SimpleNamespace(
        query_start_loc_cpu=torch.tensor([*cu, cu[-1]], dtype=torch.int32), num_reqs=len(lengths),
        seq_lens=torch.tensor([*lengths, 0], dtype=torch.int32), num_actual_tokens=cu[-1],
        block_table_tensor=torch.cat([table, torch.zeros_like(table[:1])]),
        slot_mapping=torch.tensor(slots + [-1] * padded), **options,
    )  # fmt: skip


@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize("softcap, sinks", [(None, False), (3.0, True)])
def test_steps_of_many_requests(door, window, softcap, sinks) -> None:
    r = np.random.default_rng(0)
    # three requests, read in pieces, then one token per step; new requests together with old ones
    steps = [{0: 7}, {0: 1, 1: 9}, {0: 1, 1: 1, 2: 3}, {0: 1, 1: 1, 2: 1}]
    whole = {n: [torch.from_numpy(r.standard_normal((12, h, D), np.float32)) for h in (HQ, HK, HK)] for n in range(3)}
    logits = torch.from_numpy(r.standard_normal(HQ).astype(np.float32)) if sinks else None
    backend = door.SaccadeBackend
    cache = torch.full(backend.get_kv_cache_shape(12, PAGE, HK, D), float("nan"))
    table = torch.from_numpy(r.permutation(12).reshape(3, 4).astype(np.int32))
    layer = backend.get_impl_cls()(HQ, D, 0.3, HK, sliding_window=window, logits_soft_cap=softcap, sinks=logits)
    builder = backend.get_builder_cls()(None, ["layer"], None, torch.device("cpu"))
    seen = dict.fromkeys(whole, 0)
    for step in steps:
        new = {n: slice(seen[n], seen[n] + count) for n, count in step.items()}
        q, k, v = (torch.cat([whole[n][i][at] for n, at in new.items()] + [torch.ones(2, h, D)])
                   for i, h in enumerate((HQ, HK, HK)))  # fmt: skip
        slots = [int(table[n, t // PAGE]) * PAGE + t % PAGE for n, at in new.items() for t in range(at.start, at.stop)]
        seen |= {n: at.stop for n, at in new.items()}
        cu = np.cumsum([0, *step.values()]).tolist()
        at = builder.build(0, common(cu, [seen[n] for n in step], table[list(step)], slots, 2))
        out = layer.forward(None, q, k, v, cache, at, torch.full((len(q), HQ * D), 9.0))
        keep = mask.causal() if window is None else mask.causal() & mask.window(window - 1, None)
        for (n, span), first in zip(new.items(), cu, strict=False):
            a, b, c = (x[None, : seen[n]] for x in whole[n])
            want = saccade.attention(a, b, c, keep, scale=0.3, softcap=softcap, sinks=logits)[0, span]
            torch.testing.assert_close(out[first : first + len(want)].view(-1, HQ, D), want, rtol=1e-4, atol=1e-5)
        assert (out[cu[-1] :] == 9).all()


def test_sinks_that_are_loaded_after_the_layer_is_built(door) -> None:
    """Weights of bfloat16 that are copied into the layer's tensor later are those of the forward."""
    r = torch.Generator().manual_seed(0)
    x, loaded = torch.randn(6, HK, D, generator=r), torch.randn(HK, generator=r).bfloat16()
    sinks = torch.full((HK,), float("nan"), dtype=torch.bfloat16)
    layer = door.SaccadeImpl(HK, D, 0.3, sinks=sinks)
    sinks.copy_(loaded)
    step = common([0, 6], [6], torch.tensor([[1, 0]], dtype=torch.int32), [4, 5, 6, 7, 0, 1], 0)
    at = door.SaccadeMetadataBuilder(None, [], None, x.device).build(0, step)
    o = layer.forward(None, x, x, x, torch.zeros(2, 2, PAGE, HK, D), at, x * 0)
    one = x.double().numpy()[None]
    want, _ = reference.forward(one, one, one, mask.causal(), scale=0.3, sinks=loaded.double().numpy())
    np.testing.assert_allclose(o.numpy(), want[0], rtol=1e-5, atol=1e-6)


def test_registered_by_its_entry_point(door) -> None:
    from importlib.metadata import entry_points

    registry = sys.modules["vllm.v1.attention.backends.registry"]
    (plugin,) = (one for one in entry_points(group="vllm.general_plugins") if one.name == "saccade")
    plugin.load()()
    assert registry.taken == {registry.AttentionBackendEnum.CUSTOM: "saccade.integrations.vllm.SaccadeBackend"}
    backend = door.SaccadeBackend
    assert backend.get_name() == "CUSTOM"
    assert backend.supports_head_size(80)
    assert not backend.supports_head_size(512)
    assert backend.supports_attn_type("decoder")
    assert not backend.supports_attn_type("encoder")
    assert backend.supports_sink()
    assert backend.supports_non_causal()


def test_layers_that_see_what_comes_after(door) -> None:
    x = torch.randn(6, HK, D, generator=torch.Generator().manual_seed(0))
    cache = torch.zeros(2, 2, PAGE, HK, D)
    at = common([0, 6], [6], torch.tensor([[1, 0]], dtype=torch.int32), [4, 5, 6, 7, 0, 1], 0, causal=False)
    layer = door.SaccadeImpl(HK, D, 1.0)
    o = layer.forward(None, x, x, x, cache, door.SaccadeMetadataBuilder(None, [], None, x.device).build(0, at), x * 0)
    torch.testing.assert_close(o, saccade.attention(x[None], x[None], x[None], scale=1.0)[0])


def test_refused(door) -> None:
    for options, words in (
        ({"alibi_slopes": [0.5] * HQ}, "ALiBi"),
        ({"kv_cache_dtype": "fp8"}, "'fp8'"),
        ({"attn_type": "encoder"}, "decoder"),
    ):
        with pytest.raises(Unsupported, match=words):
            door.SaccadeImpl(HQ, D, 1.0, HK, **options)
    layer, x = door.SaccadeImpl(HQ, D, 1.0, HK), torch.ones(3, HQ, D)
    assert (layer.forward(None, x, x, x, x, None, torch.ones(3, HQ, D)) == 0).all()
    with pytest.raises(Unsupported, match="quantised output"):
        layer.forward(None, x, x, x, x, None, x, output_scale=torch.ones(1))
    builder = door.SaccadeMetadataBuilder(None, [], None, x.device)
    some = common([0, 3], [3], torch.zeros(1, 1, dtype=torch.int32), [0, 1, 2], 0, causal=torch.tensor([True]))
    with pytest.raises(Unsupported, match="only some requests are causal"):
        builder.build(0, some)
