"""An attention backend for vLLM, outside its tree: `saccade` as `AttentionBackendEnum.CUSTOM`.

vLLM finds `register` by its entry point "vllm.general_plugins"; `--attention-backend CUSTOM` then selects the backend.
It implements the interface of `vllm.v1.attention.backend` of 2026, and is tested against mocks of that interface, not
against vLLM itself. It supports only decoder layers, without ALiBi and without a quantised cache.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from vllm.v1.attention.backend import (  # pyright: ignore[reportMissingImports]
    AttentionBackend,
    AttentionImpl,
    AttentionMetadataBuilder,
    AttentionType,
)

from ..caches.ragged import paged_attention
from ..caches.sequences import Ints, PagedKeys
from ..errors import Unsupported
from ..mask import Mask, causal, full, window

PATH = f"{__name__}.SaccadeBackend"


def register() -> None:
    """Make `SaccadeBackend` vLLM's CUSTOM backend."""
    from vllm.v1.attention.backends.registry import (  # pyright: ignore[reportMissingImports]
        AttentionBackendEnum,
        register_backend,
    )

    register_backend(AttentionBackendEnum.CUSTOM, PATH)


@dataclass
class Metadata:
    """The batch of a step: request r has queries cu_q[r] to cu_q[r + 1]; the last `tokens` are padding."""

    tokens: int
    cu_q: Ints
    lengths: Tensor
    block_table: Tensor
    slot_mapping: Tensor
    causal: bool


class SaccadeMetadataBuilder(AttentionMetadataBuilder):  # pyright: ignore[reportUntypedBaseClass]
    """Copies the lengths to the host, once per step for all layers."""

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)

    def build(self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False) -> Metadata:
        """The batch as `Metadata`; a prefix that all requests share is detected by their pages."""
        x = common_attn_metadata
        if not isinstance(x.causal, bool):
            raise Unsupported(
                "vllm", ["a batch in which only some requests are causal: send the others in a batch of their own"]
            )
        cu_q = np.asarray(x.query_start_loc_cpu[: x.num_reqs + 1], np.int64)
        lengths, table = x.seq_lens[: x.num_reqs].cpu().int(), x.block_table_tensor[: x.num_reqs]
        return Metadata(x.num_actual_tokens, cu_q, lengths, table, x.slot_mapping, x.causal)


class SaccadeBackend(AttentionBackend):  # pyright: ignore[reportUntypedBaseClass]
    """The properties that vLLM queries before it uses a backend."""

    supported_dtypes = [torch.float16, torch.bfloat16, torch.float32]  # noqa: RUF012
    supported_kv_cache_dtypes = ["auto", "float16", "bfloat16"]  # noqa: RUF012
    forward_includes_kv_cache_update = True

    @staticmethod
    def get_name() -> str:
        """The member of vLLM's enumeration under which it is registered."""
        return "CUSTOM"

    @staticmethod
    def get_impl_cls() -> type[SaccadeImpl]:
        """The class that computes a layer's attention."""
        return SaccadeImpl

    @staticmethod
    def get_builder_cls() -> type[SaccadeMetadataBuilder]:
        """The class that prepares a step."""
        return SaccadeMetadataBuilder

    @staticmethod
    def get_kv_cache_shape(
        num_blocks: int, block_size: int, num_kv_heads: int, head_size: int, cache_dtype_str: str = "auto"
    ) -> tuple[int, ...]:
        """Keys and values in pages [2, num_blocks, block_size, num_kv_heads, head_size]."""
        return 2, num_blocks, block_size, num_kv_heads, head_size

    @classmethod
    def supports_head_size(cls, head_size: int) -> bool:
        """Whether the head size is supported: any up to 256."""
        return 1 <= head_size <= 256

    @classmethod
    def supports_sink(cls) -> bool:
        """Whether sinks are supported: yes, one logit per head."""
        return True

    @classmethod
    def supports_non_causal(cls) -> bool:
        """Whether layers that are not causal are supported: yes."""
        return True

    @classmethod
    def supports_attn_type(cls, attn_type: str) -> bool:
        """Whether the type of attention is supported: decoders only."""
        return attn_type == AttentionType.DECODER


class SaccadeImpl(AttentionImpl):  # pyright: ignore[reportUntypedBaseClass]
    """The attention of a layer: writes the keys of the step to their pages, and attends."""

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int | None = None,
        alibi_slopes: list[float] | None = None,
        sliding_window: int | None = None,
        kv_cache_dtype: str = "auto",
        logits_soft_cap: float | None = None,
        attn_type: str = AttentionType.DECODER,
        kv_sharing_target_layer_name: str | None = None,
        sinks: Tensor | None = None,
    ) -> None:
        lacks: list[str] = []
        if alibi_slopes is not None:
            lacks.append("ALiBi slopes are not computed over pages: choose another backend")
        if kv_cache_dtype not in SaccadeBackend.supported_kv_cache_dtypes:
            lacks.append(f"kv_cache_dtype is {kv_cache_dtype!r}; expected 'auto'")
        if attn_type != AttentionType.DECODER:
            lacks.append(f"attn_type is {attn_type!r}; expected that of a decoder")
        if lacks:
            raise Unsupported("vllm", lacks)
        self.num_heads, self.head_size, self.scale = num_heads, head_size, float(scale)
        self.num_kv_heads, self.kv_cache_dtype = num_kv_heads or num_heads, kv_cache_dtype
        self.window, self.softcap = sliding_window, logits_soft_cap or None
        # a layer that shares the cache of another layer does not write keys
        self.writes = kv_sharing_target_layer_name is None
        # vLLM loads the weights into this tensor later
        self.sinks = sinks

    def forward(
        self,
        layer: Any,
        query: Tensor,
        key: Tensor | None,
        value: Tensor | None,
        kv_cache: Tensor,
        attn_metadata: Metadata | None,
        output: Tensor,
        output_scale: Tensor | None = None,
        output_block_scale: Tensor | None = None,
    ) -> Tensor:
        """Attention of query [tokens, Hq, D], key and value [tokens, Hk, D]: [tokens, Hq, D], or [tokens, Hq · D]."""
        if output_scale is not None or output_block_scale is not None:
            raise Unsupported("vllm", ["a quantised output: disable the fusion of attention and quantisation in vLLM"])
        if attn_metadata is None:
            # vLLM calls this for profiling
            return output.zero_()
        x, n = attn_metadata, attn_metadata.tokens
        k_pages, v_pages = kv_cache.unbind(0)
        if self.writes and key is not None and value is not None:
            slots = x.slot_mapping[:n].long()
            real = slots >= 0
            at = slots[real] // k_pages.shape[1], slots[real] % k_pages.shape[1]
            k_pages[at], v_pages[at] = key[:n][real], value[:n][real]
        pages = PagedKeys(k_pages, v_pages, x.block_table, x.lengths)
        q = query[:n].reshape(n, self.num_heads, self.head_size)
        scores: dict[str, Any] = {"scale": self.scale, "softcap": self.softcap, "sinks": self.sinks}
        o = paged_attention(q, pages, x.cu_q, mask=self.mask(x.causal), causal=x.causal, **scores)
        output[:n] = o.reshape(n, *output.shape[1:])
        return output

    def mask(self, causally: bool) -> Mask:
        """The mask of the layer; a sliding window counts the query's own token."""
        if self.window is not None:
            return window(self.window - 1, 0 if causally else self.window - 1)
        return causal() if causally else full()
