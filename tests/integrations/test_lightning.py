"""Lightning on fusion_rt trains as one process does with the ranks' batches put together."""

from __future__ import annotations

import functools
import re
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from tests import forks
from tests.harness import Job, WorkerError

pytest.importorskip("lightning", reason="needs Lightning: pip install '.[lightning]'")
pytestmark = pytest.mark.multiprocess

MODULES = (*forks.WORKER, "lightning.pytorch", "fusion_rt.c10d")
ENVIRONMENT = {"HOROVOD_START_TIMEOUT": "120", "MASTER_ADDR": "127.0.0.1"}
SAMPLES, BATCH, RATE = 40, 4, 0.1  # 5 batches on each of two ranks: an odd number, so that accumulation ends early


@pytest.fixture(scope="module")
def job() -> Iterator[Job]:
    with Job((2,), ENVIRONMENT, init=False, modules=MODULES) as running:
        yield running


# --- on the ranks -----------------------------------------------------------------------------------------------------


def data() -> torch.utils.data.TensorDataset:
    generator = torch.Generator().manual_seed(3)
    inputs = torch.randn(SAMPLES, 8, generator=generator)
    return torch.utils.data.TensorDataset(inputs, (inputs @ torch.randn(8, 3, generator=generator)).argmax(1))


def make_net(seed: int) -> torch.nn.Module:
    torch.manual_seed(seed)
    return torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 3))


@functools.cache
def module_class() -> Any:
    """Defined late: only the workers have to import Lightning."""
    import torchmetrics
    from lightning.pytorch import LightningModule

    class Classifier(LightningModule):
        def __init__(self, seed: int, fail_at: int = -1) -> None:
            super().__init__()
            self.net = make_net(seed)
            self.fail_at = fail_at
            self.seen = torchmetrics.SumMetric()

        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            if batch_idx == self.fail_at and self.global_rank == 1:
                raise ArithmeticError("rank 1 was told to fail")
            self.trained_as = type(self.trainer.strategy.model).__name__
            return F.cross_entropy(self.net(batch[0]), batch[1])

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            right = (self.net(batch[0]).argmax(1) == batch[1]).float().mean()
            self.log("accuracy", right, sync_dist=True)
            self.seen.update(len(batch[1]))
            self.log("seen", self.seen)  # torchmetrics adds it up over the ranks by itself

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), RATE, momentum=0.9)

    return Classifier


def trainer_of(strategy: Any, directory: str = "", **arguments: Any) -> Any:
    import torch.distributed as dist
    from lightning.pytorch import Trainer

    import fusion_rt.integrations.lightning  # noqa: F401  # registers the strategies

    trainer = Trainer(
        accelerator="cpu", devices=2 // arguments.get("num_nodes", 1), strategy=strategy, logger=False,
        enable_progress_bar=False, enable_model_summary=False, enable_checkpointing=False,
        default_root_dir=directory or None, **arguments,
    )  # fmt: skip
    trainer.fusion_backend = lambda: dist.get_backend()
    return trainer


def fit(strategy: Any, options: dict[str, Any], resume: str = "", save: str = "", fail_at: int = -1) -> dict[str, Any]:
    """Trains, each rank from other parameters, and returns what came out."""
    from lightning.pytorch.utilities import rank_zero

    rank_zero.rank_zero_module.log.setLevel("ERROR")
    warnings.simplefilter("ignore")
    trainer = trainer_of(strategy() if callable(strategy) else strategy, **options)
    model = module_class()(trainer.global_rank + 1, fail_at)
    loaders = [torch.utils.data.DataLoader(data(), BATCH) for _ in range(2)]
    trainer.fit(model, *loaders, ckpt_path=resume or None)
    if save:
        trainer.save_checkpoint(save)
    return {
        "parameters": [p.detach().numpy().copy() for p in model.parameters()],
        "metrics": {name: float(value) for name, value in trainer.callback_metrics.items()},
        "optimizer": type(trainer.optimizers[0]).__mro__[1].__name__,
        "wrapped": model.trained_as,
        "backend": trainer.fusion_backend(),
        "rates": [group["lr"] for group in trainer.optimizers[0].param_groups],
    }


def fit_failing(strategy: str) -> str:
    """Returns the exception of this rank's training, of which rank 1's fails by itself."""
    try:
        fit(strategy, {"max_epochs": 3}, fail_at=2)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "none"


def compressed() -> Any:
    from fusion_rt.integrations.lightning import FusionStrategy

    return FusionStrategy(compression="topk(density=0.25)")


def with_algorithm(text: str) -> Any:
    from fusion_rt.integrations.lightning import FusionStrategy

    return FusionStrategy(algorithm=text)


def fp16_hook() -> Any:
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook

    from fusion_rt.integrations.lightning import FusionDDPStrategy

    return FusionDDPStrategy(ddp_comm_hook=fp16_compress_hook)


# --- the reference ----------------------------------------------------------------------------------------------------


def reference(epochs: int, accumulate: int = 1, clip: float = 0.0, precision: str = "32-true") -> list[np.ndarray]:
    """Parameters after plain training in this process on the batches of both ranks."""
    net = make_net(1)
    optimizer = torch.optim.SGD(net.parameters(), RATE, momentum=0.9)
    # Lightning shuffles what is trained on, whatever the script's loader does.
    samplers = [torch.utils.data.DistributedSampler(data(), 2, rank, seed=0) for rank in range(2)]
    loaders = [torch.utils.data.DataLoader(data(), BATCH, sampler=sampler) for sampler in samplers]
    for epoch in range(epochs):
        for sampler in samplers:
            sampler.set_epoch(epoch)
        for number, both in enumerate(zip(*loaders, strict=True), 1):
            for batch in both:
                with torch.autocast("cpu", torch.bfloat16, precision == "bf16-mixed"):
                    loss = F.cross_entropy(net(batch[0]), batch[1])
                (loss / (2 * accumulate)).backward()  # type: ignore[no-untyped-call]
            if number % accumulate == 0 or number == len(loaders[0]):
                if clip:
                    torch.nn.utils.clip_grad_norm_(net.parameters(), clip)
                optimizer.step()
                optimizer.zero_grad()
    return [p.detach().numpy() for p in net.parameters()]


def assert_close(found: list[dict[str, Any]], expected: list[np.ndarray], rtol: float = 1e-4) -> None:
    for one in found:
        for mine, theirs in zip(one["parameters"], expected, strict=True):
            np.testing.assert_allclose(mine, theirs, rtol=rtol, atol=1e-6)
    for mine, theirs in zip(found[0]["parameters"], found[1]["parameters"], strict=True):
        np.testing.assert_array_equal(mine, theirs)


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize(("strategy", "wrapped"), [("fusion", "Classifier"), ("fusion_ddp", "DistributedDataParallel")])
def test_training_is_that_of_one_process(
    job: Job, strategy: str, wrapped: str, accumulate: int, precision: str
) -> None:
    options = {"max_epochs": 2, "accumulate_grad_batches": accumulate, "gradient_clip_val": 0.1, "precision": precision}
    found = job.run(fit, strategy, options)
    rtol = 1e-4 if precision == "32-true" else 2e-2
    assert_close(found, reference(2, accumulate, 0.1, precision), rtol)
    for one in found:
        assert one["backend"] == "fusion"
        assert one["rates"] == [RATE]  # Horovod's strategy multiplied it by the number of ranks, and said nothing
        assert one["metrics"]["seen"] == SAMPLES
        assert one["metrics"] == found[0]["metrics"]
        assert one["wrapped"] == wrapped
        assert one["optimizer"] == ("Wrapped" if strategy == "fusion" else "Optimizer")


@pytest.mark.parametrize("text", ["bsp", "local_sgd(steps=1)", "diloco(steps=2)"])
def test_algorithms_are_those_of_the_optimizer(job: Job, text: str) -> None:
    """The first is plain averaging by another way; the others are not, and bring the ranks together."""
    found = job.run(fit, functools.partial(with_algorithm, text), {"max_epochs": 2, "accumulate_grad_batches": 2})
    assert_close(found, reference(2, 2) if text == "bsp" else found[0]["parameters"])


@pytest.mark.parametrize("strategy", ["fusion", "fusion_ddp"])
def test_a_run_that_is_resumed_ends_as_one_that_was_not(job: Job, strategy: str, tmp_path: Path) -> None:
    whole = job.run(fit, strategy, {"max_epochs": 3})
    saved = str(tmp_path / "saved.ckpt")
    job.run(fit, strategy, {"max_epochs": 2}, "", saved)
    again = job.run(fit, strategy, {"max_epochs": 3}, saved)
    assert_close(again, whole[0]["parameters"], rtol=0)


def test_a_comm_hook_is_used_on_a_cpu(job: Job) -> None:
    plain, hooked = job.run(fit, "fusion_ddp", {"max_epochs": 1}), job.run(fit, fp16_hook, {"max_epochs": 1})
    assert_close(hooked, plain[0]["parameters"], rtol=1e-1)
    pairs = zip(plain[0]["parameters"], hooked[0]["parameters"], strict=True)
    assert any((mine != theirs).any() for mine, theirs in pairs)


def test_what_a_codec_holds_back_on_every_node_is_in_a_checkpoint(tmp_path: Path) -> None:
    with Job((1, 1), ENVIRONMENT, init=False, modules=MODULES) as job:
        options: dict[str, Any] = {"num_nodes": 2, "max_epochs": 3}
        whole = job.run(fit, compressed, options)
        saved = str(tmp_path / "saved.ckpt")
        job.run(fit, compressed, {**options, "max_epochs": 2}, "", saved)
        again = job.run(fit, compressed, options, saved)
    assert_close(again, whole[0]["parameters"], rtol=0)
    pairs = zip(whole[0]["parameters"], reference(3), strict=True)
    assert any(not np.allclose(mine, theirs, rtol=1e-3) for mine, theirs in pairs)  # it has held something back


@pytest.mark.parametrize("strategy", ["fusion", "fusion_ddp"])
def test_an_exception_on_one_rank_ends_the_others(strategy: str) -> None:
    with Job((2,), ENVIRONMENT, init=False, modules=MODULES) as job:
        first, second = job.run(fit_failing, strategy)
    assert second == "ArithmeticError: rank 1 was told to fail"
    assert "rank 1" in first
    assert "rank 1 was told to fail" in first


def test_a_trainer_for_another_number_of_workers_is_refused(job: Job) -> None:
    sentence = "the launcher has started 2 workers, and Trainer(devices=2, num_nodes=2) is for 4"
    with pytest.raises(WorkerError, match=re.escape(sentence)):
        job.run(check_too_many)


def check_too_many() -> None:
    from fusion_rt.integrations.lightning import FusionEnvironment

    FusionEnvironment().validate_settings(2, 2)
