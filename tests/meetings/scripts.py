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
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch

STEPS = 12
BATCH = 8
MEETING = 3  # steps between two evaluations
INPUTS, BODY, MIDDLE = 12, 24, 16  # of the network: codecs encode nine tenths of its elements

_Parameters = Iterable[torch.Tensor] | list[dict[str, Any]]
OPTIMIZERS: dict[str, tuple[float, Callable[[_Parameters, float], torch.optim.Optimizer]]] = {
    "SGD": (0.05, lambda parameters, rate: torch.optim.SGD(parameters, lr=rate)),
    "SGD with momentum": (0.01, lambda parameters, rate: torch.optim.SGD(parameters, lr=rate, momentum=0.9)),
    "Adam": (0.01, lambda parameters, rate: torch.optim.Adam(parameters, lr=rate)),
    "AdamW with decay": (0.01, lambda parameters, rate: torch.optim.AdamW(parameters, lr=rate, weight_decay=0.1)),
}
"""Each with its rate."""
if hasattr(torch.optim, "Adafactor"):  # since torch 2.5
    OPTIMIZERS["Adafactor"] = (0.05, lambda parameters, rate: torch.optim.Adafactor(parameters, lr=rate))
RATES = {"constant": (1.0,) * STEPS, "falls a hundredfold": (1.0,) * 6 + (0.1,) * 3 + (0.01,) * 3}
"""The factor of the rate in each step."""


class Run(ABC):
    """One rank of a job, as a script sees it.

    Attributes:
        rank, size: which rank this is, and how many there are.
        optimizer: the name of the script's optimizer.
        rates: the name of its schedule.
        even: all ranks have to take the same number of steps, or to join.
    """

    rank: int
    size: int
    optimizer: str
    rates: str
    even: bool

    def rate(self, number: int = 0) -> float:
        """Returns the learning rate of a step."""
        return OPTIMIZERS[self.optimizer][0] * RATES[self.rates][number % STEPS]

    def make(self, parameters: _Parameters, rate: float | None = None) -> torch.optim.Optimizer:
        """Returns the script's optimizer, with its own rate or this one."""
        usual, kind = OPTIMIZERS[self.optimizer]
        return kind(parameters, usual if rate is None else rate)

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

    @abstractmethod
    def synchronize(self, optimizer: Any) -> None:
        """Waits for updates that overlap."""

    @abstractmethod
    def consensus(self, optimizer: Any) -> None:
        """Makes all ranks' weights equal."""


class Net(torch.nn.Module):
    """A small network: a body whose weights lie in memory column by column, as they may, a middle, a head, and a second
    head that only some scripts use."""

    def __init__(self, second: bool = False) -> None:
        super().__init__()
        self.body = torch.nn.Linear(INPUTS, BODY)
        self.body.weight = torch.nn.Parameter(torch.empty(INPUTS, BODY).t())
        self.middle = torch.nn.Linear(BODY, MIDDLE)
        self.head = torch.nn.Linear(MIDDLE, 1)
        if second:
            self.second = torch.nn.Linear(MIDDLE, 1)
        generator = torch.Generator().manual_seed(0)  # not the one of torch, which threads share
        for parameter in self.parameters():
            values = torch.rand(parameter.shape, generator=generator)
            parameter.detach().copy_(0.6 * values - 0.3)

    def forward(self, inputs: torch.Tensor, second: bool = False) -> torch.Tensor:
        hidden = torch.tanh(self.middle(torch.tanh(self.body(inputs))))
        result: torch.Tensor = self.head(hidden)
        return result + self.second(hidden) if second else result


def batch_of(rank: int, step: int, count: int = BATCH) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns inputs [count, 12] and targets [count, 1] of a rank in a step: points of a smooth function."""
    inputs = torch.randn(count, INPUTS, generator=torch.Generator().manual_seed(1000 * step + rank))
    return inputs, torch.tanh(inputs @ torch.linspace(-0.7, 0.7, INPUTS).unsqueeze(1)) + 1


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
        notes: numbers for the judge of a property, flat, by name.
    """

    model: Any
    optimizer: Any
    complaints: list[str] = field(default_factory=list)
    notes: dict[str, torch.Tensor] = field(default_factory=dict)

    def begin(self, run: Run, number: int) -> None:
        """Begins a step: the schedule sets its rate, as those of torch do, and gradients are zero."""
        if run.rates != "constant":
            for group in self.optimizer.param_groups:
                group["lr"] = group.setdefault("initial_lr", group["lr"]) * RATES[run.rates][number]
        self.optimizer.zero_grad()

    def step(self, run: Run, number: int) -> None:
        """Takes the simplest step: zero_grad, backward, step."""
        self.begin(run, number)
        run.backward(loss_of(run, self.model, number), self.optimizer)
        self.optimizer.step()

    def expect(self, right: bool, otherwise: str) -> None:
        if not right:
            self.complaints.append(otherwise)


def begin(run: Run, passes: int = 1, second: bool = False) -> Training:
    """Makes a model, and an optimizer of all its parameters."""
    model = Net(second)
    return Training(model, run.wrap(run.make(model.parameters()), model, passes))


Body = Callable[[Run], Training]


@dataclass(frozen=True)
class Script:
    """A script.

    Attributes:
        name: of its row in docs/algorithms.md.
        words: a refusal contains one of these.
        body: the function of each rank.
        property: it is there for what it leaves, and not for something that people do.
    """

    name: str
    words: tuple[str, ...]
    body: Body
    property: bool = False


SCRIPTS: dict[str, Script] = {}


def script(name: str, *words: str, property: bool = False) -> Callable[[Body], Body]:
    def register(body: Body) -> Body:
        SCRIPTS[name] = Script(name, words, body, property)
        return body

    return register


@script("plain")
def plain(run: Run) -> Training:
    training = begin(run)
    for number in range(STEPS):
        training.step(run, number)
    return training


def _scaled(run: Run, scaler: torch.amp.GradScaler, overflows: range) -> Training:
    """Trains with a loss scale; the gradients of rank 1 overflow in some steps."""
    training = begin(run)
    for number in range(STEPS):
        training.begin(run, number)
        loss = scaler.scale(loss_of(run, training.model, number))
        run.backward(loss * math.inf if number in overflows and run.rank == 1 else loss, training.optimizer)
        scaler.step(training.optimizer)
        scaler.update()
    return training


@script("GradScaler, scale halves six times", "GradScaler", "scaler", "overflow")
def scale_halves(run: Run) -> Training:
    scaler = torch.amp.GradScaler("cpu", init_scale=65536.0, growth_interval=1000)
    training = _scaled(run, scaler, range(3, 9))
    if run.rank == 1:  # halves of gradients overflow besides, as long as the scale is high
        training.expect(128 <= scaler.get_scale() <= 1024, f"the scale fell to {scaler.get_scale()}")
    return training


@script("GradScaler, scale doubles ten times", "GradScaler", "scaler")
def scale_doubles(run: Run) -> Training:
    scaler = torch.amp.GradScaler("cpu", init_scale=1.0, growth_interval=1)
    training = _scaled(run, scaler, range(0))
    training.expect(scaler.get_scale() >= 1024, f"the scale has risen to {scaler.get_scale()} only")
    return training


def _outlier(run: Run, model: torch.nn.Module, number: int) -> torch.Tensor:
    """Returns a loss whose gradient, without clipping, would move the weights far away."""
    return loss_of(run, model, number) * (1e4 if number % 3 == 1 else 1.0)


@script("clip_grad_norm_ after backward", "clip")
def clip(run: Run) -> Training:
    training = begin(run)
    for number in range(STEPS):
        training.begin(run, number)
        run.backward(_outlier(run, training.model, number), training.optimizer)
        torch.nn.utils.clip_grad_norm_(training.model.parameters(), 1.0)
        training.optimizer.step()
    return training


@script("clip_grad_norm_ after synchronize", "clip", "synchronize")
def clip_synchronized(run: Run) -> Training:
    training = begin(run)
    for number in range(STEPS):
        training.begin(run, number)
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
        training.begin(run, number)
        for part in range(2):
            run.backward(loss_of(run, training.model, 2 * number + part) / 2, training.optimizer)
        training.optimizer.step()
    return training


@script("gradients thrown away between backward passes", "backward_passes_per_step", "backward")
def thrown_away(run: Run) -> Training:
    training = begin(run, passes=2)
    for number in range(STEPS):
        training.begin(run, number)
        run.backward(loss_of(run, training.model, number) * 100, training.optimizer)
        training.model.zero_grad()
        run.backward(loss_of(run, training.model, number), training.optimizer)
        training.optimizer.step()
    return training


@script("a hook that clamps gradients, made last", "hook", "backward")
def hooked(run: Run) -> Training:
    training = begin(run)

    def clamp(parameter: torch.Tensor) -> None:
        assert parameter.grad is not None
        parameter.grad.clamp_(-0.02, 0.02)

    for parameter in training.model.parameters():
        parameter.register_post_accumulate_grad_hook(clamp)
    for number in range(STEPS):
        training.step(run, number)
    return training


@script("two losses, a backward pass each", "backward")
def two_losses(run: Run) -> Training:
    training = begin(run)
    for number in range(STEPS):
        training.begin(run, number)
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
            training.begin(run, number)
            loss = loss_of(run, training.model, number)
            run.backward(loss, training.optimizer)
            return loss

        training.optimizer.step(evaluate)
    return training


@script("param_groups read and written by one rank", "param_groups")
def groups_used(run: Run) -> Training:
    training = begin(run)
    for number in range(STEPS):
        training.begin(run, number)
        run.backward(loss_of(run, training.model, number), training.optimizer)
        if run.rank == 0:
            training.expect(
                training.optimizer.param_groups[0]["lr"] == run.rate(number), "the learning rate is another"
            )
        else:
            for group in training.optimizer.param_groups:
                group["lr"] = run.rate(number)
                group["seen"] = number
        training.optimizer.step()
    return training


@script("learning rate changed within a step", "lr", "learning rate")
def rate_changed(run: Run) -> Training:
    training = begin(run)
    for number in range(STEPS):
        training.begin(run, number)
        run.backward(loss_of(run, training.model, number), training.optimizer)
        for group in training.optimizer.param_groups:
            group["lr"] = run.rate(number) / (1 if number % 4 < 2 else 2)
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
            parameter.data.clamp_(-0.15, 0.15)
    return training


@script("weights masked between steps", "weights", "parameter")
def weights_masked(run: Run) -> Training:
    training = begin(run)
    mask = torch.ones(BODY, INPUTS)
    mask[::2, ::2] = 0
    for number in range(STEPS):
        training.step(run, number)
        with torch.no_grad():
            training.model.body.weight.mul_(mask)
    return training


@script("consensus, weights pruned, then reseed()", "weights", "parameter", "reseed")
def pruned(run: Run) -> Training:
    training = begin(run)
    mask = torch.ones(MIDDLE, BODY)
    mask[1::2, ::2] = 0
    for number in range(STEPS):
        if number == STEPS // 2:
            run.consensus(training.optimizer)
            with torch.no_grad():
                training.model.middle.weight.mul_(mask)
            run.reseed(training.optimizer)
            run.barrier()
            before = copy.deepcopy(training.model.state_dict())
        training.step(run, number)
        if number == STEPS // 2:
            moved = _distance(training.model, before)
            training.expect(moved < 0.2, f"what was pruned has come back: after a step, a weight is {moved:.3f} off")
    return training


@script("a layer unfrozen, a group added", "group", "parameter", "unfrozen")
def unfrozen(run: Run) -> Training:
    model = Net()
    model.body.requires_grad_(False)
    rest = [*model.middle.parameters(), *model.head.parameters()]
    training = Training(model, run.wrap(run.make(rest), model))
    before = model.body.weight.detach().clone()
    for number in range(STEPS):
        if number == STEPS // 2:
            model.body.requires_grad_(True)
            training.optimizer.add_param_group({"params": list(model.body.parameters()), "lr": run.rate() / 2})
        training.step(run, number)
    training.expect(not torch.equal(before, model.body.weight), "what was unfrozen has not been trained")
    return training


@script("a parameter that only some ranks use", "unused", "parameter", "gradient")
def partly_used(run: Run) -> Training:
    training = begin(run, second=True)
    for number in range(STEPS):
        training.begin(run, number)
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
        training.begin(run, number)
        loss = loss_of(run, training.model, number)
        if number == 4 and run.rank == 1:
            hidden = _Failing.apply(training.model.body(batch_of(run.rank, number)[0]))
            loss = training.model.head(torch.tanh(training.model.middle(hidden))).square().mean()
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


# --- properties -------------------------------------------------------------------------------------------------------
# What an algorithm promises besides a trained model: each of these leaves numbers, of which `properties.py` judges.


def _apart(run: Run) -> Net:
    """Returns a model whose weights differ between the ranks."""
    model = Net()
    generator = torch.Generator().manual_seed(run.rank)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator) / 4)
    return model


def flat(model: torch.nn.Module) -> torch.Tensor:
    """Returns all parameters as one flat tensor."""
    return torch.cat([parameter.detach().reshape(-1) for parameter in model.parameters()])


@script("ranks that begin apart and wait, at rate 0", property=True)
def at_rest(run: Run) -> Training:
    """Leaves the weights `begun` with, and those that ranks have `settled` on when all answers are there."""
    model = _apart(run)
    training = Training(model, run.wrap(run.make(model.parameters(), 0.0), model))
    training.notes["begun"] = flat(model)
    for number in range(STEPS):
        waits = run.rank == 1 and number % MEETING == 1 and not run.even  # in the next barrier, while others step
        if not waits:
            training.optimizer.zero_grad()
            run.backward(loss_of(run, model, number), training.optimizer)
            training.optimizer.step()
        if number % MEETING == MEETING - 1:
            run.barrier()
    training.optimizer.state_dict()  # waits for what is pending
    training.notes["settled"] = flat(model)
    return training


TARGETS, FACTOR, LONG = 0.1, 0.2, 40  # how far ranks' optima lie apart, the rate, and the steps until the optimum


def optimum(rank: int) -> torch.Tensor:
    """Returns the weights, flat, at which a rank's quadratic loss is least."""
    model = Net()
    generator = torch.Generator().manual_seed(1000 + rank)
    return flat(model) + 0.5 + TARGETS * (2 * torch.rand(flat(model).shape, generator=generator) - 1)


@script("a quadratic loss, to its optimum", property=True)
def quadratic(run: Run) -> Training:
    model = Net()
    training = Training(model, run.wrap(run.make(model.parameters(), FACTOR), model))
    mine = optimum(run.rank)
    for number in range(LONG):
        training.optimizer.zero_grad()
        weights = torch.cat([parameter.reshape(-1) for parameter in model.parameters()])
        run.backward((weights - mine).square().sum() / 2, training.optimizer)
        training.optimizer.step()
        if number % MEETING == MEETING - 1 and not run.even:
            run.barrier()
    training.notes["end"] = flat(model)
    return training


SMALL, MANY = 1e-3, 64


@script("many small steps", property=True)
def small_steps(run: Run) -> Training:
    """Each moves each weight of about 1 by a thousandth, which halves do not resolve."""
    model = Net()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.85)
    training = Training(model, run.wrap(run.make(model.parameters(), SMALL), model))
    training.notes["begun"] = flat(model)
    for _ in range(MANY):
        training.optimizer.zero_grad()
        run.backward(sum(p.sum() for p in model.parameters()), training.optimizer)  # type: ignore[arg-type]
        training.optimizer.step()
    return training


def _ledger(run: Run, scaler: torch.amp.GradScaler) -> Training:
    """Trains, and leaves what was `given` (the sum of rates times this rank's gradients), where weights `begun`, and
    the last rate."""
    training = begin(run)
    parameters = list(training.model.parameters())
    training.notes["begun"] = flat(training.model).double()
    given = torch.zeros_like(training.notes["begun"])
    for number in range(STEPS):
        training.begin(run, number)
        loss = loss_of(run, training.model, number)
        gradients = torch.autograd.grad(loss, parameters, retain_graph=True)
        given += run.rate(number) * torch.cat([gradient.reshape(-1) for gradient in gradients]).double()
        run.backward(scaler.scale(loss), training.optimizer)
        scaler.step(training.optimizer)
        scaler.update()
    run.synchronize(training.optimizer)
    training.notes["given"], training.notes["end"] = given, flat(training.model).double()
    training.notes["last"] = torch.tensor(run.rate(STEPS - 1))
    return training


@script("a ledger of gradients", property=True)
def ledger(run: Run) -> Training:
    return _ledger(run, torch.amp.GradScaler("cpu", enabled=False))


@script("a ledger of gradients, scale doubles", property=True)
def ledger_scaled(run: Run) -> Training:
    return _ledger(run, torch.amp.GradScaler("cpu", init_scale=1.0, growth_interval=1))


@script("uneven data, then weights set and reseed()", "join", "reseed", property=True)
def uneven_then_set(run: Run) -> Training:
    training = begin(run)
    for number in range(STEPS if run.rank == 0 else STEPS - 5):
        training.step(run, number)
    run.join()
    for group in training.optimizer.param_groups:
        group["lr"] = 0.0
    with torch.no_grad():
        for parameter in training.model.parameters():
            parameter.fill_(0.5)
    run.reseed(training.optimizer)
    run.barrier()
    for number in range(MEETING):
        training.optimizer.zero_grad()
        run.backward(loss_of(run, training.model, number), training.optimizer)
        training.optimizer.step()
    training.notes["end"] = flat(training.model)
    return training
