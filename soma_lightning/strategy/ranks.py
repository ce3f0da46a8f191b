"""What both strategies say about the ranks of a run: which device, which place in the mesh, who starts them."""

from __future__ import annotations

from typing import Any, TypeVar

import torch
from torch.distributed.device_mesh import DeviceMesh

from soma_lightning.compat import one_process_class, script_launcher, set_rank_of_messages
from soma_lightning.strategy import processes
from soma_lightning.strategy.engine import Engine

# Lightning has two ParallelStrategy classes; either stands behind `Ranks`.
ParallelStrategy: Any = object

T = TypeVar("T")


class Ranks(ParallelStrategy):  # type: ignore[misc]
    """In front of Lightning's ParallelStrategy, for the Trainer and for Fabric."""

    engine: Engine
    _num_nodes: int
    #: Which of Lightning's two worlds the strategy belongs to.
    _in_fabric: bool

    @property
    def root_device(self) -> torch.device:
        assert self.parallel_devices is not None
        # One device is this process's, whatever local rank a launcher around it left in the environment.
        device: torch.device = self.parallel_devices[0 if len(self.parallel_devices) == 1 else self.local_rank]
        return device

    @property
    def num_nodes(self) -> int:
        return self._num_nodes

    @num_nodes.setter
    def num_nodes(self, num_nodes: int) -> None:
        self._num_nodes = num_nodes

    @property
    def is_distributed(self) -> bool:
        """Whether there are several processes, each with its own part of the data."""
        return bool(self.world_size > 1)

    @property
    def device_mesh(self) -> DeviceMesh:
        """The ranks as a 4-D mesh: pp, dp_replicate, dp_shard, tp; and, by Lightning's names, data_parallel and
        tensor_parallel.

        RuntimeError with one process, or before the processes have met (`fit`, `validate`, ..., `fabric.launch`).
        """
        if self.engine.mesh is None:
            raise RuntimeError("there is no device mesh: the run has one process, or has not begun")
        return self.engine.mesh.device_mesh

    @property
    def dp_rank(self) -> int:
        """Which part of the data this rank reads, for data sets that divide themselves."""
        return 0 if self.engine.mesh is None else self.engine.mesh.dp_rank

    @property
    def dp_size(self) -> int:
        """How many parts the data has."""
        return 1 if self.engine.mesh is None else self.engine.mesh.dp_size

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        return {"num_replicas": self.dp_size, "rank": self.dp_rank}

    def _number_ranks(self) -> None:
        """Called by Lightning's connector when devices and nodes are known, before the launcher is chosen."""
        assert self.parallel_devices is not None
        devices = len(self.parallel_devices)
        if self.cluster_environment is not None and devices * self.num_nodes > 1:
            self.cluster_environment.set_world_size(devices * self.num_nodes)
            self.cluster_environment.set_global_rank(self.node_rank * devices + self.local_rank)
        set_rank_of_messages(self.global_rank)

    def _configure_launcher(self) -> None:
        """Last call of the connector. One process needs no launcher, nor do processes that something else started."""
        assert self.parallel_devices is not None
        assert self.cluster_environment is not None
        devices = len(self.parallel_devices)
        self.engine.setup_world(devices=devices, num_nodes=self.num_nodes, processes=self.world_size)
        if not self.is_distributed:
            self.__class__ = one_process_class(type(self), fabric=self._in_fabric)  # type: ignore[arg-type]
        elif not self.cluster_environment.creates_processes_externally:
            self._launcher = script_launcher(self.cluster_environment, devices, self.num_nodes, fabric=self._in_fabric)

    def setup_environment(self) -> None:
        super().setup_environment()
        if self.is_distributed:
            assert self.cluster_environment is not None
            self.engine.join_processes(
                rank=self.global_rank,
                address=self.cluster_environment.main_address,
                port=self.cluster_environment.main_port,
                device=self.root_device,
            )

    def barrier(self, name: str | None = None) -> None:
        if self.is_distributed:
            processes.barrier(self.root_device)

    def broadcast(self, obj: T, src: int = 0) -> T:
        return processes.broadcast(obj, src) if self.is_distributed else obj
