"""A whole simulated job: nodes, links, and workers with their programs."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from fusion_rt import algorithms as chosen
from fusion_rt import wire
from fusion_trace.simulate.daemons import Host, SimulationError
from fusion_trace.simulate.exchanges import Alike, Exchanges
from fusion_trace.simulate.homes import Homes
from fusion_trace.simulate.model import Bucket, Cluster
from fusion_trace.simulate.network import Message, Network, Traffic
from fusion_trace.simulate.programs import Program, Worker
from fusion_trace.simulate.simulator import Processor, Simulator
from fusiond.control.planning import place_homes


@dataclass(frozen=True)
class Outcome:
    """The result of a simulated job.

    Attributes:
        ends: of each rank, when each of its steps ended (s).
        waited: of each rank, for how long each step was kept waiting (s).
        traffic: of each node.
        worked: of each node, processor time of its daemon (s).
        events: that it took to find out.
    """

    ends: tuple[tuple[float, ...], ...]
    waited: tuple[tuple[float, ...], ...]
    traffic: tuple[Traffic, ...]
    worked: tuple[float, ...]
    events: int

    def step_seconds(self, skip: int = 1) -> float:
        """Returns the mean time of a step, over steps after the first `skip` and all ranks."""
        return statistics.fmean(
            (ends[-1] - (ends[skip - 1] if skip else 0.0)) / (len(ends) - skip) for ends in self.ends
        )

    def waited_seconds(self, skip: int = 1) -> float:
        """Returns the mean time for which a step was kept waiting: its exposed communication."""
        return statistics.fmean(seconds for waited in self.waited for seconds in waited[skip:])


class Job:
    """A job that has not begun.

    Args:
        programs: of each rank, in order of nodes.
        buckets: of the plan.
        algorithm, codec: their texts.
        places: nodes of the buckets' homes, for algorithms with shards; by default balanced by bytes.
        arrivals: called with each message that has arrived.
        alike: all nodes do the same at the same time, so that only the first is simulated, and stands for all; for
            all-reduces. Programs are then those of its workers.

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
        arrivals: Callable[[Message], None] | None = None,
        alike: bool = False,
    ) -> None:
        nodes = 1 if alike else cluster.nodes
        if len(programs) != nodes * cluster.workers:
            raise ValueError(f"{len(programs)} programs are not one for each of {nodes * cluster.workers} ranks")
        self.simulator = Simulator()
        self.network = Network(self.simulator, cluster.links[:nodes], arrivals)
        shared = [Processor(self.simulator, count) for count in cluster.processors]
        processors: list[Processor | None] = [shared[machine] for machine in cluster.machines]
        processors = processors or [None] * nodes
        self.hosts = [Host(self.simulator, self.network, cluster, n, processors[n]) for n in range(nodes)]
        for host in self.hosts:
            host.others = [host] * cluster.nodes if alike else self.hosts
        spec = chosen.parse(algorithm)
        daemons: list[Any] = []
        for host in self.hosts:
            if not spec.at_homes:
                daemons.append((Alike if alike else Exchanges)(host, daemons, buckets, codec, self._answered))
            else:
                homes = places or place(buckets, cluster.nodes)
                daemons.append(Homes(host, daemons, buckets, codec, spec, homes, self._answered))
        self._daemons = daemons
        self.workers = [
            Worker(self.simulator, rank, program, daemons[node].submit, self._ended, processors[node])
            for rank, program in enumerate(programs)
            for node in (cluster.node_of(rank),)
        ]

    def _answered(self, rank: int, bucket: int) -> None:
        self.workers[rank].answered(bucket)

    def _ended(self, rank: int) -> None:
        for daemon in self._daemons:
            daemon.left(rank)

    def run(self) -> Outcome:
        """Runs until nothing is left to happen.

        Raises:
            SimulationError: workers wait for something that never comes.
        """
        for worker in self.workers:
            self.simulator.at(0.0, worker.begin)
        self.simulator.run()
        stuck = [worker.rank for worker in self.workers if not worker.done]
        if stuck:
            raise SimulationError(
                f"{len(stuck)} of {len(self.workers)} ranks wait forever, the first of them rank {stuck[0]}"
            )
        return Outcome(
            tuple(tuple(worker.ends) for worker in self.workers),
            tuple(tuple(worker.waited) for worker in self.workers),
            tuple(self.network.traffic),
            tuple(host.worked for host in self.hosts),
            self.simulator.events,
        )


def place(buckets: Sequence[Bucket], nodes: int) -> tuple[int, ...]:
    """Returns a node for the home of each bucket, as the daemon's plans have it."""
    planned = [wire.Bucket(index, "float32", bucket.elements, 0, ()) for index, bucket in enumerate(buckets)]
    return place_homes(planned, dict.fromkeys(range(nodes), 1.0))
