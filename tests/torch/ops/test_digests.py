"""Digests: ranks whose parameters differ are named, and nobody is where they do not."""

from __future__ import annotations

import warnings

import pytest
import torch

import fusion_rt.torch as hvd
from fusion_rt.torch.ops.digests import differences, digest
from tests.harness import on_ranks

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.uint8, torch.bool, torch.complex64]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("count", [1, 2, 3, 4, 8, 13, 1024])
def test_a_digest_changes_with_each_element(dtype: torch.dtype, count: int) -> None:
    tensor = torch.randn(count, generator=torch.Generator().manual_seed(count)).mul(9).to(dtype)
    before = int(digest(tensor))
    assert int(digest(tensor.clone())) == before
    for index in {0, count // 2, count - 1}:
        other = tensor.clone()
        other[index] = 0 if other[index] else 1
        assert int(digest(other)) != before


def test_a_digest_is_that_of_the_values_wherever_they_lie() -> None:
    tensor = torch.randn(7, 4, 3)
    padded = torch.zeros(8 * 12)[1:85].view(7, 4, 3).copy_(tensor)
    assert int(digest(padded)) == int(digest(tensor))


def test_the_ranks_that_differ_from_most_are_named_with_the_first_tensor() -> None:
    rows = torch.tensor([[1, 2, 3], [1, 2, 3], [1, 5, 4], [1, 2, 3]])
    assert differences(rows, ["a", "b", "c"]) == "rank 2 (in 'b')"
    assert differences(rows[:2], ["a", "b", "c"]) == ""


@on_ranks
def test_a_rank_that_sets_a_parameter_by_itself_is_noticed_once() -> None:
    torch.manual_seed(1)
    model = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Linear(3, 1))
    plain = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FUSION_CHECK_PARAMETERS", "2")
        optimizer = hvd.DistributedOptimizer(plain, model.named_parameters())
    said: list[list[str]] = []
    for step in range(10):
        if step == 4 and hvd.rank() == 1:
            with torch.no_grad():
                model[1].bias.add_(1)
        optimizer.zero_grad()
        model(torch.ones(2, 3)).sum().backward()
        with warnings.catch_warnings(record=True) as heard:
            warnings.simplefilter("always")
            optimizer.step()
        said.append([str(warning.message) for warning in heard])
    assert [len(words) for words in said] == [0] * 7 + [1, 0, 0]
    assert "a step between 4 and 6" in said[7][0]
    assert "(in '1.bias')" in said[7][0]
