"""Ring attention on two processes: each holds half of a sequence, and the halves train one layer as if they were one.

On GPUs: NCCL in place of gloo, tensors moved to the rank's device, and torchrun to start the processes.
"""

import tempfile

import torch
import torch.distributed as dist

import saccade
from saccade import mask
from saccade.distributed import ring_attention, shard

T, HEADS, D, WORLD = 1000, 4, 32, 2
LAYOUT = "zigzag"  # a first and a last piece for each rank, so that a causal mask gives both as much to do
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
    # as for any parameter: the gradients of the ranks add up
    dist.all_reduce(layer.weight.grad)
    dist.all_reduce(loss.detach())
    print(f"rank {rank}: {mine.shape[1]} of {T} tokens, loss {loss.item():.2f}", flush=True)

    if rank == 0:
        together, layer.weight.grad = layer.weight.grad, None
        loss_of(layer, x, lambda q, k, v: saccade.attention(q, k, v, seen)).backward()
        apart = (together - layer.weight.grad).norm() / layer.weight.grad.norm()
        print(f"gradients differ by {apart:.1e} from those of one process")
        assert apart < 1e-5
    dist.destroy_process_group()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(work, (folder,), WORLD)
