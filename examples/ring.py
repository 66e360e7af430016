"""Ring attention on two processes: each has half of a sequence, and together they train one layer.

On GPUs, use NCCL instead of gloo, move tensors to the rank's device, and start the processes with torchrun.
"""

import tempfile

import torch
import torch.distributed as dist

import saccade
from saccade import mask
from saccade.distributed import ring_attention, shard

T, HEADS, D, WORLD = 1000, 4, 32, 2
LAYOUT = "zigzag"  # each rank gets an early and a late piece, so a causal mask gives both the same work
seen = mask.causal() & mask.documents(torch.tensor([0] * 300 + [1] * 700))


def loss_of(layer: torch.nn.Linear, x: torch.Tensor, attend) -> torch.Tensor:
    q, k, v = layer(x).unflatten(-1, (3 * HEADS, D)).split(HEADS, -2)
    return attend(q, k, v).square().sum()


def work(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=WORLD)
    torch.manual_seed(0)
    layer, x = torch.nn.Linear(64, 3 * HEADS * D), torch.randn(1, T, 64)

    mine = shard(x, layout=LAYOUT)
    loss = loss_of(layer, mine, lambda q, k, v: ring_attention(q, k, v, seen, layout=LAYOUT))
    loss.backward()
    # the gradients of all ranks are added, as with any data parallelism
    dist.all_reduce(layer.weight.grad)
    dist.all_reduce(loss.detach())
    print(f"rank {rank}: {mine.shape[1]} of {T} tokens, loss {loss.item():.2f}", flush=True)

    if rank == 0:
        together, layer.weight.grad = layer.weight.grad, None
        loss_of(layer, x, lambda q, k, v: saccade.attention(q, k, v, seen)).backward()
        difference = (together - layer.weight.grad).norm() / layer.weight.grad.norm()
        print(f"gradients differ by {difference:.1e} from those of one process")
        assert difference < 1e-5
    dist.destroy_process_group()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(work, (folder,), WORLD)
