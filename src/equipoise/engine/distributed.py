"""Several processes that train one model."""

from __future__ import annotations

import importlib
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any
from uuid import uuid4

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from equipoise.core import SourceError
from equipoise.engine.batchnorm import gather, synchronize

__all__ = ["Group"]

# Long enough for one process to write checkpoints and reports while the others wait; then a lost
# process is an error.
TIMEOUT = timedelta(minutes=10)

_REMEDY = (
    "Start with torchrun, which sets all of its variables, or unset RANK, LOCAL_RANK "
    "and WORLD_SIZE."
)


@dataclass
class Group:
    """The processes that train together; by default this one alone, which needs and costs nothing.

    All processes must call the same methods in the same order. A process that is lost makes the
    next call of the others raise `RuntimeError`, after ten minutes at the latest.

    Args:
        rank: The number of this process, from 0.
        local_rank: Its number among those of the same machine.
        world: How many processes there are.
        device: Where this process computes.
    """

    rank: int = 0
    local_rank: int = 0
    world: int = 1
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))

    @classmethod
    def from_environment(cls, device: str | torch.device = "cpu") -> Group:
        """Start the group that torchrun's environment describes; a group of one without torchrun.

        Args:
            device: Where to compute. On `cuda`, process `i` of a machine takes GPU `i`, and they
                communicate by NCCL; on `cpu` by gloo.
        """
        device = torch.device(device)
        if not {"RANK", "WORLD_SIZE", "LOCAL_RANK"} & os.environ.keys():
            return cls(device=device)
        rank, local_rank, world = (_whole(name) for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"))
        if not local_rank <= rank < world:
            raise ValueError(
                "Group's environment must have LOCAL_RANK <= RANK < WORLD_SIZE; "
                f"got LOCAL_RANK={local_rank}, RANK={rank}, WORLD_SIZE={world}. {_REMEDY}"
            )
        if world == 1:
            return cls(device=device)
        if not os.environ.get("MASTER_ADDR"):
            raise ValueError(f"Group's environment must have MASTER_ADDR; got ''. {_REMEDY}")
        _whole("MASTER_PORT")
        if device.type not in ("cpu", "cuda"):
            raise ValueError(
                f"Group.device must be cpu or cuda for several processes; got {str(device)!r}."
            )
        if device.type == "cuda":
            if local_rank >= torch.cuda.device_count():
                raise ValueError(
                    "Group must have one GPU for each process of a machine; got process "
                    f"{local_rank + 1} and "
                    f"{torch.cuda.device_count()} GPUs. Start torchrun with fewer processes, "
                    "or with the device cpu."
                )
            device = torch.device("cuda", local_rank)
            torch.cuda.set_device(device)
        backend = "nccl" if device.type == "cuda" else "gloo"
        if not dist.is_available() or not dist.is_backend_available(backend):
            raise ValueError(
                f"Group of {world} processes must have torch.distributed with {backend}, "
                "which this build of torch lacks."
            )
        if dist.is_initialized():
            raise ValueError(
                "Group.from_environment must be called once; got a second call. Pass the "
                "group on, or close it first."
            )
        # Imported once the group is there, as DistributedDataParallel does, its default arguments
        # would keep the group for ever.
        importlib.import_module("torch.distributed.nn.functional")
        store, _, _ = next(dist.rendezvous("env://", rank, world, timeout=TIMEOUT))  # type: ignore[attr-defined]
        dist.init_process_group(
            backend,
            store=_own(store, rank, world),
            rank=rank,
            world_size=world,
            timeout=TIMEOUT,
            device_id=device if device.type == "cuda" else None,
        )
        return cls(rank, local_rank, world, device)

    @property
    def is_main(self) -> bool:
        """Whether this is the process that writes files and speaks."""
        return self.rank == 0

    def sum(self, tensor: Tensor) -> Tensor:
        """Return the sum of the processes' tensors, in each of them; a new tensor.

        Args:
            tensor: This process's; the same shape and dtype in all.
        """
        total = tensor.detach().clone(memory_format=torch.contiguous_format)
        if self.world == 1:
            return total
        total = total.to(self.device)
        dist.all_reduce(total)
        return total.to(tensor.device)

    def any(self, flag: bool) -> bool:
        """Return whether the flag is true in any process.

        Args:
            flag: This process's.
        """
        return flag if self.world == 1 else self.max(float(flag)) > 0

    def max(self, value: float) -> float:
        """Return the largest of the processes' values; NaN if one is.

        Args:
            value: This process's.
        """
        if self.world == 1:
            return value
        return float(gather(torch.tensor(value, dtype=torch.float64, device=self.device)).max())

    def broadcast_text(self, text: str | None) -> str:
        """Return the main process's text, in each of them.

        Args:
            text: The text; what others than the main process give is not looked at.
        """
        box = [text]
        if self.world > 1:
            dist.broadcast_object_list(box, src=0, device=self.device)
        # Raised after the exchange and in all processes, so that none waits for the others.
        if box[0] is None:
            raise ValueError(
                "Group.broadcast_text.text must be a text in the main process; got None."
            )
        return box[0]

    def on_main(self, source: Path, work: Callable[[], object]) -> None:
        """Let the main process do something; all raise if it could not.

        Args:
            source: What it is done to, for the messages of the others.
            work: What to do.
        """
        error: Exception | None = None
        if self.is_main:
            try:
                work()
            except (ValueError, OSError) as caught:
                error = caught
        reason = error.reason if isinstance(error, SourceError) else str(error or "")
        reason = self.broadcast_text(reason)
        if error or reason:
            raise error or SourceError(source, reason)

    def barrier(self) -> None:
        """Wait until all processes are here."""
        if self.world > 1:
            self.any(False)

    def wrap(self, model: nn.Module) -> nn.Module:
        """Return the model such that its gradients are averaged over the processes.

        The processes then make the same steps. The average is the gradient of the mean loss if all
        processes have the same number of samples; otherwise multiply the loss of a process by
        `world` times its fraction of the samples. Batch normalisation is synchronised in the model
        itself, whose parameters stay the same objects. Load a checkpoint before: all processes
        begin with the main process's tensors. Every parameter must get a gradient in every step;
        freeze those that are not used with `requires_grad_(False)`, or build
        `DistributedDataParallel(synchronize(model), find_unused_parameters=True)` yourself.

        Args:
            model: The model, on `device`. The one returned has it as `module`; for a group of one
                it is returned itself.
        """
        if self.world == 1:
            return model
        # On CPUs a group of its own, since the wrapped model keeps the threads of its group alive.
        # Those of the main group must end in `close`: Python aborts if, while it exits, a thread
        # lets go of a tensor.
        on_gpu = self.device.type == "cuda"
        wrapped = DistributedDataParallel(
            synchronize(model),
            device_ids=[self.device] if on_gpu else None,
            process_group=None if on_gpu else dist.new_group(),
        )
        # Synchronised normalisation keeps the buffers equal, so that they need not be sent again in
        # each step. As an argument it would be deprecated or unknown, depending on torch's version.
        wrapped.broadcast_buffers = False
        return wrapped

    def close(self) -> None:
        """Leave the group."""
        if self.world > 1 and dist.is_initialized():
            dist.destroy_process_group()

    def __enter__(self) -> Group:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _own(store: Any, rank: int, world: int) -> Any:
    """A section of the store that only the processes of this start know.

    torchrun keeps its store when it starts lost processes again, so that torch would find in it
    where they listened before they were lost (pytorch/pytorch#167288). How often it restarted is no
    name for a start, since machines count that each for itself.
    """
    name = uuid4().hex
    if rank:
        store.set(f"hello/{rank}", name)
        start = store.get(f"welcome/{name}").decode()
        store.set(f"{start}/here/{rank}", "")
        return dist.PrefixStore(start, store)  # type: ignore[attr-defined]
    absent, deadline = set(range(1, world)), time.monotonic() + TIMEOUT.total_seconds()
    while absent:
        for other in sorted(absent):
            # It may be the greeting of a process that is no more, which then nobody answers.
            if store.check([f"hello/{other}"]):
                store.set(f"welcome/{store.get(f'hello/{other}').decode()}", name)
            if store.check([f"{name}/here/{other}"]):
                absent.remove(other)
        if absent and time.monotonic() > deadline:
            raise RuntimeError(
                f"Group must have {world} processes; {len(absent)} of them did not come "
                f"within {TIMEOUT}."
            )
        time.sleep(0.01)
    return dist.PrefixStore(name, store)  # type: ignore[attr-defined]


def _whole(name: str) -> int:
    """A number from torchrun's environment."""
    text = os.environ.get(name, "")
    if not text.isdecimal():
        raise ValueError(
            f"Group's environment must have {name} as a whole number; got {text!r}. {_REMEDY}"
        )
    return int(text)
