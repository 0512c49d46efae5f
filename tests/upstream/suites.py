"""The suites of tests that torch installs, made ready for a backend that they do not know.

Torch's suites decide by the name of the backend what they run: at import by decorators, and in the bodies of tests. For
another backend they are imported as for gloo, so that nothing is skipped that gloo runs; then the name is replaced, so
that the bodies ask for process groups of the other backend, and where they compare it with `"gloo"` it counts as equal.
Where a test names gloo itself (`new_group(backend="gloo")`), it gets the other backend too.

Two kinds of tests are skipped by torch with gloo and run here with every backend: those of groups of 2 ranks, for which
torch wants 8 in the job and 3 are enough, and all-to-all of tensors in ordinary memory, which it tests with MPI only.
"""

from __future__ import annotations

import functools
import importlib
import os
import tempfile
import unittest
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

PREPARED = (
    "torch._dynamo",
    "torch.cuda.amp",
    "torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook",
    "torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook",
    "torch.distributed.algorithms.ddp_comm_hooks.quantization_hooks",
    "torch.distributed.algorithms.model_averaging.hierarchical_model_averager",
    "torch.distributed.checkpoint.state_dict",
    "torch.distributed.fsdp",
    "torch.distributed.optim",
    "torch.distributed.tensor.parallel",
    "torch.profiler",
    "torch.testing._internal.common_distributed",
    "torch.testing._internal.distributed.checkpoint_utils",
    "torch.testing._internal.distributed._tensor.common_dtensor",
    "torch.testing._internal.common_fsdp",
)
"""Modules that all suites need, which do not look at the environment."""

_INTERNAL = "torch.testing._internal"
_ENOUGH_FOR_GROUPS = 3  # ranks


@dataclass(frozen=True)
class Suite:
    """A suite of tests.

    Attributes:
        make: imports it, and returns its tests.
        about: what it tests.
        ranks: how many its tests have; 0 if they run on any number.
    """

    make: Callable[[], type[unittest.TestCase]]
    about: str
    ranks: int = 0


class Name(str):
    """The name of a backend that has gloo's features."""

    __hash__ = str.__hash__

    def __eq__(self, other: object) -> bool:
        return other == "gloo" or str.__eq__(self, other)

    def __ne__(self, other: object) -> bool:
        return not self == other


def load(suite: str, backend: str, ranks: int) -> type[unittest.TestCase]:
    """Imports a suite into this process, which can have one backend and number of ranks only.

    Args:
        suite: a key of `SUITES`.
        backend: as `init_process_group` takes it.
        ranks: how many processes run each test.

    Returns:
        The tests. They fork their ranks, so this process must have a single thread.
    """
    os.environ.update(
        BACKEND="gloo",
        WORLD_SIZE=str(ranks),
        TEMP_DIR=tempfile.gettempdir(),
        INIT_METHOD=f"file://{tempfile.gettempdir()}/init",  # which tests make anew
    )
    tests = SUITES[suite].make()
    if backend != "gloo":
        os.environ["BACKEND"] = backend
        _replace_gloo(backend)
    return tests


def contents(tests: type[unittest.TestCase]) -> dict[str, str]:
    """Returns the reason for which each test of a suite is skipped in any case, empty if it is not, by its name."""
    found = {name: getattr(tests, name) for name in unittest.TestLoader().getTestCaseNames(tests)}
    return {
        name: test.__unittest_skip_why__ if hasattr(test, "__unittest_skip__") else "" for name, test in found.items()
    }


def _replace_gloo(backend: str) -> None:
    import torch.distributed as dist

    dist.monitored_barrier = _monitored_barrier
    for module in (dist, dist.distributed_c10d):
        for name in ("init_process_group", "new_group", "new_subgroups", "new_subgroups_by_enumeration"):
            setattr(module, name, _with(backend, getattr(module, name)))


def _with(backend: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """Returns the function with another backend wherever gloo is asked for."""

    @functools.wraps(function)
    def replaced(*args: Any, **kwargs: Any) -> Any:
        args = tuple(backend if isinstance(each, str) and each == "gloo" else each for each in args)
        if kwargs.get("backend") == "gloo":
            kwargs["backend"] = backend
        return function(*args, **kwargs)

    return replaced


def _monitored_barrier(group: Any = None, timeout: Any = None, wait_all_ranks: bool = False) -> None:
    """Does what torch's function does, which refuses all backends that are not called gloo."""
    import torch.distributed as dist

    if not dist.distributed_c10d._rank_not_in_group(group):
        limit = timedelta(seconds=timeout) if isinstance(timeout, float) else timeout
        (group or dist.group.WORLD).monitored_barrier(limit, wait_all_ranks=wait_all_ranks)


def _skip_without_gpus(common: Any) -> None:
    """Has tests that need GPUs skipped before their ranks are started, instead of by these."""

    def unless_there_are(gpus: int, allow_cpu: bool = False) -> Callable[..., Any]:
        return unittest.skipUnless(allow_cpu or common.at_least_x_gpu(gpus), f"Need at least {gpus} CUDA devices")

    common.skip_if_lt_x_gpu = unless_there_are
    common.skip_if_no_gpu = unless_there_are(int(os.environ["WORLD_SIZE"]))


def _distributed() -> type[unittest.TestCase]:
    utilities = importlib.import_module(f"{_INTERNAL}.common_utils")
    skip_if = utilities.skip_but_pass_in_sandcastle_if
    utilities.skip_but_pass_in_sandcastle_if = lambda condition, reason: skip_if(
        condition and not reason.startswith("Only MPI supports"), reason
    )
    common = importlib.import_module(f"{_INTERNAL}.common_distributed")
    _skip_without_gpus(common)
    if int(os.environ["WORLD_SIZE"]) >= _ENOUGH_FOR_GROUPS:
        common.skip_if_small_worldsize = lambda test: test
    suite = importlib.import_module(f"{_INTERNAL}.distributed.distributed_test")

    class Distributed(suite.TestDistBackend, suite.DistributedTest._DistTestBase):  # type: ignore[misc,name-defined]
        def setUp(self) -> None:
            super().setUp()
            # Ranks that are spawned import the suite after `setUp` has set this.
            suite.INIT_METHOD = os.environ["INIT_METHOD"]
            if (backend := os.environ["BACKEND"]) != "gloo":
                suite.BACKEND = Name(backend)
                suite.PROFILING_SUPPORTED_BACKENDS.append(backend)
                suite.SEND_RECV_PROFILING_SUPPORTED_BACKENDS.append(backend)
            self._spawn_processes()

    return Distributed


def _under_rpc(name: str) -> type[unittest.TestCase]:
    suite = importlib.import_module(f"{_INTERNAL}.distributed.ddp_under_dist_autograd_test")
    fixture = importlib.import_module(f"{_INTERNAL}.distributed.rpc.tensorpipe_rpc_agent_test_fixture")
    helper = importlib.import_module(f"{_INTERNAL}.distributed.rpc_utils")
    return type(name, (getattr(suite, name), fixture.TensorPipeRpcAgentTestFixture, helper.SpawnHelper), {})


def _sharded() -> type[unittest.TestCase]:
    tests: type[unittest.TestCase] = importlib.import_module("tests.upstream.sharded").Sharded
    return tests


SUITES = {
    "DistributedTest": Suite(
        _distributed, "collectives, point to point, objects, groups, DDP, time-outs, events of profilers"
    ),
    "Sharded": Suite(_sharded, "FSDP2, HSDP, tensor parallelism, DTensor, DCP, `torch.compile` on torch's harnesses"),
    "DdpUnderDistAutogradTest": Suite(
        functools.partial(_under_rpc, "DdpUnderDistAutogradTest"), "DDP inside and around a model that RPC spreads", 6
    ),
    "DdpComparisonTest": Suite(
        functools.partial(_under_rpc, "DdpComparisonTest"), "gradients of DDP under distributed autograd", 4
    ),
}
