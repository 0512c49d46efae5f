"""Scripts that compile their training step, with torch's compiler: what is compiled is the model and the optimizer."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch

import fusion_rt.torch as hvd
from tests.harness import on_ranks
from tests.torch.training import MakeOptimizer, assert_same, loss_of, make_model, my_batch, train_reference

adam: MakeOptimizer = functools.partial(torch.optim.Adam, lr=0.01)
OPTIONS: list[dict[str, Any]] = [{}, {"overlap": "forward"}, {"algorithm": "bsp"}]


def compiled_files() -> set[str]:
    """Returns the files of ours of which the compiler has compiled a function."""
    from torch._dynamo import utils

    compiled = utils.orig_code_map.values.values()
    return {code.co_filename for code in compiled if "/fusion_rt/" in code.co_filename}


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@on_ranks
def test_a_compiled_training_step_is_that_of_one_process(options: dict[str, Any]) -> None:
    torch.compiler.reset()
    model, reference = make_model(), make_model()
    optimizer = hvd.DistributedOptimizer(adam(model.parameters()), model.named_parameters(), **options)

    @torch.compile(backend="eager")
    def step(batch: tuple[torch.Tensor, torch.Tensor]) -> None:
        optimizer.zero_grad()
        loss_of(model, batch).backward()
        optimizer.step()

    for number in range(3):
        step(my_batch(number))
    hvd.synchronize_parameters()
    train_reference(reference, adam(reference.parameters()), range(3))
    assert_same(model, reference, rtol=1e-3, atol=2e-6)  # a compiled Adam has its corrections in single precision
    assert compiled_files() == set()


@pytest.mark.parametrize("options", [OPTIONS[0], OPTIONS[2]], ids=str)
@on_ranks
def test_compiled_autograd_is_refused_where_its_end_has_to_be_known(options: dict[str, Any]) -> None:
    from torch._dynamo import compiled_autograd

    torch.compiler.reset()
    model, reference = make_model(), make_model()
    optimizer = hvd.DistributedOptimizer(adam(model.parameters()), model.named_parameters(), **options)

    def backward(step: int) -> None:
        loss = loss_of(model, my_batch(step))
        with compiled_autograd._enable(functools.partial(torch.compile, backend="eager")):
            loss.backward()

    for step in range(2):
        optimizer.zero_grad()
        if "algorithm" in options:
            backward(step)
        else:
            with pytest.raises(ValueError, match="compiled autograd"):
                backward(step)
            optimizer.zero_grad()
            loss_of(model, my_batch(step)).backward()
        optimizer.step()
    hvd.synchronize_parameters()
    train_reference(reference, adam(reference.parameters()), range(2))
    assert_same(model, reference, rtol=1e-3, atol=2e-6)  # a compiled Adam has its corrections in single precision
