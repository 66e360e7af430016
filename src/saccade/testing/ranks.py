"""The ranks that torchrun started, for tests and benchmarks on GPUs or, without GPUs, on the CPU."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import get_node_local_rank


def start() -> torch.device:
    """The device of this rank; it joins the others with NCCL on GPUs, else with gloo."""
    if not torch.cuda.is_available():
        dist.init_process_group("gloo")
        return torch.device("cpu")
    device = torch.device("cuda", get_node_local_rank())
    torch.cuda.set_device(device)
    # high priority, otherwise copies wait for a kernel that fills the GPU
    options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
    dist.init_process_group("nccl", device_id=device, pg_options=options)
    return device
