"""Flops, bytes, rooflines, cache sizes and scratch sizes, by hand."""

from __future__ import annotations

import subprocess
import sys

import pytest

from saccade import cost

KIB, MIB, GIB, TIB = 1024, 1024**2, 1024**3, 1024**4
H100 = cost.device("h100")


@pytest.mark.parametrize(
    ("tokens", "expected"),
    [(512, MIB // 2), (2048, 8 * MIB), (8192, 128 * MIB), (32768, 2 * GIB), (131072, 32 * GIB)],
)
def test_score_matrix(tokens: int, expected: int) -> None:
    assert cost.score_matrix_bytes(tokens) == expected


def test_score_matrix_of_a_whole_model() -> None:
    assert cost.score_matrix_bytes(131072, heads=96, layers=96) == 288 * TIB


def test_naive_traffic_is_eight_passes() -> None:
    assert len(cost.NAIVE_PASSES) == 8
    assert sum(p.startswith("write") for p in cost.NAIVE_PASSES) == 4
    one = cost.score_matrix_bytes(8192) / H100.bandwidth
    assert one == pytest.approx(40e-6, rel=5e-3)
    assert cost.naive_traffic(8192) / H100.bandwidth == pytest.approx(320e-6, rel=5e-3)
    assert cost.duration(one) == "40.1 µs"


def test_tiled_traffic_is_linear_in_tokens() -> None:
    def shape(t: int) -> cost.Shape:
        return cost.Shape(1, t, t, 8, 8, 64, 64)

    assert cost.prefill(shape(8192)).bytes == 2 * cost.prefill(shape(4096)).bytes
    assert cost.backward(shape(8192)).bytes == 2 * cost.backward(shape(4096)).bytes
    assert cost.naive(shape(8192)).bytes > 3.9 * cost.naive(shape(4096)).bytes


def test_rereads_count_keys_and_values_only() -> None:
    shape = cost.Shape(2, 4096, 4096, 8, 2, 64, 96)
    assert cost.prefill(shape, reads=5).bytes - cost.prefill(shape).bytes == 4 * shape.kv_bytes
    assert shape.kv_bytes == 2 * 4096 * 2 * (64 + 96) * 2


def test_h100_of_the_specification() -> None:
    assert H100.peak("bfloat16") == 1000e12
    assert H100.bandwidth == 3.35e12
    assert H100.memory == 80e9
    assert (H100.sram, H100.sram_bandwidth) == (50e6, 20e12)
    assert H100.ridge() == pytest.approx(298.5, abs=0.05)


def test_flops_a_pair() -> None:
    assert cost.forward_flops(1, 128) == 512
    assert cost.forward_flops(10, 192, 128) == 10 * 2 * (192 + 128)
    assert cost.backward_flops(7, 64) == 2.5 * cost.forward_flops(7, 64)
    assert cost.backward_flops(1, 192, 128) == 2 * (3 * 192 + 2 * 128)


def test_prefill_is_compute_bound_and_decode_is_not() -> None:
    long = cost.Shape(1, 4096, 4096, 32, 8, 128, 128, pairs=32 * 4096 * 4097 // 2)
    one = cost.Shape(1, 1, 4096, 32, 8, 128, 128)
    assert cost.roofline(cost.prefill(long), H100).bound == "compute"
    assert cost.roofline(cost.backward(long), H100).bound == "compute"
    verdict = cost.roofline(cost.decode(one), H100)
    assert verdict.bound == "bandwidth"
    # 2 flops and 2 bytes per element of k and v, shared by a group of four
    assert verdict.work.intensity == pytest.approx(4.0, rel=0.01)
    assert verdict.seconds == verdict.work.bytes / H100.bandwidth
    assert verdict.flops_per_second < 0.02 * H100.peak()


def test_naive_attention_is_bandwidth_bound_where_tiled_is_not() -> None:
    shape = cost.Shape(1, 8192, 8192, 1, 1, 128, 128)
    assert cost.roofline(cost.naive(shape), H100).bound == "bandwidth"
    assert cost.roofline(cost.prefill(shape), H100).bound == "compute"


def test_forward_bytes_by_hand() -> None:
    shape = cost.Shape(2, 3, 5, 4, 2, 8, 16, "float32")
    assert cost.prefill(shape).bytes == 4 * (2 * 3 * 4 * 8 + 2 * 5 * 2 * (8 + 16) + 2 * 3 * 4 * 16) + 4 * 2 * 3 * 4
    assert cost.prefill(shape).flops == 2 * 2 * 4 * 3 * 5 * (8 + 16)


def test_llama_2_70b_cache() -> None:
    model = cost.MODELS["llama-2-70b"]
    assert cost.kv_cache_bytes(1, 8, 128) == 4 * KIB
    assert model.cache_bytes() == 320 * KIB
    assert model.cache_bytes(4096) == 1280 * MIB
    assert model.cache_bytes(4096) == pytest.approx(1.342e9, rel=1e-3)
    full = model.cache_bytes(4096, 64)
    assert full == 80 * GIB
    assert full == pytest.approx(85.9e9, rel=1e-3)
    assert full > H100.memory
    assert model.cache_bytes(4096) / H100.bandwidth == pytest.approx(0.40e-3, rel=5e-3)
    assert cost.size(full) == "80 GiB"


def test_grouped_and_single_kv_heads_shrink_the_cache() -> None:
    model = cost.MODELS["gpt-3-175b"]
    assert model.cache_bytes() == 12 * model.cache_bytes(kv_heads=8)
    assert model.cache_bytes() == 96 * model.cache_bytes(kv_heads=1)
    assert cost.MODELS["llama-2-70b"].saving() == 8
    assert cost.MODELS["mistral-7b"].kv_heads == 8
    assert cost.MODELS["mistral-7b"].cache_bytes() == 128 * KIB


def test_projections() -> None:
    model = cost.MODELS["gpt-3-175b"]
    assert model.projections() == dict.fromkeys("qkvo", (12288, 96 * 128))
    gpt2 = cost.MODELS["gpt-2"]
    assert (gpt2.layers, gpt2.heads, gpt2.head_dim, gpt2.width) == (12, 12, 64, 768)
    assert cost.MODELS["mistral-7b"].projections()["k"] == (4096, 1024)


@pytest.mark.parametrize(
    ("name", "token", "long"),
    [
        # layers × kv heads × (keys + values) × 2 bytes, of 1 and of 131072 tokens
        ("llama-3-8b", 32 * 8 * 256 * 2, 16 * GIB), ("llama-3-70b", 80 * 8 * 256 * 2, 40 * GIB),
        ("qwen-3-8b", 36 * 8 * 256 * 2, 18 * GIB), ("qwen-3-32b", 64 * 8 * 256 * 2, 32 * GIB),
        # 10 global layers, and 52 of 1024 tokens
        ("gemma-3-27b", 62 * 16 * 256 * 2, (10 * 131072 + 52 * 1024) * 16 * 256 * 2),
        # 576 numbers a layer, not the keys and values of 128 heads
        ("deepseek-v3", 61 * 576 * 2, 131072 * 61 * 576 * 2),
    ],
)  # fmt: skip
def test_caches_of_current_models(name: str, token: int, long: int) -> None:
    model = cost.MODELS[name]
    assert model.source
    assert (model.cache_bytes(), model.cache_bytes(131072)) == (token, long)
    assert model.cache_bytes(131072, 3) == 3 * long


def test_local_layers_store_a_window() -> None:
    model = cost.MODELS["gemma-3-27b"]
    assert model.cache_bytes(1024) == 1024 * model.cache_bytes()
    # from there on a token costs the global layers alone
    assert model.cache_bytes(1025) - model.cache_bytes(1024) == 10 * 16 * 256 * 2


def test_a_latent_cache_and_its_heads() -> None:
    model = cost.MODELS["deepseek-v3"]
    assert model.cache_bytes(kv_heads=128) == 61 * 128 * (192 + 128) * 2
    assert model.saving() == pytest.approx(128 * 320 / 576)
    assert model.projections() == {"latent": (7168, 576), "o": (128 * 128, 7168)}


@pytest.mark.parametrize("name", cost.MODELS)
@pytest.mark.parametrize(("memory", "batch"), [(1e9, 1), (80e9, 64), (180e9, 3), (1e5, 1)])
def test_the_longest_sequences_fit_and_longer_ones_do_not(name: str, memory: float, batch: int) -> None:
    model = cost.MODELS[name]
    most = model.most_tokens(memory, batch)
    assert most is not None
    assert model.cache_bytes(most, batch) <= memory < model.cache_bytes(most + 1, batch)


def test_devices_name_their_sources() -> None:
    assert all(d.source and d.memory and d.bandwidth for d in cost.DEVICES.values())
    assert cost.device("b200").ridge() == pytest.approx(2250 / 7.7)
    assert cost.device("rtx-4090").peak("bfloat16") == 2 * cost.device("rtx-4090").peak("float32")


def test_scratch_of_the_short_backward() -> None:
    assert cost.scratch_bytes(512, 12) == 24 * MIB
    assert cost.scratch_bytes(1024, 12) == 96 * MIB
    assert cost.scratch_max_heads(1024) == 32


def test_units() -> None:
    assert cost.size(1000) == "1000 B"
    assert cost.size(1280 * MIB) == "1.25 GiB"
    assert cost.size(288 * TIB) == "288 TiB"
    assert [cost.duration(t) for t in (2.5, 2.5e-3, 2.5e-6, 2.5e-9)] == ["2.5 s", "2.5 ms", "2.5 µs", "2.5 ns"]


def test_bad_arguments() -> None:
    with pytest.raises(ValueError, match="h100"):
        cost.device("abacus")
    with pytest.raises(ValueError, match="int3"):
        cost.score_matrix_bytes(8, dtype="int3")
    with pytest.raises(ValueError, match="multiple"):
        cost.Shape(1, 1, 1, 3, 2, 8, 8)


def test_cost_needs_numpy_at_most() -> None:
    code = "import sys; sys.modules['torch'] = None; import saccade.cost; print('triton' in sys.modules)"
    assert subprocess.check_output([sys.executable, "-c", code], text=True).strip() == "False"


def test_explain_knows_where_every_device_computes() -> None:
    from saccade.backends import ORDER
    from saccade.backends.places import PLACES

    assert set(PLACES) == {"cpu", *cost.DEVICES}
    assert {backend for backend, _ in PLACES.values()} == set(ORDER)
