"""Training over ranks: a group of ranks shares the tokens of a row, and weights are sharded over all ranks.

A run's checkpoint is a folder of torch.distributed.checkpoint, named after its step, and `checkpoint.json`, which names
the last complete folder and has the progress. Any number of ranks can resume it. Losses equal those of one process,
except for rounding.
"""

from __future__ import annotations

import atexit
import json
from collections.abc import Callable
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.distributed_c10d import get_node_local_rank
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from ..distributed import ContextParallel
from .checkpoint import remove_folders
from .data import Batch
from .files import read_object, write_atomic
from .hybrid import Hybrid
from .loading import load_model
from .objective import targets_of
from .progress import CHECKPOINT, RANKS, Progress, read_progress
from .texts import Text
from .tokens import Tokenizer
from .training import WEIGHTS, Trainer
from .weights import save_weights

# seconds that a rank waits for the others, of which the first may make a folder of tokens
PATIENCE = 1800


class ParallelTrainer(Trainer):
    """A `Trainer` on the ranks that torchrun started: groups of `context_parallel` ranks share a row.

    Every rank makes one; rank 0 writes the run's folder. The groups divide the rows of a batch. Attention uses a ring,
    states of recurrent layers are sent in one exchange, and FSDP2 shards weights and the optimizer's state over all
    ranks. With NVIDIA GPUs, each rank takes the GPU of its local number and uses NCCL; otherwise it uses gloo. Raises
    as `Trainer` does, and ValueError if context_parallel does not divide the ranks, or the groups the rows.
    """

    state, foreign, alone = RANKS, CHECKPOINT, False

    def __init__(self, out: str | Path, settings: dict[str, Any], *, context_parallel: int = 1, **options: Any) -> None:
        self.device = start()
        world = dist.get_world_size()
        if context_parallel < 1 or world % context_parallel:
            raise ValueError(
                f"context_parallel={context_parallel} and {world} ranks; expected a divisor of the ranks that torchrun "
                "starts (--nproc_per_node)"
            )
        groups = world // context_parallel
        mesh = init_device_mesh(self.device.type, (groups, context_parallel), mesh_dim_names=("rows", "tokens"))
        self.group, self.groups, self.number = mesh["tokens"], groups, mesh.get_local_rank("rows")
        self.main = dist.get_rank() == 0
        super().__init__(out, settings, **options)

    def _device(self, name: str | None) -> torch.device:
        if name is not None:
            raise ValueError(f"device is {name!r} with ranks; leave it out: each rank takes the GPU of its number")
        return self.device

    def _load_text(self, tokenizer: Tokenizer | None, say: Callable[[str], None]) -> Text:
        # rank 0 makes a folder of tokens if it is missing; the others open it
        text = super()._load_text(tokenizer, say) if self.main else None
        dist.barrier()
        return super()._load_text(tokenizer, say) if text is None else text

    def _resumable(self, *, resume: bool, overwrite: bool) -> Progress | None:
        try:
            return super()._resumable(resume=resume, overwrite=overwrite)
        finally:
            # before rank 0 changes anything
            dist.barrier()

    def _stored(self) -> Progress:
        return read_progress(self._state()["progress"], self.out / RANKS)

    def _state(self) -> dict[str, Any]:
        state = read_object(self.out / RANKS)
        if not isinstance(state.get("progress"), dict) or not isinstance(state.get("folder"), str):
            raise ValueError(
                f"{self.out / RANKS} does not name a checkpoint of saccade train; restore it from a copy, or start "
                "again with --overwrite"
            )
        return state

    def _place(self) -> None:
        if self.settings.batch % self.groups:
            raise ValueError(
                f"batch={self.settings.batch} rows and {self.groups} groups of ranks; expected a multiple of them"
            )
        super()._place()
        mesh = init_device_mesh(self.device.type, (dist.get_world_size(),), mesh_dim_names=("all",))
        for module in (*self.model.blocks, self.model):
            fully_shard(module, mesh=mesh)

    def _loss(self, batch: Batch) -> Tensor:
        """A number whose mean over all ranks is the loss, because FSDP takes the mean of gradients.

        In training, each group of ranks has its own rows of the batch. In validation, every group has all rows, because
        their number need not be a multiple of the number of groups.
        """
        rows = slice(self.number, None, self.groups) if self.model.training else slice(None)
        ranks = ContextParallel(batch.tokens.shape[1], self.group, self.layout, self.backend)
        total = self.objective.sum(Batch(*(x[rows] for x in batch)), ranks)
        shares = dist.get_world_size() // (1 if self.model.training else self.groups)
        return total * (shares / targets_of(batch))

    def _mean(self, batch: Batch) -> Tensor:
        shares = [self._loss(part) * targets_of(part) for part in self.objective.parts(batch)]
        return torch.stack(shares).sum() / targets_of(batch)

    @property
    def layout(self) -> str:
        """A balanced layout for attention, a contiguous one for recurrent layers, whose states go from rank to rank."""
        return "contiguous" if isinstance(self.model, Hybrid) else "zigzag"

    def whole(self) -> nn.Module:
        """The trained model in this process alone, from the last weights that were written."""
        return load_model(self.out)

    def _common(self, steps: int) -> int:
        number = torch.tensor(steps, device=self.device)
        dist.broadcast(number, 0)
        return int(number)

    def _value(self, x: Tensor) -> float:
        if isinstance(x, DTensor):
            return x.full_tensor().item()
        total = x.detach().clone()
        dist.all_reduce(total)
        return total.item() / dist.get_world_size()

    def _complete(self) -> None:
        whole = get_model_state_dict(self.model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
        if self.main:
            save_weights(self.out / WEIGHTS, whole)

    def _write(self) -> None:
        step = self.progress.step
        self._complete()
        if not step:
            # reading the state of an optimizer before its first step would count as a step
            return
        folder = f"checkpoint-{step}"
        state_dict_saver.save(self._tensors(), checkpoint_id=str(self.out / folder))
        if self.main:
            write_atomic(self.out / RANKS, json.dumps({"folder": folder, "progress": asdict(self.progress)}).encode())
            remove_folders(self.out, folder)
        dist.barrier()

    def _read(self) -> dict[str, Any]:
        state = self._state()
        tensors = self._tensors()
        state_dict_loader.load(tensors, checkpoint_id=str(self.out / state["folder"]))
        set_state_dict(
            self.model, self.optimizer, model_state_dict=tensors["model"], optim_state_dict=tensors["optimizer"]
        )
        return state["progress"]

    def _tensors(self) -> dict[str, Any]:
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optimizer": optimizer}


def start() -> torch.device:
    """The device of this rank; joins the ranks that torchrun started. Raises ValueError if there are none."""
    gpus = torch.cuda.device_count()
    if not dist.is_initialized():
        if not dist.is_torchelastic_launched():
            raise ValueError(
                "context_parallel needs ranks: torchrun --nproc_per_node 4 -m saccade train --context-parallel 2"
            )
        dist.init_process_group("nccl" if gpus else "gloo", timeout=timedelta(seconds=PATIENCE))
        atexit.register(dist.destroy_process_group)
    if not gpus:
        return torch.device("cpu")
    device = torch.device("cuda", get_node_local_rank(fallback_rank=dist.get_rank() % gpus))
    torch.cuda.set_device(device)
    return device
