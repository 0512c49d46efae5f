"""Survival of losses in place: the ranks that are left agree about the step that was under way, and stay in their
loops.

When an exchange of an optimizer fails since a rank is gone, each of the others joins the next membership epoch from
where it is, in `backward()` or `step()`, and tells all what it has completed (`RankReport`). From that all ranks draw
the same conclusion (`conclude`): either they go on, after those that are an exchange behind were *healed* with what the
others have; or all go on from the last commit, as after any other error. They do so if one has left its function (an
operation of the script's own had failed), is new, or if what they have completed does not fit together.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from types import TracebackType
from typing import NamedTuple

import torch

from fusion_rt.core.errors import HorovodInternalError
from fusion_rt.core.topology import GLOBAL_SET
from fusion_rt.core.wording import go_on
from fusion_rt.host.system_memory import return_freed_memory
from fusion_rt.local import elastic
from fusion_rt.torch.core import process_sets
from fusion_rt.torch.core.basics import init
from fusion_rt.torch.core.process_sets import global_process_set
from fusion_rt.torch.core.runtime import runtime, step_out
from fusion_rt.torch.elastic import donors, mirrors
from fusion_rt.torch.elastic.donors import Donors
from fusion_rt.torch.elastic.sampler import Standing
from fusion_rt.torch.elastic.state import State
from fusion_rt.torch.ops.objects import allgather_object, broadcast_all
from fusion_rt.torch.sync import carried
from fusion_rt.torch.sync.at_step.at_step import AtStep
from fusion_rt.torch.sync.at_step.outer_optimizer import OuterOptimizer
from fusion_rt.torch.sync.broadcasting import broadcast_step
from fusion_rt.torch.sync.exchanges import Exchange, exchanges
from fusion_rt.torch.sync.slots import in_order
from fusion_rt.torch.sync.step_schedule import Outcome, Schedule, ShardClock, enter_all, everyone
from fusion_rt.torch.sync.synchroniser import Synchroniser
from fusion_rt.wire import is_group

_log = logging.getLogger("fusion_rt.elastic")
_ALL = (1 << 48) - 1  # a clock after all contributions


class RankReport(NamedTuple):
    """The state of a rank at the beginning of a membership epoch.

    Attributes:
        skips_sync: it needs no other rank's values.
        has_values: that were synced before.
        level: the same on ranks that have left the last membership epoch in good order, with the same values; else
            empty.
        stays: it is in its function, and can go on there.
        generation, completed, begun: those of its exchanges.
        failed: places of the optimizers whose exchange has failed, in the order in which they were made.
        last: of those of the last exchange that has ended well, and the outcome of each.
        has_memory: its daemon has a codec's residual, without a step that was not complete here.
        is_spoiled: its healing was interrupted.
        standings: how far it has come with its samples.
        shard_clocks: how far it has come at the shards of its optimizers, in the order in which these were made.
        in_step: its exchanges have the same numbers as those of other ranks.
        process_sets: the ranks of those that are to be registered anew, by their rules; None if they cannot be.
        plans_ahead: whether it can ask for a plan before it has gradients, by optimizer in the order in which these
            were made.
    """

    skips_sync: bool = False
    has_values: bool = False
    level: str = ""
    stays: bool = False
    generation: int = 0
    completed: int = 0
    begun: int = 0
    failed: tuple[int, ...] = ()
    last: tuple[tuple[int, Outcome], ...] = ()
    has_memory: bool = False
    is_spoiled: bool = False
    standings: Sequence[Standing] = ()
    shard_clocks: tuple[ShardClock | None, ...] = ()
    in_step: bool = True
    process_sets: tuple[tuple[int, ...], ...] | None = ()
    plans_ahead: tuple[bool, ...] = ()


class Conclusion(NamedTuple):
    """The way in which ranks go on that stay in their functions.

    Attributes:
        left_out: no rank exchanges anything up to this number.
        behind: ranks that are to be healed.
        root: the rank that they are healed from.
        healed: places of the optimizers to heal, and the outcome of their exchange.
    """

    left_out: int
    behind: tuple[int, ...] = ()
    root: int = 0
    healed: tuple[tuple[int, Outcome], ...] = ()


def conclude(reports: Sequence[RankReport]) -> Conclusion | None:
    """Returns how all ranks go on in place; None if they have to go on from the last commit.

    Args:
        reports: of all ranks, by their new numbers.
    """
    if not all(report.stays for report in reports) or len({report.generation for report in reports}) > 1:
        return None
    if None in (rules := {report.process_sets for report in reports}) or len(rules) > 1:
        return None
    if not _fit_together([report.shard_clocks for report in reports]):
        return None
    if not any(report.in_step for report in reports):
        return Conclusion(0)  # each leaves out its own exchange: none of them is that of any other rank
    most = max(report.completed for report in reports)
    behind = tuple(rank for rank, report in enumerate(reports) if report.completed < most)
    left_out = max(most + 1, *(report.begun for report in reports))
    if any(report.is_spoiled and report.completed == most for report in reports):
        return None  # and no rank is left to heal it from
    if not behind:
        return Conclusion(left_out)
    root = next(rank for rank, report in enumerate(reports) if report.completed == most)
    healed = reports[root].last
    told = {reports[rank].failed for rank in behind} | {tuple(place for place, _ in healed)}
    if min(report.completed for report in reports) < most - 1 or len(told) > 1:
        return None
    if any(outcome is Outcome.OPEN for _, outcome in healed):
        return None  # the root may have changed these results already
    if any(report.has_memory for report in reports):
        return None  # values that ranks behind have in their residuals again are in the results of the others
    return Conclusion(left_out, behind, root, healed)


def planned_ahead(reports: Sequence[RankReport]) -> tuple[bool, ...]:
    """Tells of which optimizers, in the order in which they were made, all ranks ask for a plan before there are
    gradients, so that the first step need not wait for it. Where no rank has values, a job begins, and nobody knows yet
    in which order gradients come.

    Args:
        reports: of all ranks.
    """
    if len({len(report.plans_ahead) for report in reports}) > 1 or not any(report.has_values for report in reports):
        return ()
    return tuple(all(each) for each in zip(*(report.plans_ahead for report in reports), strict=True))


def _fit_together(clocks: Sequence[Sequence[ShardClock | None]]) -> bool:
    """Tells whether ranks are at the same shards, and what some have recalled of them, all have, and it counts still.

    Args:
        clocks: of each rank.
    """
    if len({len(each) for each in clocks}) > 1:
        return False
    for each in zip(*clocks, strict=True):
        known = [clock for clock in each if clock is not None]
        if len({(clock.epoch, clock.plan, clock.recalled) for clock in known}) > 1:
            return False
        if known and known[0].in_step and known[0].recalled not in (-1, max(clock.clock for clock in known)):
            return False
    return True


def move(agent: elastic.AgentConnection, why: str, is_unfit: bool = False) -> None:
    """Leaves this membership epoch, and joins the next one; over the same connection if its daemon is the same.

    Args:
        agent: the connection to the launcher's agent.
        why: why this rank leaves; empty if hosts have changed.
        is_unfit: no epoch with as many ranks is of use.
    """
    step_out()
    elastic.move(agent, why, is_unfit)
    init()
    enter_all(runtime())


class Survival:
    """This rank's part in it, while it is in its function: a context.

    Args:
        agent: the connection to the launcher's agent.
        state: the function's.

    Attributes:
        agreed: what `join` would return of an epoch that this rank has joined in its function, which it has to leave
            after all; None if there is none.
    """

    def __init__(self, agent: elastic.AgentConnection, state: State) -> None:
        self._agent, self._state = agent, state
        self._is_spoiled, self._stays = False, True
        self._planned_ahead: tuple[bool, ...] = ()
        self.agreed: Donors | None = None

    def __enter__(self) -> None:
        exchanges.restart()
        self._is_spoiled, self._stays = False, True
        exchanges.survive = self._survive

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        exchanges.survive = None
        exchanges.restart()
        given, self._state._given = self._state._given, ()
        if kind is None:
            donors.await_given(given)

    def join(self, skips_sync: bool, has_values: bool, level: str) -> Donors:
        """Begins a membership epoch outside of the function, with all ranks, and returns whose values count.

        Args:
            skips_sync, has_values, level: see `RankReport`.

        Raises:
            HorovodInternalError: a rank is gone.
        """
        agreed, self.agreed = self.agreed, None
        plans_ahead = _plans_ahead(is_new=not has_values)
        return agreed or _donors(self._tell(RankReport(skips_sync, has_values, level, plans_ahead=plans_ahead)))

    def plan_ahead(self) -> None:
        """Asks for plans before the training goes on, where all ranks can.

        Raises:
            HorovodInternalError: a rank is gone.
        """
        asked, self._planned_ahead = self._planned_ahead, ()
        for schedule, is_asked in zip(everyone(), asked, strict=False):
            if is_asked:
                plan_ahead(schedule.sync)

    def _tell(self, report: RankReport) -> list[RankReport]:
        donors.open_group(runtime())
        reports = allgather_object(report, "elastic.join")
        self._planned_ahead = planned_ahead(reports)
        return reports

    def _survive(self, error: HorovodInternalError, failed: Exchange) -> None:
        """Goes on in the next membership epoch. See `Exchanges.survive`."""
        dropped = [exchange for exchange in exchanges.under_way if exchange is not failed]
        if exchanges.is_uncertain or any(exchange.is_done for exchange in dropped):
            raise error
        if runtime().client.channel.failure is None:
            raise error  # no rank is lost
        trained = {schedule.sync.options.process_set.process_set_id for schedule in everyone()}
        lasting = [one for one in process_sets.by_rule() if one.process_set_id not in trained]
        can_last = {GLOBAL_SET, donors.GROUP, *(one.process_set_id for one in lasting)}
        if made := [known for known in runtime().client.process_sets if known not in can_last]:
            what = "a process group of torch.distributed" if is_group(made[0]) else f"process set {made[0]}"
            raise HorovodInternalError(
                f"{str(error).splitlines()[0]} (and in place no rank can go on: {what} is one of ranks that there "
                "were, which the script has to make anew)"
            ) from error
        why, daemon = str(error), runtime().where.socket
        while True:
            try:
                self._move(why, daemon, dropped)
                reports = self._tell(self._report(failed, process_sets.ranks_by_rule(lasting)))
                found = conclude(reports)
                if found is None or not self._state._follow([report.standings for report in reports]):
                    self.agreed = _donors(reports)
                    break
                exchanges.generation += 1
                if not self._recall([report.shard_clocks for report in reports]):
                    self.agreed = _donors(reports)
                    break
                self._heal(found, failed)
                for process_set in lasting:
                    process_sets.add_process_set(process_set)
                self.plan_ahead()
                exchanges.left_out = found.left_out
                break
            except HorovodInternalError as another:
                why = str(another)
        if self.agreed is not None:
            raise error
        for exchange in dropped:
            exchanges.end(exchange)
        self._state._on_survived()
        return_freed_memory()
        if runtime().rank == 0:
            _log.warning("a rank was lost: the step that was under way is left out, and %s", go_on(runtime().size))

    def _move(self, why: str, daemon: str, dropped: Sequence[Exchange]) -> None:
        move(self._agent, why)
        self._state._given = ()  # by now, newcomers have it or are gone
        if runtime().where.socket != daemon and any(each.sync.checkpoint.is_lost_with_daemon for each in everyone()):
            self._stays = False  # the memory of codecs and homes is gone with the daemon, but for the last commit's
        for exchange in dropped:
            for part in exchange.parts:
                part.drop_under_way()
        for schedule in everyone():
            schedule.finish()  # updates whose gradients have all been reduced, and which wait for a forward pass

    def _report(self, failed: Exchange, rules: tuple[tuple[int, ...], ...] | None) -> RankReport:
        places = {schedule: place for place, schedule in enumerate(everyone())}
        clocks = tuple(schedule.shard_clock() for schedule in everyone())
        return RankReport(
            has_values=True,
            stays=self._stays and not self._state._why_unfit(),
            generation=exchanges.generation,
            completed=exchanges.completed,
            begun=exchanges.begun,
            failed=tuple(places[part] for part in failed.parts),
            last=tuple((places[part], part.outcome) for part in exchanges.last if part in places),
            has_memory=any(schedule.sync.checkpoint.puts_back for schedule in everyone()),
            is_spoiled=self._is_spoiled,
            standings=self._state._standing(),
            shard_clocks=clocks,
            in_step=any(clock is None or clock.in_step for clock in clocks),
            process_sets=rules,
            plans_ahead=_plans_ahead(is_new=False),
        )

    def _recall(self, clocks: Sequence[Sequence[ShardClock | None]]) -> bool:
        """Has shards go on from what they and their mirrors had when the last contribution that counts was in them: of
        those that all ranks exchange at the same time, the last one that any rank has got the answers to. An operation
        on all ranks, if there are any.

        Args:
            clocks: of all ranks.

        Returns:
            Whether nothing was lost; the same on all ranks.
        """
        for schedule, *each in zip(everyone(), *clocks, strict=True):
            known = [clock for clock in each if clock is not None]
            if not known:
                continue
            assert isinstance(schedule, AtStep)  # no other schedule has a clock
            clock = max(one.clock for one in known) if known[0].in_step else _ALL
            kept, mirrored = schedule.sync.checkpoint.recall(known[0].epoch, clock)
            homes = mirrors.fill(carried.united(allgather_object(kept.homes, "elastic.shards")), mirrored)
            if missing := schedule.sync.checkpoint.resume(homes, kept):
                if runtime().rank == 0:
                    _log.warning("shards are lost with their mirrors, or had not begun: %s", ", ".join(missing[:3]))
                return False
            schedule.note_recalled(clock)
        return True

    def _heal(self, found: Conclusion, failed: Exchange) -> None:
        """Heals those that are behind. An operation on all ranks, if there are any."""
        is_behind = runtime().rank in found.behind
        self._is_spoiled = is_behind
        parts = everyone()
        for place, outcome in found.healed:
            if outcome is Outcome.TAKEN:
                heal(parts[place], found.root, is_behind)
        if is_behind:
            failed.known = {parts[place]: outcome for place, outcome in found.healed}
            exchanges.last = failed.parts
        self._is_spoiled = False


def _plans_ahead(is_new: bool) -> tuple[bool, ...]:
    """Returns this rank's part of `planned_ahead`."""
    return tuple(can_plan_ahead(schedule.sync, is_new) for schedule in everyone())


def _donors(reports: Sequence[RankReport]) -> Donors:
    """Returns whose values count, by the reports of all ranks."""
    root = next((rank for rank, report in enumerate(reports) if report.has_values), 0)
    by_taker = donors.by_taker([report.level for report in reports])
    return Donors(not all(report.skips_sync for report in reports), root, by_taker)


def can_plan_ahead(sync: Synchroniser, is_new: bool) -> bool:
    """Tells whether the plan of an optimizer can be asked for before there are gradients. They say which ones are
    sparse, and what a script's compressor makes of them; and codecs and homes get their state before.

    Args:
        sync: the optimizer's.
        is_new: this rank has been in no membership that has plans; others have.
    """
    options, named = sync.options, {slot.name for slot in sync.slots}
    is_global = options.process_set is global_process_set
    is_plain = options.compressor is None and sync.replanning is None and not sync.checkpoint.remembers
    return is_global and is_plain and bool(named) and (is_new or named == set(sync.plan.order))


def plan_ahead(sync: Synchroniser) -> None:
    """Asks for a plan, in the order of the one before, and does not wait for it. To be called on all ranks.

    Raises:
        HorovodInternalError: a rank is gone.
    """
    by_name = {slot.name: slot for slot in sync.slots}
    order = in_order([*(by_name[name] for name in sync.plan.order if name in by_name), *sync.slots])
    sync.plan.propose({slot.name: slot for slot in order}, sync.schedule.reduction(), ahead=True)


def heal(part: Schedule, root: int, is_behind: bool) -> None:
    """Gives all ranks the parameters and the state of an optimizer after its last exchange, from one rank.

    Where ranks take local steps this is the start of the next ones, and the outer optimizer, if there is one. If there
    is none, ranks that have not got the mean of the parameters go on with their own until the next exchange: nobody
    knows the mean any more.

    Args:
        part: the optimizer's.
        root: the rank that has the results.
        is_behind: this rank has not.

    Raises:
        HorovodInternalError: it failed, on all ranks.
    """
    if not part.local:
        broadcast_step(part.sync.trained.optimizer(), root)
    elif isinstance(part, OuterOptimizer):
        slots = list(part.sync.slots)
        for slot in slots:
            if slot.start is None:
                slot.start = slot.parameter.detach().clone()
            if slot.velocity is None:
                slot.velocity = torch.zeros_like(slot.parameter)
        tensors = [tensor for slot in slots for tensor in (slot.start, slot.velocity) if tensor is not None]
        broadcast_all([(None, tensor) for tensor in tensors], root, global_process_set)
        for slot in slots if is_behind else ():
            assert slot.start is not None
            slot.parameter.detach().copy_(slot.start)
