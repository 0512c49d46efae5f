"""Strategies for Lightning's `Trainer`. Importing this registers them::

    import fusion_rt.integrations.lightning

    trainer = Trainer(devices=2, strategy="fusion")      # hvd.DistributedOptimizer: codecs, algorithms
    trainer = Trainer(devices=2, strategy="fusion_ddp")  # DistributedDataParallel on the backend "fusion"

They run under `fusionrun`, `mpirun`, `srun` and torchrun, and where Lightning itself starts the workers. The learning
rate is the script's: nothing multiplies it by the number of workers.
"""

from __future__ import annotations

import os
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from lightning.fabric.plugins.environments import ClusterEnvironment
from lightning.pytorch import Trainer
from lightning.pytorch.strategies import DDPStrategy, StrategyRegistry
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

import fusion_rt.c10d  # noqa: F401  # registers the backend: torch 2.4 finds none by itself
import fusion_rt.torch as hvd
from fusion_rt.core.errors import FusionError
from fusion_rt.integrations import torchrun
from fusion_rt.launchers import environment
from fusion_rt.torch.core.runtime import leave, runtime
from fusion_rt.torch.sync.checkpoint import KEY
from fusion_rt.torch.sync.wrapped import Wrapped


class FusionEnvironment(ClusterEnvironment):
    """The place of a worker that `fusionrun`, or another launcher of docs/launchers.md, has started.

    The strategies here find out by themselves that they need it. With another one, say `plugins=[FusionEnvironment()]`.
    """

    @staticmethod
    def detect() -> bool:
        """Tells whether a launcher has started this worker that Lightning does not know. After `torchrun.set_variables`
        Lightning takes it for torchrun, which is as good."""
        return "LOCAL_RANK" not in os.environ and environment.detect().size > 1

    @property
    def creates_processes_externally(self) -> bool:
        return True

    @property
    def main_address(self) -> str:
        """Host that serves the store of `torch.distributed`."""
        return _variable("MASTER_ADDR")

    @property
    def main_port(self) -> int:
        return int(_variable("MASTER_PORT"))

    def world_size(self) -> int:
        return int(_variable("WORLD_SIZE"))

    def global_rank(self) -> int:
        return int(_variable("RANK"))

    def local_rank(self) -> int:
        return int(_variable("LOCAL_RANK"))

    def node_rank(self) -> int:
        return int(_variable("GROUP_RANK"))

    def set_world_size(self, size: int) -> None:
        """Does nothing: the launcher has decided."""

    def set_global_rank(self, rank: int) -> None:
        """Does nothing, likewise."""

    def validate_settings(self, num_devices: int, num_nodes: int) -> None:
        """Raises `ValueError` unless the Trainer was told of as many workers as the launcher has started."""
        size = self.world_size()
        if num_devices * num_nodes != size:
            raise ValueError(
                f"the launcher has started {size} workers, and Trainer(devices={num_devices}, num_nodes={num_nodes}) "
                f"is for {num_devices * num_nodes}: set devices=<workers on each host> and num_nodes=<hosts>"
            )


def _variable(name: str) -> str:
    """Returns a variable of torchrun's; the first call joins the job to learn of them."""
    torchrun.set_variables()
    return os.environ[name]


class FusionDDPStrategy(DDPStrategy):
    """DistributedDataParallel on the backend "fusion"; comm hooks work on any device, and not on CUDA devices only.

    Args:
        process_group_backend: that of `torch.distributed`.
        arguments: as of Lightning's `DDPStrategy`.
    """

    def __init__(self, *, process_group_backend: str = "fusion", **arguments: Any) -> None:
        if arguments.get("cluster_environment") is None and FusionEnvironment.detect():
            arguments["cluster_environment"] = FusionEnvironment()
        super().__init__(process_group_backend=process_group_backend, **arguments)

    def _register_ddp_hooks(self) -> None:
        assert isinstance(self.model, DistributedDataParallel)
        hook, wrapper = self._ddp_comm_hook, self._ddp_comm_wrapper
        if hook is not None:
            self.model.register_comm_hook(self._ddp_comm_state, hook if wrapper is None else wrapper(hook))

    def on_exception(self, exception: BaseException) -> None:
        """Leaves the job, so that the other ranks raise the exception, also where the script catches it."""
        super().on_exception(exception)
        if isinstance(exception, Exception):
            leave("".join(traceback.format_exception(exception)))

    @classmethod
    def register_strategies(cls, strategy_registry: Any) -> None:
        """Makes `Trainer(strategy="fusion_ddp")` known."""
        strategy_registry.register("fusion_ddp", cls, description="DDP on fusion_rt")


class FusionStrategy(FusionDDPStrategy):
    """Has `hvd.DistributedOptimizer` combine gradients, or parameters, as its algorithm says.

    Every optimizer of the module becomes a distributed one; the module is not wrapped. With `accumulate_grad_batches`
    gradients are reduced once a step, and clipped after that. `torch.distributed` is there as well, on the backend
    "fusion", for metrics and callbacks that call it.

    Args:
        algorithm, compression, gradient_predivide_factor, op: as of `DistributedOptimizer`, with its defaults, such as
            the flags of fusionrun. There is no overlap, since Lightning computes gradients
            within `step()`.
        process_group_backend: that of `torch.distributed`.
        arguments: as of Lightning's `DDPStrategy`: `cluster_environment`, `timeout`, `start_method`, `checkpoint_io`, …

    Raises:
        ValueError: `DistributedOptimizer` refuses the arguments; when `fit` begins.
    """

    optimizers: list[torch.optim.Optimizer]  # Lightning's

    def __init__(
        self,
        *,
        algorithm: Any = None,
        compression: Any = None,
        gradient_predivide_factor: float = 1.0,
        op: Any = hvd.Average,
        **arguments: Any,
    ) -> None:
        super().__init__(**arguments)
        self._asked = {
            "algorithm": algorithm,
            "compression": hvd.Compression.none if compression is None else compression,
            "gradient_predivide_factor": gradient_predivide_factor,
            "op": op,
        }
        self._accumulates = False  # in the backward pass that runs

    def setup_distributed(self) -> None:
        """Joins the job: the process group first, where there is no fusionrun, as it knows the workers' store."""
        super().setup_distributed()
        hvd.init()
        if (hvd.rank(), hvd.size()) != (self.global_rank, self.world_size):
            raise FusionError(
                f"this worker is rank {self.global_rank} of {self.world_size} for Lightning, and rank {hvd.rank()} of "
                f"{hvd.size()} in its job: start all of them by one launcher"
            )

    def configure_ddp(self) -> None:
        """Gives all ranks the parameters and buffers of rank 0."""
        assert self.model is not None
        hvd.broadcast_parameters(self.model.state_dict(), root_rank=0)

    def setup_optimizers(self, trainer: Trainer) -> None:
        """Makes the optimizers of the module distributed."""
        super().setup_optimizers(trainer)
        self.optimizers = [self._distributed(optimizer) for optimizer in self.optimizers]

    def _distributed(self, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
        assert self.lightning_module is not None
        mine = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        named = [(name, p) for name, p in self.lightning_module.named_parameters() if id(p) in mine]
        distributed: torch.optim.Optimizer = hvd.DistributedOptimizer(optimizer, named, **self._asked)
        return distributed

    # --- a step -------------------------------------------------------------------------------------------------------

    @property
    def _distributed_optimizers(self) -> list[Wrapped]:
        return [optimizer for optimizer in self.optimizers if isinstance(optimizer, Wrapped)]

    @contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        """Inside of this, a backward pass is one of several that make up a gradient."""
        self._accumulates = True
        try:
            yield
        finally:
            self._accumulates = False

    def pre_backward(self, closure_loss: Tensor) -> None:
        """Tells optimizers how many backward passes make up a gradient."""
        if self._automatic:
            passes = self.lightning_module.trainer.accumulate_grad_batches
            for optimizer in self._distributed_optimizers:
                if optimizer.backward_passes_per_step != passes:
                    optimizer.set_backward_passes_per_step(passes)

    def post_backward(self, closure_loss: Tensor) -> None:
        """Has gradients of fewer passes reduced, as there are at the end of an epoch, before they are clipped."""
        if self._automatic and not self._accumulates:
            for optimizer in self._distributed_optimizers:
                optimizer.synchronize()

    def optimizer_step(self, optimizer: Any, closure: Callable[[], Any], model: Any = None, **arguments: Any) -> Any:
        """Takes a step. The loss of the closure is reduced only for L-BFGS, which decides by it: that would be one more
        operation in each step."""
        if isinstance(optimizer, torch.optim.LBFGS) or not isinstance(optimizer, Wrapped):
            return super().optimizer_step(optimizer, closure, model, **arguments)
        with optimizer.skip_synchronize():
            return super().optimizer_step(optimizer, closure, model, **arguments)

    @property
    def _automatic(self) -> bool:
        return self.lightning_module is not None and self.lightning_module.automatic_optimization

    # --- checkpoints --------------------------------------------------------------------------------------------------

    def optimizer_state(self, optimizer: Any) -> dict[str, Any]:
        """Returns an optimizer's state, and the daemons' memory of it on all nodes: rank 0's is saved."""
        state: dict[str, Any] = super().optimizer_state(optimizer)
        if KEY in state:
            mine = state[KEY] if hvd.local_rank() == 0 else None
            state[KEY] = [each for each in hvd.allgather_object(mine) if each is not None]
        return state

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Loads the state of optimizers, each node the memory of its own daemon."""
        node = runtime().client.welcome.node
        states = []
        for state in checkpoint["optimizer_states"]:
            if isinstance(kept := state.get(KEY), list):
                state = {**state, KEY: next((each for each in kept if each["node"] == node), kept[0])}
            states.append(state)
        super().load_optimizer_state_dict({**checkpoint, "optimizer_states": states})

    @classmethod
    def register_strategies(cls, strategy_registry: Any) -> None:
        """Makes `Trainer(strategy="fusion")` known."""
        strategy_registry.register("fusion", cls, description="fusion_rt's DistributedOptimizer")


for _strategy in (FusionDDPStrategy, FusionStrategy):
    _strategy.register_strategies(StrategyRegistry)
