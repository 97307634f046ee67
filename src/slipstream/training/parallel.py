"""Parallel: several processes, started by torchrun, that train one drafter; each has a share of every batch."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import nn

Number = TypeVar("Number", int, float)


@dataclass(frozen=True, slots=True)
class Parallel:
    """This process's place among `processes`."""

    rank: int = 0
    processes: int = 1

    @classmethod
    def start(cls) -> Parallel:
        """Join the others, if torchrun started this process. What is shared lies in the host's memory: gloo."""
        if int(os.environ.get("WORLD_SIZE", "1")) == 1:
            return cls()
        if not dist.is_initialized():
            dist.init_process_group("gloo")
        return cls(dist.get_rank(), dist.get_world_size())

    def total(self, number: Number) -> Number:
        """The sum over all processes."""
        if self.processes == 1:
            return number
        value = torch.tensor(number, dtype=torch.float64)
        dist.all_reduce(value)
        return type(number)(value.item())

    def of_the_first(self, number: int) -> int:
        """What the first process says."""
        return self.total(number if self.rank == 0 else 0)

    def end(self) -> None:
        """Part from the others."""
        if self.processes > 1:
            dist.barrier()
            dist.destroy_process_group()

    def add_up(self, parameters: Iterable[nn.Parameter]) -> None:
        """Add up all processes' gradients, in one piece. A process without any has zeros."""
        if self.processes == 1:
            return
        wanted = list(parameters)
        for parameter in wanted:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        flat = torch.cat([parameter.grad.reshape(-1) for parameter in wanted if parameter.grad is not None])
        dist.all_reduce(flat)
        at = 0
        for parameter in wanted:
            assert parameter.grad is not None
            parameter.grad.copy_(flat[at : at + parameter.numel()].view_as(parameter))
            at += parameter.numel()
