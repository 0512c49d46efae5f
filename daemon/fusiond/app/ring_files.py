"""The rings of a job's nodes, for tools: each daemon reads those of its own node, and asks the others for theirs.

A daemon reads nothing but the rings that its own workers and it itself have in this job's directory, whoever asks: a
peer says a file's name, which has to be one of these, and how much of it, which is bounded.
"""

from __future__ import annotations

import base64
import os
import stat
from collections.abc import Callable
from typing import Any

from fusion_rt import wire
from fusion_rt.core.topology import Topology
from fusion_rt.tracing import files
from fusiond.core.dispatch import Handlers
from fusiond.core.effects import Correspondence
from fusiond.core.queries import Rounds

PATIENCE = 5.0  # seconds for an answer
_Answer = wire.Rings | wire.RingPiece


class RingFiles:
    """One daemon's access to the rings of all nodes.

    Args:
        directory: of this job's rings on this host.
        topology, node: the ranks of each node, and this node.
        outside: sends messages to other nodes.
    """

    def __init__(self, directory: str, topology: Topology, node: int, outside: Correspondence) -> None:
        self._directory = directory
        self._topology = topology
        self._node = node
        self._rounds: Rounds[_Answer] = Rounds(node, outside, self.handlers(), PATIENCE)

    def handlers(self) -> Handlers:
        """Returns the handlers of the nodes' questions and answers."""
        return {
            wire.RingsRequest: self._rings_asked,
            wire.RingPieceRequest: self._piece_asked,
            wire.Rings: self._answered,
            wire.RingPiece: self._answered,
        }

    def tell(self, without: frozenset[int], then: Callable[[dict[str, Any]], None]) -> None:
        """Calls `then` with the rings of all nodes but `without`, as JSON types; `rings` is None of a silent node."""
        nodes = [node for node in range(len(self._topology.hosts)) if node not in without]

        def told(answers: dict[int, _Answer]) -> None:
            rings = {node: answer.files for node, answer in answers.items() if isinstance(answer, wire.Rings)}
            entries = [
                {
                    "node": node,
                    "host": host,
                    "rings": [{"name": file.name, "nbytes": file.nbytes} for file in rings[node]]
                    if node in rings
                    else None,
                }
                for node, host in enumerate(self._topology.hosts)
            ]
            then({"nodes": entries})

        self._rounds.ask(dict.fromkeys(nodes, wire.RingsRequest), told)

    def read(self, request: wire.JobRingRequest, then: Callable[[dict[str, Any]], None]) -> None:
        """Calls `then` with a piece of a ring of any node, as JSON types: `data` in base64, or `why_not`."""
        if request.node >= len(self._topology.hosts):
            then({"data": "", "why_not": f"there is no node {request.node} in this job"})
            return

        def told(answers: dict[int, _Answer]) -> None:
            answer = answers.get(request.node)
            if isinstance(answer, wire.RingPiece):
                then({"data": base64.b64encode(answer.data).decode(), "why_not": answer.why_not})
            else:
                host = self._topology.hosts[request.node]
                then({"data": "", "why_not": f"node {request.node} (host {host}) does not answer"})

        piece = request.name, request.offset, request.nbytes
        self._rounds.ask({request.node: lambda serial: wire.RingPieceRequest(serial, *piece)}, told)

    def _rings_asked(self, node: int, request: wire.RingsRequest) -> None:
        self._rounds.send(node, wire.Rings(request.serial, self._here()))

    def _piece_asked(self, node: int, request: wire.RingPieceRequest) -> None:
        self._rounds.send(node, self._piece(request))

    def _answered(self, node: int, answer: _Answer) -> None:
        self._rounds.answered(node, answer.serial, answer)

    def _names(self) -> list[str]:
        """Returns the names of the rings that this node may have."""
        ranks = self._topology.ranks[self._node]
        return [files.ring_name("node", self._node), *(files.ring_name("rank", rank) for rank in ranks)]

    def _here(self) -> tuple[wire.RingFile, ...]:
        found = []
        for name in self._names():
            try:
                status = os.lstat(os.path.join(self._directory, name))
            except OSError:  # nothing is recorded there
                continue
            if stat.S_ISREG(status.st_mode):
                found.append(wire.RingFile(name, status.st_size))
        return tuple(found)

    def _piece(self, asked: wire.RingPieceRequest) -> wire.RingPiece:
        if asked.name not in self._names():
            return wire.RingPiece(asked.serial, b"", f"node {self._node} has no such ring")
        try:
            fd = os.open(
                os.path.join(self._directory, asked.name), os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
            )
            try:
                if not stat.S_ISREG(os.fstat(fd).st_mode):
                    return wire.RingPiece(asked.serial, b"", "it is no file")
                return wire.RingPiece(asked.serial, os.pread(fd, asked.nbytes, asked.offset))
            finally:
                os.close(fd)
        except OSError as error:
            return wire.RingPiece(asked.serial, b"", f"it cannot be read: {error.strerror}")
