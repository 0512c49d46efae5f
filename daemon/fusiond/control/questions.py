"""Questions of the nodes to each other about waits: operations under way, and places of workers. No I/O."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Protocol, TypeAlias

from fusion_rt import wire
from fusion_rt.wire import OpKey
from fusiond.control.waiting import Survey, describe_ranks, merge
from fusiond.core.dispatch import Handlers
from fusiond.core.queries import Rounds
from fusiond.operations.context import Context

PATIENCE = 3.0  # seconds for an answer: a worker has one to show its stacks, and a daemon may be busy
Answer: TypeAlias = wire.Located | wire.WaitingHere


class Informed(Protocol):
    """The engine, as far as it knows operations under way."""

    def under_way(self, key: OpKey | None) -> Sequence[wire.Waiting]:
        """Returns the operations under way on this node, or one operation, also when it is over."""


class Questions:
    """One node's questions, and its answers to those of others.

    Args:
        context: the engine's.
        pid: of this daemon.
        engine: knows the operations under way.
    """

    def __init__(self, context: Context, pid: int, engine: Informed) -> None:
        self._context = context
        self._pid = pid
        self._engine = engine
        self._rounds: Rounds[Answer] = Rounds(context.node, context.outside, self.handlers(), PATIENCE)

    def handlers(self) -> Handlers:
        """Returns the handlers of the nodes' questions and answers."""
        return {
            wire.Locate: self._asked_where,
            wire.WaitingRequest: self._asked_what,
            wire.Located: self._answered,
            wire.WaitingHere: self._answered,
        }

    def locate(
        self, ranks: Iterable[int], keys: Sequence[OpKey], then: Callable[[dict[int, wire.Located]], None]
    ) -> None:
        """Asks where ranks are, and for these operations on their nodes; tells by node.

        Of each node so many ranks are asked about as a message tells of.
        """
        wanted, keys = set(ranks), tuple(keys)[: wire.MAX_WAITING]
        questions = {}
        for node, local in enumerate(self._context.topology.ranks):
            if some := tuple(sorted(wanted.intersection(local)))[: wire.MAX_LOCATED]:
                questions[node] = lambda serial, some=some: wire.Locate(serial, some, keys)
        self._rounds.ask(questions, lambda told: then({n: a for n, a in told.items() if isinstance(a, wire.Located)}))

    def waiting(
        self,
        then: Callable[[dict[int, wire.WaitingHere]], None],
        key: OpKey | None = None,
        nodes: Sequence[int] = (),
        hurried: bool = False,
    ) -> None:
        """Asks all nodes for operations under way there; tells by node.

        Args:
            key: is asked about, and nothing else, until all `nodes` have answered.
            hurried: tells the answers so far when the patience is over, also of a key.
        """
        self._rounds.ask(
            dict.fromkeys(
                nodes if key else [self._context.node, *self._context.other_nodes()],
                lambda serial: wire.WaitingRequest(serial, key),
            ),
            lambda told: then({n: a for n, a in told.items() if isinstance(a, wire.WaitingHere)}),
            hurried=hurried or key is None,
        )

    def survey(self, everyone: bool, then: Callable[[Survey], None]) -> None:
        """Asks all nodes for operations under way, and then for the places of awaited ranks.

        Args:
            everyone: also where all other ranks are.
        """
        topology = self._context.topology

        def waiting(told: Mapping[int, wire.WaitingHere]) -> None:
            entries = [(node, answer.waiting) for node, answer in told.items()]
            stalls = merge(entries, topology)
            missing = {rank for stall in stalls for rank in stall.missing}
            wanted = set(range(topology.size)) if everyone else missing
            keys = [stall.key for stall in stalls if stall.kind == "operation" and stall.missing]

            def located(where: Mapping[int, wire.Located]) -> None:
                asked = {topology.node_of(rank) for rank in wanted}
                silent = ({self._context.node, *self._context.other_nodes()} - set(told)) | (asked - set(where))
                then(
                    Survey(
                        merge([*entries, *((node, answer.waiting) for node, answer in where.items())], topology),
                        {found.rank: found for answer in where.values() for found in answer.found},
                        {node: answer.pid for node, answer in told.items()},
                        tuple(sorted(silent)),
                        sum(answer.more for answer in told.values()),
                    )
                )

            self.locate(wanted, keys, located)

        self.waiting(waiting)

    def whereabouts(self, ranks: Iterable[int], then: Callable[[str], None]) -> None:
        """Tells where these ranks are, as lines to go after a sentence."""
        topology = self._context.topology
        wanted = set(ranks)

        def located(where: Mapping[int, wire.Located]) -> None:
            found = [one for answer in where.values() for one in answer.found]
            silent = sorted({topology.node_of(rank) for rank in wanted} - set(where))
            then(describe_ranks(found, silent, topology))

        self.locate(wanted, (), located)

    def _asked_where(self, node: int, question: wire.Locate) -> None:
        known = tuple(one for key in question.keys for one in self._engine.under_way(key))[: wire.MAX_WAITING]
        local = set(self._context.topology.ranks[self._context.node])
        ranks = [rank for rank in question.ranks if rank in local]
        self._context.outside.locate(
            ranks, lambda found: self._rounds.send(node, wire.Located(question.serial, tuple(found), known))
        )

    def _asked_what(self, node: int, question: wire.WaitingRequest) -> None:
        under_way = self._engine.under_way(question.key)
        told = tuple(under_way[: wire.MAX_WAITING])
        self._rounds.send(node, wire.WaitingHere(question.serial, self._pid, told, len(under_way) - len(told)))

    def _answered(self, node: int, answer: Answer) -> None:
        if self._may_tell(node, answer):
            self._rounds.answered(node, answer.serial, answer)

    def _may_tell(self, node: int, answer: Answer) -> bool:
        """Tells whether an answer is about ranks of its sender, as far as that can be said."""
        local = set(self._context.topology.ranks[node])
        found = answer.found if isinstance(answer, wire.Located) else ()
        return local.issuperset(one.rank for one in found) and all(
            local.issuperset(waiting.submitted) for waiting in answer.waiting
        )
