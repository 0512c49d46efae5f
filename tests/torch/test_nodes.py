"""Some of the tests again on four ranks on two nodes, and what only happens between nodes."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

import fusion_rt.torch as hvd
from fusion_rt.codecs import CODECS
from tests.harness import Job, on_ranks
from tests.torch.ops.test_broadcast import test_broadcast_from_every_root  # noqa: F401
from tests.torch.ops.test_gather import test_allgather_of_different_numbers_of_rows  # noqa: F401
from tests.torch.ops.test_handles import (  # noqa: F401
    test_operations_without_a_name_that_are_of_different_kinds_are_an_error_at_once,
)
from tests.torch.ops.test_reduce import test_every_dtype_with_every_op  # noqa: F401
from tests.torch.sync.test_adasum_optimizer import (  # noqa: F401
    test_compressed_steps,
    test_steps_are_combined_by_the_formula,
)
from tests.torch.sync.test_functions import (  # noqa: F401
    test_objects_are_gathered,
    test_within_a_process_set,
)
from tests.torch.sync.test_gradients import (  # noqa: F401
    test_a_join_with_sparse_gradients_says_what_to_do,
    test_a_rank_that_joins_before_its_first_step_gets_the_plan,
    test_an_optimizer_for_sparse_gradients,
    test_an_optimizer_over_a_part_of_the_ranks,
    test_gradients_on_a_device_go_through_the_arena,
    test_parameters_of_a_group_share_a_bucket,
    test_ranks_without_data_join,
    test_sparse_gradients_are_reduced,
)
from tests.torch.test_optimizer import (  # noqa: F401
    test_optimizers_in_another_order_on_one_rank_are_an_error_at_once,
    test_several_backward_passes_make_one_step,
    test_training_is_that_of_one_process,
    test_unused_parameters_contribute_zeros,
)
from tests.torch.test_sync_batch_norm import (  # noqa: F401
    test_a_part_of_the_ranks,
    test_empty_batches_and_single_elements,
    test_training_a_network_with_it,
)


@pytest.fixture(scope="module")
def job() -> Iterator[Job]:
    with Job((3, 1), {"HOROVOD_FUSION_THRESHOLD": "4KiB"}) as running:
        yield running


@on_ranks
def test_ranks_know_their_place() -> None:
    places = {0: (0, 3, 0, 2), 1: (1, 3, 0, 1), 2: (2, 3, 0, 1), 3: (0, 1, 1, 2)}
    found = (hvd.local_rank(), hvd.local_size(), hvd.cross_rank(), hvd.cross_size())
    assert found == places[hvd.rank()]
    assert hvd.size() == 4


@on_ranks
def test_an_average_of_finite_halves_is_finite_on_every_route() -> None:
    """In messages and through memory, of single tensors, groups, rows and gradients."""
    for dtype, value in ((torch.float16, 60000.0), (torch.bfloat16, 3.3e38)):
        for numel in (4, 40_000):
            tensor = torch.full((numel,), value, dtype=dtype)
            rows = hvd.reducescatter(torch.full((hvd.size(), numel), value, dtype=dtype))
            parameter = torch.nn.Parameter(torch.zeros(numel, dtype=dtype))
            optimizer = hvd.DistributedOptimizer(torch.optim.SGD([parameter], lr=0.0))
            for _ in range(2):
                optimizer.zero_grad()
                (parameter * tensor).sum().backward()
            for mean in (hvd.allreduce(tensor), hvd.grouped_allreduce([tensor])[0], rows[0], parameter.grad):
                torch.testing.assert_close(mean, tensor, rtol=2 * torch.finfo(dtype).eps, atol=0)


@pytest.mark.parametrize("name", sorted(name for name, codec in CODECS.items() if codec().stateful))
@on_ranks
def test_an_average_of_finite_halves_is_finite_with_a_codec_that_remembers(name: str) -> None:
    """Three ranks of a node add up 180,000 before a codec has it, where float16 ends at 65,504."""
    values = torch.full((40, 100), 60000.0, dtype=torch.float16)
    text = f"{name}(minimum=0, density=1.0)" if hasattr(CODECS[name], "density") else f"{name}(minimum=0)"
    parameter = torch.nn.Parameter(torch.zeros_like(values))
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([parameter], lr=0.0), compression=text)
    for _ in range(3):
        optimizer.zero_grad()
        (parameter * values).sum().backward()
        for mean in (parameter.grad, hvd.allreduce(values, compression=text)):
            assert mean.isfinite().all()
            if name != "int2":  # which has powers of two only
                torch.testing.assert_close(mean, values, rtol=0.05, atol=0)


@on_ranks
def test_a_sum_of_halves_is_rounded_once_in_a_node_and_again_between_nodes() -> None:
    """So the numbers of one node may leave the range of float16 on their way, and those of several may not."""
    for numel in (4, 40_000):
        for mine, expected in (
            ((60000.0, 60000.0, -60000.0, 0.0), 60000.0),  # the first three are one node's
            ((60000.0, 60000.0, 0.0, -60000.0), float("inf")),
            ((2048.0, 1.0, 1.0, 0.0), 2050.0),
            ((2048.0, 1.0, 0.0, 1.0), 2048.0),  # 2,049 is no float16
        ):
            values = torch.full((numel,), mine[hvd.rank()], dtype=torch.float16)
            assert hvd.allreduce(values, op=hvd.Sum).tolist() == [expected] * numel


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


@on_ranks
def test_a_model_of_thousands_of_tensors_has_a_plan_of_many_frames() -> None:
    """Its message is longer than what a daemon takes from anybody in one frame."""
    names = [f"a_layer_that_somebody_has_given_a_long_name.{number}" for number in range(2000)]
    parameters = {name: torch.nn.Parameter(torch.zeros(2)) for name in names}
    inner = torch.optim.SGD(list(parameters.values()), lr=1.0)
    optimizer = hvd.DistributedOptimizer(inner, named_parameters=list(parameters.items()))
    torch.stack(
        [(hvd.rank() + number) * each.sum() for number, each in enumerate(parameters.values())]
    ).sum().backward()
    optimizer.step()
    for number, each in enumerate(parameters.values()):
        assert torch.equal(each.detach(), torch.full((2,), -(1.5 + number)))
