"""torch around attention: workers of a DataLoader, thread counts, FSDP, and the refusal of DTensor."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

import saccade
from saccade import mask as masks

torch = pytest.importorskip("torch")


class Rows(torch.utils.data.Dataset):
    """Masks and attention made in a worker."""

    def __len__(self) -> int:
        return 4

    def __getitem__(self, n: int) -> tuple[masks.Mask, torch.Tensor]:
        x = torch.full((1, 6, 2, 4), float(n + 1))
        mask = masks.causal() & masks.prefix(n)
        return mask, saccade.attention(x, x, x, mask)


def test_data_loader_workers() -> None:
    # the parent has used its threads before the workers are forked
    expected = [Rows()[n] for n in range(4)]
    loader = torch.utils.data.DataLoader(Rows(), batch_size=None, num_workers=2, multiprocessing_context="fork")
    for (mask, o), (mask_0, o_0) in zip(loader, expected, strict=True):
        assert mask == mask_0
        assert torch.equal(o, o_0)


def test_torchs_thread_count_is_followed() -> None:
    x = torch.randn(1, 8, 1, 8)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        saccade.attention(x, x, x)
        assert saccade.get_num_threads() == 1
        saccade.set_num_threads(2)
        saccade.attention(x, x, x)
        assert saccade.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)
        saccade.attention(x, x, x)


DTENSOR = """
import torch, torch.distributed as dist, saccade
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
mesh = dist.device_mesh.init_device_mesh("cpu", (1,))
x = distribute_tensor(torch.randn(1, 4, 2, 8), mesh, [Shard(1)])
try:
    saccade.attention(x, x, x)
except saccade.Unsupported as error:
    assert "to_local" in str(error), error
else:
    raise SystemExit("not refused")
local = x.to_local()
saccade.attention(local, local, local)
dist.destroy_process_group()
"""

FSDP = """
import torch, torch.distributed as dist, saccade
from torch.distributed.fsdp import fully_shard
from saccade import mask
class Block(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv, self.sinks = torch.nn.Linear(16, 48), torch.nn.Parameter(torch.zeros(2))
    def forward(self, x):
        q, k, v = self.qkv(x).view(*x.shape[:2], 3, 2, 8).unbind(2)
        return saccade.attention(q, k, v, mask.causal(), sinks=self.sinks).flatten(2)
dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
mesh = dist.device_mesh.init_device_mesh("cpu", (1,))
torch.manual_seed(0)
plain, x = Block(), torch.randn(2, 6, 16)
sharded = Block()
sharded.load_state_dict(plain.state_dict())
fully_shard(sharded, mesh=mesh)
for block in (plain, sharded):
    block(x).square().sum().backward()
for a, b in zip(plain.parameters(), sharded.parameters()):
    torch.testing.assert_close(a.grad, b.grad.full_tensor())
dist.destroy_process_group()
"""


@pytest.mark.skipif(not torch.distributed.is_available(), reason="torch is built without torch.distributed")
@pytest.mark.parametrize("code", [DTENSOR, FSDP], ids=["dtensor", "fsdp"])
def test_distributed(code: str) -> None:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=os.environ, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
