"""The scripts in one process: ranks are threads, and the published rules of the synchronous algorithms are plain torch.

It shares no code with the product, but for the clocks and pairs of graphs that change: the expected result of a job is
computed here.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from fusion_rt.core import mixing
from fusion_rt.wire.basics import first_clock_after_join
from tests.meetings.scripts import Run, Script, Training, flat

WAIT_S = 60.0  # until ranks that wait for each other are taken to be stuck


class GivenUp(RuntimeError):
    """Another rank has abandoned the step."""


class World:
    """A barrier of ranks, at which they exchange values."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._changed = threading.Condition()
        self._here: dict[int, Any] = {}  # values of ranks at the meeting under way
        self._result: Any = None
        self._meetings = 0
        self._joined: set[int] = set()

    def meet(self, rank: int, value: Any, combine: Callable[[dict[int, Any]], Any]) -> Any:
        """Returns `combine` of the values of all ranks that have not joined; the same for all of them."""
        with self._changed:
            number = self._meetings
            self._here[rank] = value
            self._combine = combine
            self._conclude()
            if not self._changed.wait_for(lambda: self._meetings > number, WAIT_S):
                raise AssertionError(f"the reference is stuck: rank {rank} waits for others than {sorted(self._here)}")
            if isinstance(self._result, GivenUp):
                raise GivenUp(str(self._result))
            return self._result

    def join(self, rank: int) -> None:
        with self._changed:
            self._joined.add(rank)
            self._conclude()
            self._changed.notify_all()
            if not self._changed.wait_for(lambda: len(self._joined) == self.size, WAIT_S):
                raise AssertionError(f"the reference is stuck: rank {rank} has joined, and others never do")

    def _conclude(self) -> None:
        if self._here and self._here.keys() | self._joined == set(range(self.size)):
            given_up = [value for value in self._here.values() if isinstance(value, GivenUp)]
            self._result = given_up[0] if given_up else self._combine(dict(sorted(self._here.items())))
            self._here = {}
            self._meetings += 1
            self._changed.notify_all()


def _means(size: int) -> Callable[[dict[int, Any]], Any]:
    """Combines lists of tensors: sums divided by the number of all ranks, as those of gradients are."""

    def combine(values: dict[int, list[torch.Tensor]]) -> list[torch.Tensor]:
        return [torch.stack(each).sum(0) / size for each in zip(*values.values(), strict=True)]

    return combine


def _means_of_present(values: dict[int, list[torch.Tensor]]) -> list[torch.Tensor]:
    return [torch.stack(each).mean(0) for each in zip(*values.values(), strict=True)]


class Reference(torch.optim.Optimizer):
    """The script's optimizer, with the rule of a synchronous algorithm around it. It looks like the script's."""

    def __init__(self, run: Threaded, optimizer: torch.optim.Optimizer, passes: int) -> None:
        self._run, self._inner, self.passes, self._passed = run, optimizer, passes, 0
        self.__dict__.update({"param_groups": optimizer.param_groups, "state": optimizer.state})
        self.defaults = optimizer.defaults
        self._taken = 0
        self._is_reduced = False  # what `p.grad` has, since the last step
        self.remember()

    def _parameters(self) -> list[torch.Tensor]:
        return [p for group in self._inner.param_groups for p in group["params"] if p.requires_grad]

    def add_param_group(self, group: dict[str, Any]) -> None:
        self._inner.add_param_group(group)
        self.remember()

    def zero_grad(self, set_to_none: bool = True) -> None:
        self._inner.zero_grad(set_to_none)
        self._passed = 0

    def state_dict(self) -> dict[str, Any]:
        return self._inner.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._inner.load_state_dict(state_dict)
        self.__dict__.update({"param_groups": self._inner.param_groups, "state": self._inner.state})

    def synchronize(self) -> None:
        """Gradients are reduced already."""

    @contextlib.contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        yield

    def overflowed(self) -> bool:
        """Returns whether a GradScaler has found this rank's gradients not finite; unscales them otherwise."""
        found = self.__dict__.get("found_inf")
        if found is None or found.item():
            return found is not None
        scale = self.__dict__.get("grad_scale")
        for parameter in self._parameters():
            if scale is not None and parameter.grad is not None:
                parameter.grad /= scale
        return False

    def remember(self) -> None:
        """Stores the weights of an outer step, for parameters that have none yet."""

    def reseed(self) -> None:
        """All ranks have set the same weights."""

    def consensus(self) -> None:
        """Makes all ranks' weights equal, where they are not."""

    def backward(self, loss: torch.Tensor) -> None:
        loss.backward()  # type: ignore[no-untyped-call]

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        raise NotImplementedError


class AllReduce(Reference):
    """All-reduce: each backward pass, or each `passes`-th, adds the mean of the ranks' gradients to `p.grad`."""

    def backward(self, loss: torch.Tensor) -> None:
        parameters = self._parameters()
        kept = [parameter.grad for parameter in parameters]
        if self._passed == 0:
            self._reduced = kept
        for parameter in parameters:
            parameter.grad = None if self._passed == 0 else parameter.grad
        try:
            super().backward(loss)
        except RuntimeError as error:
            self._passed = 0
            with contextlib.suppress(GivenUp):
                self._run.world.meet(self._run.rank, GivenUp(str(error)), _means(self._run.size))
            raise
        self._passed += 1
        if self._passed < self.passes:
            return
        self._passed = 0
        mine = [torch.zeros_like(p) if p.grad is None else p.grad for p in parameters]
        means = self._run.world.meet(self._run.rank, mine, _means(self._run.size))
        for parameter, reduced, before in zip(parameters, means, self._reduced, strict=True):
            parameter.grad = reduced.clone() if before is None else before + reduced
        self._is_reduced = True

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        if closure is None and not self._is_reduced:  # the script has set it
            parameters = self._parameters()
            mine = [torch.zeros_like(p) if p.grad is None else p.grad for p in parameters]
            means = self._run.world.meet(self._run.rank, mine, _means(self._run.size))
            for parameter, reduced in zip(parameters, means, strict=True):
                parameter.grad = reduced.clone()
        self._is_reduced = False
        return self._inner.step() if closure is None else self._inner.step(closure)


class Shards(Reference):
    """BSP: the one optimizer steps with the mean of the gradients as the scripts have changed them.

    A rank whose gradients overflowed is left out.
    """

    _step_supports_amp_scaling = True

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        if closure is not None:
            closure()
        parameters = self._parameters()
        overflowed = self.overflowed()
        mine = [torch.zeros_like(p) if overflowed or p.grad is None else p.grad for p in parameters]
        without = self._run.world.meet(self._run.rank, overflowed, lambda values: sum(values.values()))
        means = self._run.world.meet(self._run.rank, mine, _means(self._run.size - without))
        for parameter, reduced in zip(parameters, means, strict=True):
            parameter.grad = reduced.clone()
        self._inner.step()


class LocalSGD(Reference):
    """Local SGD: every `period` steps, all ranks that are there take the mean of their weights."""

    period = 2
    _step_supports_amp_scaling = True

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        if not self.overflowed():
            self._inner.step() if closure is None else self._inner.step(closure)
        self._taken += 1
        if self._taken % self.period == 0:
            self.exchange()

    def exchange(self) -> None:
        mine = [parameter.detach().clone() for parameter in self._parameters()]
        means = self._run.world.meet(self._run.rank, mine, _means_of_present)
        for parameter, mean in zip(self._parameters(), means, strict=True):
            parameter.detach().copy_(mean)

    def consensus(self) -> None:
        LocalSGD.exchange(self)


class DiLoCo(LocalSGD):
    """DiLoCo: every `period` steps, an outer step of Nesterov's momentum by the mean change (arXiv 2311.08105)."""

    rate, momentum = 0.7, 0.5

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        if self._taken % self.period == 0:
            self.anchor()  # it begins with weights that the script has set here, the same on all ranks
        super().step(closure)

    def state_dict(self) -> dict[str, Any]:
        outer = [self._outer[id(parameter)] for parameter in self._parameters()]
        return {**super().state_dict(), "outer": (self._taken, outer)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict({key: value for key, value in state_dict.items() if key != "outer"})
        self._taken, outer = state_dict["outer"]
        self._outer = {id(p): saved for p, saved in zip(self._parameters(), outer, strict=True)}

    def remember(self) -> None:
        self._outer: dict[int, tuple[torch.Tensor, torch.Tensor]] = getattr(self, "_outer", {})
        for p in self._parameters():
            self._outer.setdefault(id(p), (p.detach().clone(), torch.zeros_like(p)))

    def anchor(self) -> None:
        """Has the next outer step begin with the present weights."""
        self._outer = {id(p): (p.detach().clone(), self._outer[id(p)][1]) for p in self._parameters()}

    def reseed(self) -> None:
        self._outer = {}
        self.remember()

    def exchange(self) -> None:
        parameters = self._parameters()
        mine = [self._outer[id(p)][0] - p.detach() for p in parameters]
        means = self._run.world.meet(self._run.rank, mine, _means_of_present)
        for parameter, mean in zip(parameters, means, strict=True):
            start, velocity = self._outer[id(parameter)]
            velocity.mul_(self.momentum).add_(mean)
            start.sub_(self.rate * (mean + self.momentum * velocity))
            parameter.detach().copy_(start)


class NoLoCo(DiLoCo):
    """NoLoCo: every `period` steps, an outer step with the mean change of a pair of ranks, whose momentum draws them
    together (arXiv 2506.10911, equation 3 for groups of two)."""

    rate, momentum, pull = 0.7, 0.5, 1.0

    def __init__(self, *args: Any) -> None:
        self._clock = 0
        super().__init__(*args)

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        LocalSGD.step(self, closure)

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "clock": self._clock}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._clock = state_dict["clock"]
        super().load_state_dict({key: value for key, value in state_dict.items() if key != "clock"})

    def add_param_group(self, group: dict[str, Any]) -> None:
        super().add_param_group(group)
        self._clock = 0  # of the new plan

    def anchor(self) -> None:
        super().anchor()
        self._clock = first_clock_after_join(self._clock)

    def reseed(self) -> None:
        super().reseed()
        self._clock = first_clock_after_join(self._clock)

    def consensus(self) -> None:
        super().consensus()
        self.anchor()

    def exchange(self) -> None:
        parameters = self._parameters()
        outer = [self._outer[id(p)] for p in parameters]
        mine = [(p.detach() - start, start.clone()) for p, (start, _) in zip(parameters, outer, strict=True)]
        all_of_them = self._run.world.meet(self._run.rank, mine, lambda values: values)
        pair = {self._run.rank, *self._run.graph(self._clock).get(self._run.rank, ())}
        self._clock += 1
        for index, (p, (start, velocity)) in enumerate(zip(parameters, outer, strict=True)):
            change = torch.stack([all_of_them[rank][index][0] for rank in pair]).mean(0)
            mean = torch.stack([all_of_them[rank][index][1] for rank in pair]).mean(0)
            velocity.mul_(self.momentum).add_(self.rate * change).sub_(self.pull * (start - mean))
            start.add_(velocity)
            p.detach().copy_(start)


class Overlapped(LocalSGD):
    """What ranks have after a step is exchanged during the next one, after which the change is added."""

    period = 1

    def __init__(self, *args: Any) -> None:
        self._pending: list[tuple[torch.Tensor, torch.Tensor]] = []
        super().__init__(*args)

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        if not self.overflowed():
            self._inner.step() if closure is None else self._inner.step(closure)
        self._taken += 1
        self.land()
        if self._taken % self.period == 0:
            parameters = self._parameters()
            self._pending = list(zip(parameters, self.changes([p.detach().clone() for p in parameters]), strict=True))

    def land(self) -> None:
        for parameter, change in self._pending:
            parameter.detach().add_(change)
        self._pending = []

    def state_dict(self) -> dict[str, Any]:
        self.land()
        return {**super().state_dict(), "taken": self._taken}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._taken = state_dict["taken"]
        super().load_state_dict({key: value for key, value in state_dict.items() if key != "taken"})

    def reseed(self) -> None:
        self._pending = []

    def consensus(self) -> None:
        self.land()
        self.exchange()

    def changes(self, mine: list[torch.Tensor]) -> list[torch.Tensor]:
        """Returns what is added to these parameters, a step later."""
        raise NotImplementedError


class DPSGD(Overlapped):
    """D-PSGD: x_i = sum_j W_ij x_j - rate g(x_i) (arXiv 1705.09056, algorithm 1). Equal weights for all senders."""

    def __init__(self, *args: Any) -> None:
        self._clock = 0
        super().__init__(*args)

    def add_param_group(self, group: dict[str, Any]) -> None:
        super().add_param_group(group)
        self._clock = 0  # of the new plan

    def reseed(self) -> None:
        super().reseed()
        self._clock = first_clock_after_join(self._clock)

    def consensus(self) -> None:
        super().consensus()
        self.reseed()

    def changes(self, mine: list[torch.Tensor]) -> list[torch.Tensor]:
        theirs = self._run.world.meet(self._run.rank, mine, lambda values: values)
        senders = {self._run.rank, *self._run.graph(self._clock).get(self._run.rank, ())}
        self._clock += 1
        return [torch.stack([theirs[rank][index] for rank in senders]).mean(0) - own for index, own in enumerate(mine)]


class SynchronousEASGD(Overlapped):
    """Elastic averaging: all ranks and a home pull each other by a share of their difference (arXiv 1412.6651,
    equations 3 and 4)."""

    period = 2

    def __init__(self, *args: Any) -> None:
        self._home: dict[int, torch.Tensor] = {}
        super().__init__(*args)

    def changes(self, mine: list[torch.Tensor]) -> list[torch.Tensor]:
        pull = 0.9 / self._run.size
        first = self._run.world.meet(self._run.rank, mine, lambda values: values[0])
        for p, value in zip(self._parameters(), first, strict=True):  # a home begins with these, at its first exchange
            self._home.setdefault(id(p), value.clone())
        homes = [self._home[id(p)] for p in self._parameters()]
        apart = [pull * (own - home) for own, home in zip(mine, homes, strict=True)]
        all_of_them = self._run.world.meet(self._run.rank, apart, lambda values: [*zip(*values.values(), strict=True)])
        for home, parts in zip(homes, all_of_them, strict=True):
            home += torch.stack(parts).sum(0)
        return [-each for each in apart]

    def reseed(self) -> None:
        super().reseed()
        self._home = {id(p): p.detach().clone() for p in self._parameters()}

    def consensus(self) -> None:
        self.land()
        for p in self._parameters():
            p.detach().copy_(self._home[id(p)])

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "home": [self._home[id(p)] for p in self._parameters()]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        home = state_dict["home"]
        super().load_state_dict({key: value for key, value in state_dict.items() if key != "home"})
        self._home = {id(p): value for p, value in zip(self._parameters(), home, strict=True)}


RULES: dict[str, type[Reference]] = {
    "allreduce": AllReduce,
    "bsp": Shards,
    "local_sgd": LocalSGD,
    "diloco": DiLoCo,
    "noloco": NoLoCo,
    "dpsgd": DPSGD,
    "sgp": DPSGD,  # on graphs on which ranks give as much as they take, all push-sum weights are 1
    "easgd, synchronous home": SynchronousEASGD,
}


class Threaded(Run):
    """A rank that is a thread."""

    even = True

    def __init__(self, world: World, rank: int, rule: type[Reference], how: How) -> None:
        self.world, self.rank, self.size, self._rule, self._how = world, rank, world.size, rule, how
        self.optimizer, self.rates = how.optimizer, how.rates

    def graph(self, clock: int) -> Mapping[int, Sequence[int]]:
        """Returns the ranks from which each rank takes values, at a clock."""
        return GRAPHS[self._how.graph](self.size, clock)

    def wrap(self, optimizer: torch.optim.Optimizer, model: torch.nn.Module, passes: int = 1) -> Any:
        return self._rule(self, optimizer, passes)

    def backward(self, loss: torch.Tensor, optimizer: Any) -> None:
        optimizer.backward(loss)

    def barrier(self) -> None:
        self.world.meet(self.rank, None, lambda values: None)

    def mean(self, value: float) -> float:
        return float(self.world.meet(self.rank, value, lambda values: sum(values.values()) / len(values)))

    def join(self) -> None:
        self.world.join(self.rank)

    def reseed(self, optimizer: Any) -> None:
        optimizer.reseed()

    def synchronize(self, optimizer: Any) -> None:
        """Nothing overlaps."""

    def consensus(self, optimizer: Any) -> None:
        optimizer.consensus()


def _ring(size: int, clock: int) -> Mapping[int, Sequence[int]]:
    return {rank: sorted({(rank - 1) % size, (rank + 1) % size} - {rank}) for rank in range(size)}


def _exponential(size: int, clock: int) -> Mapping[int, Sequence[int]]:
    hops = [1 << k for k in range(size) if 1 << k < size]
    return {rank: sorted({(rank - hop) % size for hop in hops}) for rank in range(size)}


def _one_peer(size: int, clock: int) -> Mapping[int, Sequence[int]]:
    hop = 1 << clock % max(1, (size - 1).bit_length())
    return {rank: [(rank - hop) % size] for rank in range(size)}


def _drawn(size: int, clock: int) -> Mapping[int, Sequence[int]]:
    """Whom a rank meets is the product's choice; that it meets one, which meets it, is tested with `mixing`."""
    graph = mixing.parse("random-pairs", size)
    return {rank: [other for other, _ in graph.incoming(rank, clock)] for rank in range(size)}


GRAPHS: dict[str, Callable[[int, int], Mapping[int, Sequence[int]]]] = {
    "": lambda size, clock: {},
    "ring": _ring,
    "exponential": _exponential,
    "one-peer-exponential": _one_peer,
    "random-pairs": _drawn,
}


@dataclass(frozen=True)
class How:
    """What the script is given: names of an optimizer, of a schedule of its rate, and of a graph; the latter is empty
    where there is none."""

    optimizer: str = "SGD"
    rates: str = "constant"
    graph: str = ""


@dataclass(frozen=True)
class Expected:
    """The expected result of a script.

    Attributes:
        weights: of all parameters, flat, by rank.
        complaints: of all ranks.
    """

    weights: Sequence[torch.Tensor]
    complaints: Sequence[str]


def expected(script: Script, size: int, algorithm: str, how: How) -> Expected:
    """Runs a script on `size` ranks of the algorithm of this name."""
    world = World(size)
    found: dict[int, Training | BaseException] = {}

    def run(rank: int) -> None:
        try:
            found[rank] = script.body(Threaded(world, rank, RULES[algorithm], how))
        except BaseException as error:
            found[rank] = error
            raise

    threads = [threading.Thread(target=run, args=(rank,), name=f"rank {rank}") for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    trained = []
    for rank in range(size):
        training = found[rank]
        if isinstance(training, BaseException):
            raise training
        trained.append(training)
    return Expected([flat(each.model) for each in trained], [text for each in trained for text in each.complaints])
