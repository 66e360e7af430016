"""Prefill on one group of ranks, decode on another: torchrun --nproc_per_node 4 examples/torchrun/disaggregated.py

The first half of the ranks reads the prompt in zigzag slices, with keys passed around a ring. Keys and values then go
to the ranks that decode, and each of these stores every other token. No rank stores the keys of the whole prompt.
"""

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import get_node_local_rank

from saccade.distributed import ContextParallel, ShardedKVCache, move, runs_of
from saccade.distributed.layout import positions
from saccade.models.llama import Llama, LlamaConfig

TOKENS, NEW = 301, 12

gpus = torch.cuda.is_available()
dist.init_process_group("nccl" if gpus else "gloo")
device = torch.device("cuda", get_node_local_rank()) if gpus else torch.device("cpu")
if gpus:
    torch.cuda.set_device(device)
me, world = dist.get_rank(), dist.get_world_size()
readers, writers = list(range(max(1, world // 2))), list(range(world // 2, world))
# every rank must create both groups
reading, writing = dist.new_group(readers), dist.new_group(writers)

torch.manual_seed(0)
config = LlamaConfig(vocab_size=256, hidden_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2)
model = Llama(config).to(device).eval()
prompt = torch.randint(0, 256, (1, TOKENS), generator=torch.Generator().manual_seed(1)).to(device)
layers, kv_heads, head_dim = model.cached

with torch.no_grad():
    sent = [torch.empty(1, 0, kv_heads, head_dim, device=device) for _ in range(2 * layers)]
    logits = torch.empty(1, 256, device=device)
    if me in readers:
        ranks = ContextParallel(TOKENS, reading, layout="zigzag")
        mine = ranks.shard(prompt)
        caches = model.make_caches(1, mine.shape[1])
        outputs = model(mine, caches=caches, backend=ranks)
        sent = [x for cache in caches for x in (cache.k, cache.v)]
        # the logits of the rank that has the prompt's last token
        at = (ranks.positions == TOKENS - 1).nonzero()
        logits = outputs[:, int(at[0])].contiguous() if len(at) else logits
    slices = move(sent, length=TOKENS, source=readers, target=writers, source_layout="zigzag")
    runs = runs_of("zigzag", len(readers), TOKENS)
    dist.broadcast(logits, next(r for r in readers if TOKENS - 1 in positions(runs[r])))

    if me in writers:
        sizes = 1, TOKENS + NEW, kv_heads, head_dim
        caches = [ShardedKVCache(*sizes, group=writing, device=device) for _ in range(layers)]
        for cache, k, v in zip(caches, slices[::2], slices[1::2], strict=True):
            cache.extend(k, v, TOKENS)
        text: list[int] = []
        for _ in range(NEW):
            text.append(int(logits.argmax(-1)))
            logits = model(torch.tensor([[text[-1]]], device=device), caches=caches)[:, -1]
        if me == writers[0]:
            lengths = [int(cache.local.lengths[0]) for cache in caches]
            alone = prompt
            for _ in range(NEW):
                alone = torch.cat([alone, model(alone)[:, -1:].argmax(-1)], 1)
            same = alone[0, TOKENS:].tolist() == text
            print(f"{len(readers)} ranks read {TOKENS} tokens, {len(writers)} wrote {text}")
            print(f"rank {me} stores {lengths} keys, by layer")
            print("one process gives the same" if same else f"one process: {alone[0, TOKENS:].tolist()}")
dist.destroy_process_group()
