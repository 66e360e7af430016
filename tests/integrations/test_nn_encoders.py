"""saccade.nn.MultiheadAttention in torch's encoders and decoders, with their fused paths and nested tensors."""

from __future__ import annotations

import copy

import pytest
import torch

import saccade
from saccade.nn import MultiheadAttention

B, H, E, TQ, TK = 2, 2, 16, 5, 7

pytestmark = pytest.mark.filterwarnings(
    "ignore:enable_nested_tensor", "ignore:The PyTorch API", "ignore:Support for mis"
)


class Counting(MultiheadAttention):
    """Counts its calls."""

    calls = 0

    def forward(self, *args, **kwargs):
        type(self).calls += 1
        return super().forward(*args, **kwargs)


def encoders(**options) -> tuple[torch.nn.TransformerEncoder, torch.nn.TransformerEncoder]:
    """torch's encoder, and a copy whose layers attend by our module."""
    layer = torch.nn.TransformerEncoderLayer(E, H, 32, batch_first=True, dtype=torch.float64, **options)
    theirs = torch.nn.TransformerEncoder(layer, 2)
    ours = copy.deepcopy(theirs)
    for layer in ours.layers:
        module = Counting(E, H, batch_first=True, dtype=torch.float64)
        module.load_state_dict(layer.self_attn.state_dict())
        layer.self_attn = module
    Counting.calls = 0
    return theirs, ours


@pytest.mark.parametrize("mode", ["train", "eval", "eval without gradients"])
@pytest.mark.parametrize("norm_first", [False, True])
@pytest.mark.parametrize("what", ["nothing", "padding", "causal", "both"])
def test_in_torchs_encoder(what, norm_first, mode, seed) -> None:
    torch.manual_seed(seed)
    theirs, ours = encoders(dropout=0.0, norm_first=norm_first)
    x = torch.randn(3, 6, E, dtype=torch.float64)
    hidden = torch.arange(6) >= torch.tensor([[6], [4], [1]])
    options = {"src_key_padding_mask": hidden} if what in ("padding", "both") else {}
    if what in ("causal", "both"):
        later = torch.nn.Transformer.generate_square_subsequent_mask(6, dtype=torch.float64)
        options |= {"mask": later, "is_causal": True}
    for encoder in (theirs, ours):
        encoder.train(mode == "train")
    with torch.set_grad_enabled("without" not in mode):
        got, want = ours(x, **options), theirs(x, **options)
    # fused, torch returns zeros for padding
    real = ~hidden if "src_key_padding_mask" in options else torch.ones_like(hidden)
    torch.testing.assert_close(got[real], want[real], rtol=1e-9, atol=1e-10)
    assert Counting.calls == 2


def test_an_encoder_of_our_layers() -> None:
    torch.manual_seed(0)
    layer = torch.nn.TransformerEncoderLayer(E, H, 32, batch_first=True)
    layer.self_attn = MultiheadAttention(E, H, batch_first=True)
    encoder = torch.nn.TransformerEncoder(layer, 2).eval()
    x, hidden = torch.randn(3, 6, E), torch.arange(6) >= torch.tensor([[6], [4], [1]])
    slow = encoder(x, src_key_padding_mask=hidden)
    with torch.no_grad():
        fast = encoder(x, src_key_padding_mask=hidden)
    torch.testing.assert_close(fast[~hidden], slow[~hidden])
    compiled = torch.compile(encoder, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(x)[~hidden], encoder(x)[~hidden])


def test_in_torchs_decoder(seed) -> None:
    torch.manual_seed(seed)
    theirs = torch.nn.TransformerDecoderLayer(E, H, 32, dropout=0.0, batch_first=True, dtype=torch.float64)
    ours = copy.deepcopy(theirs)
    for name in ("self_attn", "multihead_attn"):
        module = MultiheadAttention(E, H, batch_first=True, dtype=torch.float64)
        module.load_state_dict(getattr(theirs, name).state_dict())
        setattr(ours, name, module)
    x, memory = torch.randn(B, TQ, E, dtype=torch.float64), torch.randn(B, TK, E, dtype=torch.float64)
    later = torch.ones(TQ, TQ, dtype=torch.bool).triu(1)
    options = {"tgt_mask": later, "memory_key_padding_mask": torch.arange(TK) >= torch.tensor([[TK], [3]])}
    want = theirs(x, memory, **options)
    torch.testing.assert_close(ours(x, memory, **options), want, rtol=1e-9, atol=1e-10)
    again = ours(x, memory, tgt_is_causal=True, **options)
    torch.testing.assert_close(again, want, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("layout", [torch.strided, torch.jagged])
def test_nested(layout) -> None:
    module = MultiheadAttention(E, H, batch_first=True).eval()
    rows = [torch.randn(n, E) for n in (3, 1, 5)]
    x = torch.nested.nested_tensor(rows, layout=layout)
    o, _ = module(x, x, x)
    assert o.is_nested
    assert o.layout is layout
    for got, row in zip(o.unbind(), rows, strict=True):
        torch.testing.assert_close(got, module(row, row, row)[0])
    with pytest.raises(saccade.Unsupported, match="without masks or weights"):
        module(x, x, x, need_weights=True)
