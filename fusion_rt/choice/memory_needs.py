"""Memory that a job needs on each host, in units of the model, by the equations of its algorithm and codec.

No I/O. Codecs and algorithms have the numbers (`Codec.memory`, `Algorithm.worker_copies`, `home_copies`). This module
adds them up, for docs/memory.md, for `--advise`, and for the tests that hold jobs to it.
"""

from __future__ import annotations

from dataclasses import dataclass

from fusion_rt.algorithms import Algorithm
from fusion_rt.codecs import Codec
from fusion_rt.units import MIB

SCRATCH_NBYTES = 256 * MIB
"""At most, for the encoded and received data of buckets under way in a daemon, in all-reduces or to and from homes; it
does not grow with their number."""

DAEMON_NBYTES = 150 * MIB
"""At most, for a daemon itself, whatever it does."""


WORKER_NBYTES = 256 * MIB
"""At most, for a worker besides: gradients of a few tensors under way, and freed memory that the C library keeps."""


@dataclass(frozen=True)
class Needs:
    """Memory by process, in units of the model: 4 bytes for each parameter, in float32.

    Attributes:
        worker: of one worker: its parameters, gradients, the algorithm's memory beside them, and its arena, which the
            daemon has mapped, too. Without the state of the script's optimizer, and activations.
        daemon: of one daemon, the memory of codecs and homes, with contributions that wait there; besides
            `SCRATCH_NBYTES` and `DAEMON_NBYTES`.
    """

    worker: float
    daemon: float

    def host_nbytes(self, model: float, workers: int) -> float:
        """Returns the bytes that a host needs at most, with a model of so many bytes, and so many workers."""
        own = WORKER_NBYTES * workers + SCRATCH_NBYTES + DAEMON_NBYTES
        return model * (self.worker * workers + self.daemon) + own


def needs(algorithm: Algorithm, codec: Codec, nodes: int, workers: int = 1, optimizer: float = 0.0) -> Needs:
    """Returns the memory that a job needs.

    Args:
        nodes: how many hosts it has.
        workers: on each of them.
        optimizer: copies of the model that the state of the script's optimizer takes (1 of SGD with momentum, 2 of
            Adam), which homes keep where they take its steps.
    """
    ranks = nodes * workers
    gradients = 1.0 if algorithm.sums_gradients else 2.0  # else those in the arena are a copy, or something else
    worker = 1.0 + gradients + algorithm.worker_copies(codec)
    return Needs(worker, _daemon(algorithm, codec, nodes, workers, ranks, optimizer))


def _daemon(algorithm: Algorithm, codec: Codec, nodes: int, workers: int, ranks: int, optimizer: float) -> float:
    if nodes == 1 and not algorithm.at_homes:
        return 0.0
    if not algorithm.at_homes:
        return codec.memory()
    state = optimizer if algorithm.steps_at_home else 0.0
    copies = algorithm.home_copies(ranks) + state
    if algorithm.at_shards:  # each node has its share of them; and of ranks elsewhere a contribution, and their values
        elsewhere = (ranks - workers) * (1.0 if codec.lossless else 2.0)
        return (copies + elsewhere) / nodes + workers * codec.memory() * (nodes - 1) / nodes
    return workers * (copies + 2.0)  # of two neighbours that are ahead, the contributions wait there
