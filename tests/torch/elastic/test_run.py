"""`elastic.run`: when a training function is called again, and when its error is raised."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import fusion_rt.torch as hvd
from fusion_rt.core.errors import FusionError, HorovodInternalError, HostsUpdatedInterrupt
from fusion_rt.torch.elastic import State, loop, run_fn
from fusion_rt.torch.elastic.donors import Donors
from tests.harness import on_ranks


class Recorder(State):
    """Writes down what is done with it."""

    def __init__(self) -> None:
        super().__init__(lambda obj: obj, lambda: 0)
        self.log: list[str] = []

    def save(self) -> None:
        self.log.append("save")

    def restore(self) -> None:
        self.log.append("restore")

    def sync(self) -> None:
        self.log.append("sync")

    def reset(self) -> None:
        self.log.append("on_reset")


def play(*script: Exception | str) -> Callable[..., str]:
    """A training function that raises or returns one item of the script a call, and commits before a second error."""
    items = iter(script)

    def train(state: Recorder, *args: Any, **kwargs: Any) -> str:
        state.log.append("train")
        item = next(items)
        if item == "commit":
            state.commit()
            item = next(items)
        if isinstance(item, Exception):
            raise item
        return f"{item} {args} {kwargs}"

    return train


def run(state: Recorder, train: Callable[..., str], *args: Any, **kwargs: Any) -> str:
    result: str = run_fn(train, lambda: state.log.append("rejoin"))(state, *args, **kwargs)
    return result


def test_arguments_and_result_pass_through() -> None:
    state = Recorder()
    assert run(state, play("done"), 1, b=2) == "done (1,) {'b': 2}"
    assert state.log == ["sync", "train"]


def test_after_an_error_the_last_commit_is_restored_and_the_job_joined_again() -> None:
    state = Recorder()
    run(state, play(HorovodInternalError("x"), "done"))
    assert state.log == ["sync", "train", "restore", "rejoin", "on_reset", "sync", "train"]


def test_new_hosts_keep_the_values_and_sync_them() -> None:
    state = Recorder()
    run(state, play(HostsUpdatedInterrupt(), "done"))
    assert state.log == ["sync", "train", "on_reset", "sync", "train"]


def test_lost_hosts_need_no_sync() -> None:
    state = Recorder()
    run(state, play(HostsUpdatedInterrupt(skip_sync=True), HorovodInternalError("x"), "done"))
    assert state.log == ["sync", "train", "on_reset", "train", "restore", "rejoin", "on_reset", "sync", "train"]


def test_an_error_that_comes_back_before_anything_was_committed_is_raised() -> None:
    state = Recorder()
    with pytest.raises(HorovodInternalError, match="second"):
        run(state, play(HorovodInternalError("first"), HorovodInternalError("second"), "never"))
    state = Recorder()
    errors = [HorovodInternalError(str(number)) for number in range(3)]
    run(state, play(errors[0], "commit", errors[1], "commit", errors[2], "done"))
    assert state.log.count("rejoin") == 3


def test_an_error_is_raised_when_the_job_cannot_be_joined_again() -> None:
    state = Recorder()

    def reset() -> None:
        raise FusionError("rank 1 is gone")

    with pytest.raises(HorovodInternalError, match="lost") as caught:
        run_fn(play(HorovodInternalError("lost")), reset)(state)
    assert "rank 1 is gone" in str(caught.value.__cause__)
    assert state.log == ["sync", "train", "restore"]


def test_other_errors_are_left_alone() -> None:
    with pytest.raises(KeyError):
        run(Recorder(), play(KeyError("x")))


# --- in an elastic job ------------------------------------------------------------------------------------------------


def test_an_interruption_is_found_in_what_torch_has_made_of_its_error() -> None:
    own = HostsUpdatedInterrupt()
    assert loop.interruption_of(own) is own
    text = "Cannot extract tensors from value: CollectiveError: rank 1 is gone\nadvice\n\nAt:\n  work.py(1): wait\n"
    found = loop.interruption_of(RuntimeError(text))
    assert isinstance(found, HorovodInternalError)
    assert str(found) == "rank 1 is gone\nadvice"
    other = RuntimeError("shapes differ")
    with pytest.raises(RuntimeError) as caught:
        loop.interruption_of(other)
    assert caught.value is other


class Leaving(Recorder):
    """Writes down, too, how membership epochs are left and begun. `trouble`: what handing over and syncing raise."""

    def __init__(self, *trouble: Exception | None) -> None:
        super().__init__()
        self.trouble = list(trouble)

    def sync(self) -> None:
        super().sync()
        self._raise()

    def _hand_over(self) -> None:
        self.log.append("hand over")
        self._raise()

    def _resume(self) -> None:
        self.log.append("resume")

    def _raise(self) -> None:
        if self.trouble and (error := self.trouble.pop(0)):
            raise error


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[str]]:
    """Runs a training function as in an elastic job, without one; what was done with the state. `others_skip`: whether
    all other ranks have the values already."""

    def run(state: Recorder, train: Callable[..., str], others_skip: bool = True) -> list[str]:
        monkeypatch.setattr(loop, "runtime", lambda: SimpleNamespace(rank=0, size=2))

        def move(agent: object, why: str, is_unfit: bool = False) -> None:
            state.log.append(f"move ({why}{', unfit' if is_unfit else ''})")

        monkeypatch.setattr(loop, "move", move)

        def join(_: object, skips_sync: bool, has_values: bool, level: str) -> Donors:
            return Donors(not (skips_sync and others_skip))

        monkeypatch.setattr(loop.Survival, "join", join)
        loop.train(train, state, SimpleNamespace(expected=None, trains=True))  # type: ignore[arg-type]
        return state.log

    return run


LAST = ["on_reset", "sync", "train"]


def test_an_error_leads_to_the_next_epoch_however_often(
    launched: Callable[..., list[str]], caplog: pytest.LogCaptureFixture
) -> None:
    log = launched(Leaving(), play(*(HorovodInternalError(text) for text in "ab"), "done"))
    assert log == ["sync", "train", "restore", "move (a)", *LAST[:-1], "train", "restore", "move (b)", *LAST]
    assert caplog.messages == [f"2 ranks go on from the last commit, since {why}" for why in "ab"]


def test_ranks_that_are_too_few_leave_at_once_and_say_so(launched: Callable[..., list[str]]) -> None:
    state = Leaving()
    why = iter(["four are asked for", ""])
    state._why_unfit = lambda: next(why)  # type: ignore[method-assign]
    log = launched(state, play(HorovodInternalError("a"), "done"))
    assert log == ["sync", "train", "restore", "move (a)", "on_reset", "move (four are asked for, unfit)", *LAST]


def test_new_hosts_lead_to_the_next_epoch_with_the_values_as_they_are(launched: Callable[..., list[str]]) -> None:
    log = launched(Leaving(), play(HostsUpdatedInterrupt(), "done"))
    assert log == ["sync", "train", "hand over", "move ()", *LAST]


def test_lost_hosts_need_no_sync_unless_somebody_is_new(launched: Callable[..., list[str]]) -> None:
    script = HostsUpdatedInterrupt(skip_sync=True), "done"
    assert launched(Leaving(), play(*script))[2:] == ["hand over", "move ()", "on_reset", "resume", "train"]
    assert launched(Leaving(), play(*script), False)[2:] == ["hand over", "move ()", *LAST]


def test_who_dies_while_the_others_leave_or_come_is_an_error_as_any(launched: Callable[..., list[str]]) -> None:
    log = launched(Leaving(None, HorovodInternalError("x")), play(HostsUpdatedInterrupt(True), "done"))
    assert log == ["sync", "train", "hand over", "restore", "move (x)", *LAST]
    log = launched(Leaving(HorovodInternalError("y")), play("done"))
    assert log == ["sync", "restore", "move (y)", *LAST]


@on_ranks
def test_a_job_trains_to_its_end_with_an_interruption() -> None:
    calls = []

    @hvd.elastic.run
    def train(state: Any, epochs: int) -> int:
        calls.append(state.epoch)
        while state.epoch < epochs:
            state.epoch += 1
            if state.epoch == 2 and hvd.rank() == 0 and len(calls) == 1:
                state.on_hosts_updated(1.0, 2)
            state.commit()
        return int(state.epoch)

    state = hvd.elastic.TorchState(epoch=-hvd.rank())
    assert train(state, 4) == 4
    assert calls == [0, 2]


@on_ranks
def test_a_job_goes_on_from_the_last_commit_after_an_error_on_all_ranks() -> None:
    torch.manual_seed(0)
    model = torch.nn.Linear(2, 1)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
    resets, weights = [], []

    @hvd.elastic.run
    def train(state: Any) -> None:
        while state.step < 4:
            if state.step == 2 and not resets:
                step()  # of which nothing must be left
                hvd.allreduce(torch.ones(2 + hvd.rank()), name="of different sizes")
            step()
            weights.append(model.weight.detach().clone())
            state.step += 1
            state.commit()

    def step() -> None:
        optimizer.zero_grad()
        model(torch.ones(4, 2) + hvd.rank()).square().mean().backward()
        optimizer.step()

    state: Any = hvd.elastic.TorchState(model, optimizer, step=0)
    state.register_reset_callbacks([lambda: resets.append(state.step)])
    train(state)
    assert resets == [2]

    torch.manual_seed(0)
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for expected in weights:  # the same in one process, without an error
        optimizer.zero_grad()
        losses = [model(torch.ones(4, 2) + rank).square().mean() for rank in range(hvd.size())]
        (sum(losses) / hvd.size()).backward()  # type: ignore[union-attr]
        optimizer.step()
        torch.testing.assert_close(model.weight.detach(), expected)
