"""Training scripts, one for each thing that people do between `zero_grad` and the end of an epoch.

A script is written once and runs in two worlds: on real ranks, where `Run` is `fusion_rt.torch`, and in the reference
(`reference.py`), where the ranks are threads of one process with plain torch. So a script may use `Run` and torch, and
nothing else.
"""

from __future__ import annotations

import copy
import io
import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

STEPS = 12
BATCH = 8
RATE = 0.05
MEETING = 3  # steps between two evaluations


class Run(ABC):
    """One rank of a job, as a script sees it.

    Attributes:
        rank, size: which rank this is, and how many there are.
    """

    rank: int
    size: int

    @abstractmethod
    def wrap(self, optimizer: torch.optim.Optimizer, model: torch.nn.Module, passes: int = 1) -> Any:
        """Returns the distributed optimizer; `passes` backward passes make up a step."""

    @abstractmethod
    def backward(self, loss: torch.Tensor, optimizer: Any) -> None:
        """Runs `loss.backward()`."""

    @abstractmethod
    def barrier(self) -> None:
        """Waits for all ranks."""

    @abstractmethod
    def mean(self, value: float) -> float:
        """Returns the mean of all ranks' values."""

    @abstractmethod
    def join(self) -> None:
        """Says that this rank has no more data, and waits until all ranks have none."""

    @abstractmethod
    def reseed(self, optimizer: Any) -> None:
        """All ranks have set the same weights."""


class Net(torch.nn.Module):
    """A small network: a body, a head, and a second head that only some scripts use."""

    def __init__(self, second: bool = False) -> None:
        super().__init__()
        self.body = torch.nn.Linear(6, 5)
        self.head = torch.nn.Linear(5, 1)
        if second:
            self.second = torch.nn.Linear(5, 1)
        generator = torch.Generator().manual_seed(0)  # not the one of torch, which threads share
        for parameter in self.parameters():
            torch.nn.init.uniform_(parameter, -0.4, 0.4, generator=generator)

    def forward(self, inputs: torch.Tensor, second: bool = False) -> torch.Tensor:
        hidden = torch.tanh(self.body(inputs))
        result: torch.Tensor = self.head(hidden)
        return result + self.second(hidden) if second else result


def batch_of(rank: int, step: int, count: int = BATCH) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns inputs [count, 6] and targets [count, 1] of a rank in a step: points of a smooth function."""
    inputs = torch.randn(count, 6, generator=torch.Generator().manual_seed(1000 * step + rank))
    return inputs, torch.tanh(inputs @ torch.linspace(-1, 1, 6).unsqueeze(1)) + 1


def loss_of(run: Run, model: torch.nn.Module, step: int, **how: Any) -> torch.Tensor:
    """Returns the loss of this rank's batch."""
    inputs, targets = batch_of(run.rank, step)
    return torch.nn.functional.mse_loss(model(inputs, **how), targets)


@torch.no_grad()
def quality(model: torch.nn.Module) -> float:
    """Returns the loss on points that no rank has trained with."""
    inputs, targets = batch_of(99, 0, 256)
    model.eval()
    found = float(torch.nn.functional.mse_loss(model(inputs), targets))
    model.train()
    return found


@dataclass
class Training:
    """A model and its optimizer.

    Attributes:
        complaints: errors that the script has found.
    """

    model: Any
    optimizer: Any
    complaints: list[str]

    def step(self, run: Run, number: int) -> None:
        """Takes the simplest step: zero_grad, backward, step."""
        self.optimizer.zero_grad()
        run.backward(loss_of(run, self.model, number), self.optimizer)
        self.optimizer.step()

    def expect(self, right: bool, otherwise: str) -> None:
        if not right:
            self.complaints.append(otherwise)


def begin(run: Run, passes: int = 1, second: bool = False) -> Training:
    """Makes a model, and SGD on all its parameters."""
    model = Net(second)
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    return Training(model, run.wrap(optimizer, model, passes), [])


Body = Callable[[Run], Training]


@dataclass(frozen=True)
class Script:
    """A script.

    Attributes:
        name: of its row in docs/algorithms.md.
        words: a refusal contains one of these.
        body: the function of each rank.
    """

    name: str
    words: tuple[str, ...]
    body: Body


SCRIPTS: dict[str, Script] = {}


def script(name: str, *words: str) -> Callable[[Body], Body]:
    def register(body: Body) -> Body:
        SCRIPTS[name] = Script(name, words, body)
        return body

    return register


@script("plain")
def plain(run: Run) -> Training:
    training = begin(run)
    for number in range(STEPS):
        training.step(run, number)
    return training


@script("GradScaler, overflow on one rank", "GradScaler", "scaler", "overflow")
def grad_scaler(run: Run) -> Training:
    training = begin(run)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=1000)
    for number in range(STEPS):
        training.optimizer.zero_grad()
        loss = scaler.scale(loss_of(run, training.model, number))
        overflows = number == 4 and run.rank == 1
        run.backward(loss * math.inf if overflows else loss, training.optimizer)
        scaler.step(training.optimizer)
        scaler.update()
    training.expect(scaler.get_scale() >= 512, f"the scale fell to {scaler.get_scale()}")
    return training


def _outlier(run: Run, model: torch.nn.Module, number: int) -> torch.Tensor:
    """Returns a loss whose gradient, without clipping, would move the weights far away."""
    return loss_of(run, model, number) * (1e4 if number % 3 == 1 else 1.0)


@script("clip_grad_norm_ after backward", "clip")
def clip(run: Run) -> Training:
    training = begin(run)
    for number in range(STEPS):
        training.optimizer.zero_grad()
        run.backward(_outlier(run, training.model, number), training.optimizer)
        torch.nn.utils.clip_grad_norm_(training.model.parameters(), 1.0)
        training.optimizer.step()
    return training


@script("clip_grad_norm_ after synchronize", "clip", "synchronize")
def clip_synchronized(run: Run) -> Training:
    training = begin(run)
    for number in range(STEPS):
        training.optimizer.zero_grad()
        run.backward(_outlier(run, training.model, number), training.optimizer)
        training.optimizer.synchronize()
        torch.nn.utils.clip_grad_norm_(training.model.parameters(), 1.0)
        with training.optimizer.skip_synchronize():
            training.optimizer.step()
    return training


@script("backward_passes_per_step", "backward_passes_per_step")
def accumulation(run: Run) -> Training:
    training = begin(run, passes=2)
    for number in range(STEPS):
        training.optimizer.zero_grad()
        for part in range(2):
            run.backward(loss_of(run, training.model, 2 * number + part) / 2, training.optimizer)
        training.optimizer.step()
    return training


@script("two losses, a backward pass each", "backward")
def two_losses(run: Run) -> Training:
    training = begin(run)
    for number in range(STEPS):
        training.optimizer.zero_grad()
        run.backward(loss_of(run, training.model, number) / 2, training.optimizer)
        run.backward(training.model.head.weight.square().sum() * 0.01, training.optimizer)
        run.backward(loss_of(run, training.model, STEPS + number) / 2, training.optimizer)
        training.optimizer.step()
    return training


@script("gradients that the script sets", "gradient")
def gradients_set(run: Run) -> Training:
    training = begin(run)
    parameters = list(training.model.parameters())
    for number in range(STEPS):
        found = torch.autograd.grad(loss_of(run, training.model, number), parameters)
        for parameter, gradient in zip(parameters, found, strict=True):
            parameter.grad = gradient
        training.optimizer.step()
    return training


@script("step(closure)", "closure")
def closure(run: Run) -> Training:
    training = begin(run)
    for number in range(STEPS):

        def evaluate(number: int = number) -> torch.Tensor:
            training.optimizer.zero_grad()
            loss = loss_of(run, training.model, number)
            run.backward(loss, training.optimizer)
            return loss

        training.optimizer.step(evaluate)
    return training


@script("param_groups read by one rank", "param_groups")
def groups_read(run: Run) -> Training:
    training = begin(run)
    for number in range(STEPS):
        training.optimizer.zero_grad()
        run.backward(loss_of(run, training.model, number), training.optimizer)
        if run.rank == 0:
            training.expect(training.optimizer.param_groups[0]["lr"] == RATE, "the learning rate is another")
        training.optimizer.step()
    return training


@script("param_groups written by one rank", "param_groups")
def groups_written(run: Run) -> Training:
    training = begin(run)
    for number in range(STEPS):
        training.optimizer.zero_grad()
        run.backward(loss_of(run, training.model, number), training.optimizer)
        if run.rank == 1:
            for group in training.optimizer.param_groups:
                group["lr"] = RATE
                group["seen"] = number
        training.optimizer.step()
    return training


@script("learning rate changed within a step", "lr", "learning rate")
def rate_changed(run: Run) -> Training:
    training = begin(run)
    for number in range(STEPS):
        training.optimizer.zero_grad()
        run.backward(loss_of(run, training.model, number), training.optimizer)
        for group in training.optimizer.param_groups:
            group["lr"] = RATE if number % 4 < 2 else RATE / 2
        training.optimizer.step()
    return training


def _distance(model: torch.nn.Module, other: dict[str, torch.Tensor]) -> float:
    return max(float((value - other[name]).abs().max()) for name, value in model.state_dict().items())


def _load(run: Run, says_so: bool) -> Training:
    training = begin(run)
    for number in range(STEPS):
        loads = number == STEPS // 2
        if loads:
            run.barrier()
            trained = Net()
            with torch.no_grad():
                for parameter in trained.parameters():
                    parameter.mul_(0.5)
            before = copy.deepcopy(training.model.state_dict())
            training.model.load_state_dict(trained.state_dict())
            if says_so:
                run.reseed(training.optimizer)
            run.barrier()
        training.step(run, number)
        if loads:
            # Others may have taken one step besides. What was undone is as it was before.
            nearer = _distance(training.model, trained.state_dict()) < _distance(training.model, before)
            training.expect(nearer, "after a step, weights are nearer to what they were than to what was loaded")
            run.barrier()
    return training


@script("weights loaded between steps", "weights", "parameter")
def weights_loaded(run: Run) -> Training:
    return _load(run, says_so=False)


@script("weights loaded, then reseed()", "weights", "parameter", "reseed")
def weights_reseeded(run: Run) -> Training:
    return _load(run, says_so=True)


@script("weights clamped between steps", "weights", "parameter")
def weights_clamped(run: Run) -> Training:
    training = begin(run)
    for number in range(STEPS):
        training.step(run, number)
        for parameter in training.model.parameters():
            parameter.data.clamp_(-0.35, 0.35)
    return training


@script("weights masked between steps", "weights", "parameter")
def weights_masked(run: Run) -> Training:
    training = begin(run)
    mask = torch.ones(5, 6)
    mask[::2, ::2] = 0
    for number in range(STEPS):
        training.step(run, number)
        with torch.no_grad():
            training.model.body.weight.mul_(mask)
    return training


@script("a layer unfrozen, a group added", "group", "parameter", "unfrozen")
def unfrozen(run: Run) -> Training:
    model = Net()
    model.body.requires_grad_(False)
    optimizer = torch.optim.SGD(model.head.parameters(), lr=RATE)
    training = Training(model, run.wrap(optimizer, model), [])
    before = model.body.weight.detach().clone()
    for number in range(STEPS):
        if number == STEPS // 2:
            model.body.requires_grad_(True)
            training.optimizer.add_param_group({"params": list(model.body.parameters()), "lr": RATE / 2})
        training.step(run, number)
    training.expect(not torch.equal(before, model.body.weight), "what was unfrozen has not been trained")
    return training


@script("a parameter that only some ranks use", "unused", "parameter", "gradient")
def partly_used(run: Run) -> Training:
    training = begin(run, second=True)
    for number in range(STEPS):
        training.optimizer.zero_grad()
        run.backward(loss_of(run, training.model, number, second=run.rank == 1), training.optimizer)
        training.optimizer.step()
    return training


@script("join with uneven data", "join")
def uneven(run: Run) -> Training:
    training = begin(run)
    for number in range(STEPS if run.rank == 0 else STEPS - 5):
        training.step(run, number)
    run.join()
    return training


class _Failing(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, value: torch.Tensor) -> torch.Tensor:
        return value.clone()

    @staticmethod
    def backward(context: Any, *gradients: torch.Tensor) -> Any:
        raise RuntimeError("out of memory")


@script("an exception in backward that the script catches", "backward")
def caught(run: Run) -> Training:
    training = begin(run)
    for number in range(STEPS):
        training.optimizer.zero_grad()
        loss = loss_of(run, training.model, number)
        if number == 4 and run.rank == 1:
            hidden = torch.tanh(_Failing.apply(training.model.body(batch_of(run.rank, number)[0])))
            loss = training.model.head(hidden).square().mean()
        try:
            run.backward(loss, training.optimizer)
        except RuntimeError:
            training.optimizer.zero_grad()
            continue
        training.optimizer.step()
    run.join()
    return training


@script("barrier and evaluation every few steps", "barrier", "evaluat")
def evaluated(run: Run) -> Training:
    training = begin(run)
    for number in range(STEPS):
        training.step(run, number)
        if number % MEETING == MEETING - 1:
            run.barrier()
            value = run.mean(quality(training.model))
            training.expect(math.isfinite(value), f"the loss is {value}")
    return training


@script("moving average of weights, swapped in to evaluate", "weights", "parameter")
def averaged(run: Run) -> Training:
    training = begin(run)
    average = copy.deepcopy(training.model)
    for number in range(STEPS):
        training.step(run, number)
        with torch.no_grad():
            for mean, parameter in zip(average.parameters(), training.model.parameters(), strict=True):
                mean.lerp_(parameter, 0.3)
        if number % MEETING == MEETING - 1:
            own = copy.deepcopy(training.model.state_dict())
            training.model.load_state_dict(average.state_dict())
            training.expect(math.isfinite(quality(training.model)), "the average has no loss")
            training.model.load_state_dict(own)
    return training


@script("deepcopy of the model", "deepcopy", "copy")
def copied(run: Run) -> Training:
    training = begin(run)
    for number in range(STEPS):
        training.step(run, number)
        if number % MEETING == MEETING - 1:
            twin = copy.deepcopy(training.model)
            before = copy.deepcopy(training.model.state_dict())
            training.expect(_distance(twin, before) == 0, "the copy is another model")
            optimizer = torch.optim.SGD(twin.parameters(), lr=1.0)
            optimizer.zero_grad()
            loss_of(run, twin, number).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            training.expect(_distance(twin, before) > 0, "the copy does not learn")
            training.expect(_distance(training.model, before) == 0, "the copy's steps move the model")
    return training


@script("checkpoint and resume", "checkpoint", "state_dict")
def resumed(run: Run) -> Training:
    training = begin(run)
    for number in range(STEPS):
        if number == STEPS // 2:
            run.barrier()
            file = io.BytesIO()
            state = {"model": training.model.state_dict(), "optimizer": training.optimizer.state_dict()}
            torch.save(state, file)
            run.barrier()
            file.seek(0)
            found = torch.load(file, weights_only=True)
            training = begin(run)
            training.model.load_state_dict(found["model"])
            training.optimizer.load_state_dict(found["optimizer"])
            run.barrier()
        training.step(run, number)
    return training
