"""A whole simulated job: nodes, links, workers with their programs, and what came of it."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from fusion_rt import algorithms as chosen
from fusion_trace.simulate.daemons import Host
from fusion_trace.simulate.exchanges import Exchanges
from fusion_trace.simulate.homes import Homes, SimulationError
from fusion_trace.simulate.model import Bucket, Cluster
from fusion_trace.simulate.network import Message, Network, Traffic
from fusion_trace.simulate.programs import Program, Worker
from fusion_trace.simulate.simulator import Processor, Simulator


@dataclass(frozen=True)
class Outcome:
    """What came of a simulated job.

    Attributes:
        ends: of each rank, when each of its steps ended (s).
        waited: of each rank, for how long each step was kept waiting (s).
        traffic: of each node.
        events: that it took to find out.
    """

    ends: tuple[tuple[float, ...], ...]
    waited: tuple[tuple[float, ...], ...]
    traffic: tuple[Traffic, ...]
    events: int

    def step_seconds(self, skip: int = 1) -> float:
        """The mean time of a step, over steps after the first `skip` and all ranks."""
        return statistics.fmean(
            (ends[-1] - (ends[skip - 1] if skip else 0.0)) / (len(ends) - skip) for ends in self.ends
        )

    def waited_seconds(self, skip: int = 1) -> float:
        """The mean time for which a step was kept waiting: its exposed communication."""
        return statistics.fmean(seconds for waited in self.waited for seconds in waited[skip:])


class Job:
    """A job that has not begun.

    Args:
        programs: of each rank, in order of nodes.
        buckets: of the plan.
        algorithm, codec: their texts.
        places: nodes of the buckets' homes, for algorithms with shards; by default balanced by bytes.
        watch: called with (source, target, chunk, bytes of payload) of each chunk of an all-reduce.
        arrivals: called with each message that has arrived.

    Raises:
        AlgorithmError: so many ranks cannot do this.
        ValueError: there is not one program for each rank.
    """

    def __init__(
        self,
        cluster: Cluster,
        programs: Sequence[Program],
        buckets: Sequence[Bucket],
        algorithm: str = "allreduce",
        codec: str = "dense",
        places: Sequence[int] = (),
        watch: Callable[[int, int, Any, int], None] | None = None,
        arrivals: Callable[[Message], None] | None = None,
    ) -> None:
        if len(programs) != cluster.ranks:
            raise ValueError(f"{len(programs)} programs are not one for each of {cluster.ranks} ranks")
        self.simulator = Simulator()
        self.network = Network(self.simulator, cluster.links, arrivals)
        processor = None if cluster.cores is None else Processor(self.simulator, cluster.cores)
        self.hosts = [Host(self.simulator, self.network, cluster, n, processor) for n in range(cluster.nodes)]
        for host in self.hosts:
            host.others = self.hosts
        spec = chosen.parse(algorithm)
        daemons: list[Any] = []
        for host in self.hosts:
            if spec.place is chosen.Place.NOWHERE:
                daemons.append(Exchanges(host, daemons, buckets, codec, self._answered, watch))
            else:
                homes = places or place(buckets, cluster.nodes)
                daemons.append(Homes(host, daemons, buckets, codec, spec, homes, self._answered))
        self._daemons = daemons
        self.workers = [
            Worker(self.simulator, rank, program, daemons[cluster.node_of(rank)].submit, self._ended)
            for rank, program in enumerate(programs)
        ]

    def _answered(self, rank: int, bucket: int) -> None:
        self.workers[rank].answered(bucket)

    def _ended(self, rank: int) -> None:
        for daemon in self._daemons:
            if isinstance(daemon, Homes):
                daemon.left(rank)

    def run(self) -> Outcome:
        """Goes on until nothing is left to happen.

        Raises:
            SimulationError: workers wait for something that never comes.
        """
        for worker in self.workers:
            self.simulator.at(0.0, worker.begin)
        self.simulator.run()
        stuck = [worker.rank for worker in self.workers if not worker.done]
        if stuck:
            raise SimulationError(f"{len(stuck)} ranks wait for ever, the first of them rank {stuck[0]}")
        return Outcome(
            tuple(tuple(worker.ends) for worker in self.workers),
            tuple(tuple(worker.waited) for worker in self.workers),
            tuple(self.network.traffic),
            self.simulator.events,
        )


def place(buckets: Sequence[Bucket], nodes: int) -> tuple[int, ...]:
    """A node for the home of each bucket, as `fusiond.control.planning.place_homes` has it: the largest first, each to
    the node that has least."""
    load = [0] * nodes
    placed: dict[int, int] = {}
    for index in sorted(range(len(buckets)), key=lambda i: -buckets[i].nbytes):
        node = min(range(nodes), key=lambda n: load[n] + buckets[index].nbytes)
        placed[index] = node
        load[node] += buckets[index].nbytes
    return tuple(placed[index] for index in range(len(buckets)))
