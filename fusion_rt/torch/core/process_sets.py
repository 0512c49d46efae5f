"""Sets of ranks within which operations run, with Horovod's names and meaning.

A `ProcessSet` is a list of ranks that becomes usable when it is registered, by `init(process_sets=[...])` or by
`add_process_set`. Either is collective: all ranks of the job do it, members or not, in the same order. Operations of
different sets run concurrently, also where the sets overlap.

Ranks have other numbers after a loss, and scripts choose by their numbers what to call. So a set of given ranks ends
with its membership, as in Horovod. One whose ranks follow from their number by a *rule* can be registered anew.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence

from fusion_rt import wire
from fusion_rt.core import topology
from fusion_rt.core.topology import GLOBAL_SET
from fusion_rt.torch.core.runtime import is_initialized, runtime


def _ascending(ranks: object) -> list[int]:
    if not isinstance(ranks, Iterable):
        raise ValueError(
            f"ProcessSet should be initialized with a list of process ranks, not with {type(ranks).__name__}; MPI "
            "communicators are not supported"
        )
    members = list(ranks)
    if any(not isinstance(rank, int) for rank in members):
        raise ValueError(f"ProcessSet should be initialized with a list of process ranks, not with {members}")
    return sorted(members)


class ProcessSet:
    """A set of ranks that take part in an operation.

    Args:
        ranks: its members, in any order; or a rule, which returns them for a number of ranks of the job, the same on
            all ranks: `ProcessSet(lambda size: range(0, size, 2))`. In an elastic job a set with a rule has the new
            ranks after a loss by which no rank has left its loop (docs/elastic.md).

    Attributes:
        process_set_id: its id in messages; None while it is not registered.
        ranks: its members, ascending. Those of `global_process_set`, and of a rule, are known after `init`.
        mpi_comm: Horovod's; None, since there are no MPI communicators here.

    Raises:
        ValueError: `ranks` are not ranks.
    """

    mpi_comm: None = None

    def __init__(self, ranks: Iterable[int] | Callable[[int], Iterable[int]]) -> None:
        self.process_set_id: int | None = None
        self._rule = ranks if callable(ranks) else None
        self.ranks: list[int] = [] if callable(ranks) else _ascending(ranks)

    def size(self) -> int | None:
        """Returns the number of members; None while it is not registered, or before `init`.

        Raises:
            ValueError: it has been removed, or belongs to a job that has ended.
        """
        return len(self._registered()) if self._known() else None

    def rank(self) -> int | None:
        """Returns this worker's position among the members; None while it is not registered, or before `init`.

        Raises:
            ValueError: this worker is not a member; or as for `size`.
        """
        if not self._known():
            return None
        members = self._registered()
        if runtime().rank not in members:
            raise ValueError(f"Process is not part of provided process set: rank {runtime().rank} is not in {self}")
        return members.index(runtime().rank)

    def included(self) -> bool | None:
        """Tells whether this worker is a member of the set, registered or not; None before `init`."""
        if not is_initialized():
            return None
        if self.process_set_id is None:
            self.apply_rule()
        return runtime().rank in self.ranks

    @property
    def has_rule(self) -> bool:
        """Tells whether its ranks follow from their number."""
        return self._rule is not None

    def apply_rule(self) -> None:
        """Finds the ranks by the rule, if there is one.

        Raises:
            ValueError: they are not ranks.
        """
        if self._rule is not None:
            self.ranks = _ascending(self._rule(runtime().size))

    def _known(self) -> bool:
        return self.process_set_id is not None and is_initialized()

    def _registered(self) -> tuple[int, ...]:
        assert self.process_set_id is not None
        registered = runtime().client.process_sets.get(self.process_set_id)
        if registered is None:
            raise ValueError(f"Process set does not exist or has not been registered: {self}")
        return registered.ranks

    def __str__(self) -> str:
        return f"ProcessSet(process_set_id={self.process_set_id}, ranks={self.ranks}, mpi_comm={self.mpi_comm})"

    __repr__ = __str__


global_process_set = ProcessSet([])
global_process_set.process_set_id = GLOBAL_SET


def add_process_set(process_set: ProcessSet | Iterable[int] | Callable[[int], Iterable[int]]) -> ProcessSet:
    """Registers a process set; every rank of the job has to call it, with the same ranks.

    Unlike in Horovod, that needs no `HOROVOD_DYNAMIC_PROCESS_SETS=1`.

    Args:
        process_set: one that is not registered, or its ranks, or a rule.

    Returns:
        The process set, which can be used from now on.

    Raises:
        ValueError: before `init`; there are no such ranks; or a process set of these ranks is registered already.
        HorovodInternalError: the ranks of the job do not agree about it; on all of them.
    """
    if not isinstance(process_set, ProcessSet):
        process_set = ProcessSet(process_set)
    if _find(_checked(process_set)) is not None:
        raise ValueError(f"Attempted to add a duplicate process set: {process_set}")
    _register(process_set)
    return process_set


def remove_process_set(process_set: ProcessSet) -> bool:
    """Ends a process set; every rank of the job has to call it. Operations of it have to be over.

    Returns:
        Whether it was removed: False for one that is not registered and for `global_process_set`.

    Raises:
        ValueError: before `init`.
        HorovodInternalError: the ranks of the job do not agree about it; on all of them.
    """
    if process_set.process_set_id in (None, GLOBAL_SET):
        return False
    assert process_set.process_set_id is not None
    client, removed = runtime().client, process_set.process_set_id
    process_set.process_set_id = None
    if removed not in client.process_sets:
        return False
    client.remove_process_set(removed)
    return True


def get_process_set_ids_and_ranks() -> dict[int, list[int]]:
    """Returns the ranks of all registered process sets, by their ids. Raises `ValueError` before `init`."""
    return {process_set.id: list(process_set.ranks) for process_set in _of_all_ranks()}


def takes_part(process_set: ProcessSet) -> bool:
    """Tells whether this worker has anything to reduce: it is a member, and not the only one.

    As in Horovod, a worker that is alone is left to itself (its gradients stay where autograd puts them), except in an
    elastic job, where others may come.
    """
    if not process_set.included():
        return False
    return process_set.size() != 1 or os.environ.get("HOROVOD_ELASTIC") == "1"


def register(process_sets: Sequence[ProcessSet]) -> None:
    """Registers the process sets that `init` was given; all ranks pass the same ones.

    Raises:
        ValueError: one of them is there twice, has the ranks of the whole job, or ranks that there are not.
        HorovodInternalError: the ranks do not agree.
    """
    client = runtime().client
    global_process_set.ranks = list(client.process_sets[GLOBAL_SET].ranks)
    seen: set[int] = {GLOBAL_SET}
    for number, process_set in enumerate(process_sets):
        ranks = _checked(process_set)
        process_set.process_set_id = _find(ranks)
        if process_set.process_set_id is None:
            _register(process_set)
        assert process_set.process_set_id is not None
        if process_set.process_set_id in seen:
            process_set.process_set_id = None
            raise ValueError(f"process_sets entry number {number} is a duplicate: {process_set}; leave it out")
        seen.add(process_set.process_set_id)


def by_rule() -> list[ProcessSet]:
    """Returns the registered process sets that have a rule, in the order in which they were registered."""
    known = runtime().client.process_sets
    return [process_set for process_set in runtime().ruled if process_set.process_set_id in known]


def without_rule() -> list[topology.ProcessSet]:
    """Returns the registered process sets of the script that have no rule."""
    ruled = {GLOBAL_SET, *(process_set.process_set_id for process_set in by_rule())}
    return [known for known in _of_all_ranks() if known.id not in ruled]


def ranks_by_rule(process_sets: Sequence[ProcessSet]) -> tuple[tuple[int, ...], ...] | None:
    """Returns the ranks of process sets that have rules, none of which is registered in this membership yet; None if
    they cannot all be registered."""
    try:
        for process_set in process_sets:
            process_set.process_set_id = None
        ranks = tuple(_checked(process_set) for process_set in process_sets)
    except ValueError:
        return None
    are_new = len(set(ranks)) == len(ranks) and all(_find(each) is None for each in ranks)
    return ranks if are_new else None


def _register(process_set: ProcessSet) -> None:
    process_set.process_set_id = runtime().client.add_process_set(process_set.ranks).id
    if process_set.has_rule:
        runtime().ruled.append(process_set)


def _checked(process_set: ProcessSet) -> tuple[int, ...]:
    process_set.apply_rule()
    ranks, size = process_set.ranks, runtime().size
    if not ranks or len(set(ranks)) != len(ranks) or ranks[0] < 0 or ranks[-1] >= size:
        raise ValueError(
            f"{process_set} cannot be registered: it needs at least one rank, each once, of 0 to {size - 1}"
        )
    return tuple(ranks)


def _find(ranks: tuple[int, ...]) -> int | None:
    """Returns the id under which these ranks are registered."""
    return next((known.id for known in _of_all_ranks() if known.ranks == ranks), None)


def _of_all_ranks() -> list[topology.ProcessSet]:
    """Returns the process sets that all ranks know: no groups, which only their members know."""
    return [known for known in runtime().client.process_sets.values() if known.id < wire.GROUPS]
