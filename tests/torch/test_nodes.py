"""Some of the tests again on three ranks on two nodes, and what only happens between nodes."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

import fusion_rt.torch as hvd
from tests.harness import Job, on_ranks
from tests.torch.test_functions import test_objects_are_gathered  # noqa: F401
from tests.torch.test_ops import (  # noqa: F401
    test_allgather_of_different_numbers_of_rows,
    test_allreduce_of_every_dtype_with_every_op,
    test_broadcast_from_every_root,
    test_operations_are_differentiable,
)
from tests.torch.test_optimizer import (  # noqa: F401
    test_several_backward_passes_make_one_step,
    test_training_is_that_of_one_process,
    test_unused_parameters_contribute_zeros,
)


@pytest.fixture(scope="module")
def job() -> Iterator[Job]:
    with Job((2, 1), {"HOROVOD_FUSION_THRESHOLD": "4KiB"}) as running:
        yield running


@on_ranks
def test_ranks_know_their_place() -> None:
    places = {0: (0, 2, 0, 2), 1: (1, 2, 0, 1), 2: (0, 1, 1, 2)}
    found = (hvd.local_rank(), hvd.local_size(), hvd.cross_rank(), hvd.cross_size())
    assert found == places[hvd.rank()]
    assert hvd.size() == 3


@on_ranks
def test_gradients_are_halved_between_nodes_only() -> None:
    for compression, tolerance in ((hvd.Compression.fp16, 2**-10), (hvd.Compression.bf16, 2**-7)):
        torch.manual_seed(0)
        parameter = torch.nn.Parameter(torch.randn(3000))
        values = torch.rand(3000) + 0.5
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD([parameter], lr=0.1), compression=compression)
        (parameter * values).sum().backward()
        optimizer.synchronize()
        assert not torch.equal(parameter.grad, values)
        torch.testing.assert_close(parameter.grad, values, rtol=2 * tolerance, atol=0)
        reduced = hvd.allreduce(values, compression=compression)
        torch.testing.assert_close(reduced, values, rtol=2 * tolerance, atol=0)
        gathered = hvd.allgather(torch.stack([parameter.grad, reduced]).view(1, -1))
        assert (gathered == gathered[0]).all(), "the ranks' results differ"
