"""Quantised caches: bytes and errors of int8, fp8 and int4 keys and values compared with float32, on a ragged batch."""

import torch

from saccade.models.llama import Llama, LlamaConfig
from saccade.models.sampling import prefill

torch.manual_seed(0)
heads = {"num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 64}
model = Llama(LlamaConfig(vocab_size=512, hidden_size=256, num_hidden_layers=2, **heads)).eval().requires_grad_(False)
prompts = [torch.randint(512, (n,)).tolist() for n in (200, 120)]
new = torch.randint(512, (2, 24))

exact = None
for codes, bound in ((None, 0), ("int8", 0.01), ("fp8", 0.05), ("int4", 0.1)):
    # each sequence continues after its own prompt; a token is quantised once, when it is appended
    logits, caches = prefill(model, prompts, capacity=256, chunk=64, quantised=codes)
    steps = [logits]
    for token in new.T:
        steps.append(model(token[:, None], caches=caches)[:, -1])
    results = torch.stack(steps)
    exact = results if exact is None else exact
    size = sum(x.nbytes for cache in caches for x in cache.arrays)
    error = ((results - exact).norm() / exact.norm()).item()
    print(f"{codes or 'float32':8}{size:9,} bytes for {caches[0].lengths.tolist()} tokens, logits off by {error:.2%}")
    assert error <= bound
