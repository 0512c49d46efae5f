"""The steps that an algorithm yields (`Step`), turned into calls that the event loop makes.

The thread that works on the home does this: it encodes values, or copies them to where they belong.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import numpy as np
from msgspec.structs import replace

from fusion_rt import wire
from fusion_rt.codecs.base import Array, BucketCodec
from fusiond.algorithms.home import Answer, Passed, Refuse, Send, Step, Tell, Wake
from fusiond.core.contribution import Contribution
from fusiond.operations.thread_work import Act
from fusiond.shards.hosted_home import HostedHome
from fusiond.shards.messages import MessageCodecs, copied, pack, unpack
from fusiond.shards.node import Address, ThisNode
from fusiond.shards.push_pull import PushPullClients


class Actions:
    """Carries out the steps of all homes on one node.

    Args:
        here: this node.
        codecs: the codecs.
        clients: get the answers to what was posted here.
        arrived: takes what is for another home on this node.
        wake: has a home looked at again, at that time (s).
        passed: is told of a clock that is over, which the rank of a home has passed.
    """

    def __init__(
        self,
        here: ThisNode,
        codecs: MessageCodecs,
        clients: PushPullClients,
        arrived: Callable[[Address, Contribution], None],
        wake: Callable[[HostedHome, float], None],
        passed: Callable[[HostedHome, int], None],
    ) -> None:
        self._here = here
        self._codecs = codecs
        self._clients = clients
        self._arrived = arrived
        self._calls: dict[type[Step], Callable[[HostedHome, Any], Sequence[Act]]] = {
            Answer: self._answer,
            Send: self._send,
            Refuse: lambda hosted, step: [partial(self._refuse, hosted, step)],
            Passed: lambda hosted, step: [partial(passed, hosted, step.part.clock)],
            Tell: self._tell,
            Wake: lambda hosted, step: [partial(wake, hosted, step.at)],
        }

    def prepared(self, hosted: HostedHome, steps: Iterable[Step]) -> list[Act]:
        """Returns the calls that the event loop makes for these steps. Values are then encoded, or in place."""
        return [act for step in steps for act in self._calls[type(step)](hosted, step)]

    def _answer(self, hosted: HostedHome, step: Answer) -> list[Act]:
        rank, node = hosted.ranks[step.part.rank], hosted.nodes[step.part.rank]
        notes = hosted.notes.pop(step.part.rank, ())
        message = wire.Piece(
            self._here.epoch, hosted.plan.plan.id, hosted.bucket.index, "answer", hosted.home.rank, rank,
            step.part.clock, hosted.home.version, 0, 0, weight=step.weight,
        )  # fmt: skip
        if node == self._here.node:
            place = self._clients.place(message.plan, message.bucket, rank)
            if place is not None:  # else it is over, while this thread is here
                np.copyto(place, step.values)
            return [partial(self._clients.answered, message, (int(step.added), *notes))]
        added, coded, payload = self._encoded(hosted, step)
        message = replace(message, notes=(added, coded, *notes))
        return [partial(self._here.send, node, message, payload)]

    def _encoded(self, hosted: HostedHome, step: Answer) -> tuple[int, int, memoryview]:
        """Encodes an answer to another node. Returns whether it is added there, whether it is coded, and its bytes."""
        if self._codecs.decoder(hosted.plan, hosted.bucket).lossless:
            return int(step.added), 0, hosted.copy_of(step.values)
        return self._difference(hosted, step)

    def _difference(self, hosted: HostedHome, step: Answer) -> tuple[int, int, memoryview]:
        """Encodes an answer by a lossy codec: as the difference to what that node has been told, so that what the codec
        leaves out comes later (dual-way sparsification: Yan et al., ICPP 2020). Returns the same as `_encoded`."""
        rank = step.part.rank
        codec = self._encoder(hosted, rank, step.added)
        if step.added:
            return 1, 1, self._packed(hosted, codec, step.values)
        told = hosted.told.get(rank)
        if told is None or step.part.kind == "ask":  # who asks for what the home has gets every bit of it
            told = hosted.told[rank] = step.values.copy()  # another thread may be at work on the home
            return 0, 0, copied(told)
        payload = self._packed(hosted, codec, step.values - told)
        told += unpack(codec, payload)
        hosted.algorithm.told(hosted.home, step.part, told)
        return 1, 1, payload

    def _encoder(self, hosted: HostedHome, position: int, added: bool = False) -> BucketCodec:
        """Returns the codec of what a home sends to a rank, or (-1) to its neighbours.

        It adds what it has not sent to the next only where that is `added`: a difference to what the rank was told has
        it already. All ranks' answers are rounded by the same draws, so that those who are told the same stay alike.
        """
        codec = hosted.encoders.get((position, added))
        if codec is None:
            codec = self._codecs.open(hosted.plan, hosted.bucket, hosted.home.ranks, remembers=added)
            hosted.encoders[position, added] = codec
        return codec

    def heard(self, hosted: HostedHome, part: Contribution) -> list[Act]:
        """A worker has said what it has. Returns the calls that tell it that this is known."""
        rank, node = hosted.ranks[part.rank], hosted.nodes[part.rank]
        message = wire.Piece(
            self._here.epoch, hosted.plan.plan.id, hosted.bucket.index, "answer", hosted.home.rank, rank, part.clock,
            hosted.home.version, 0, notes=(0, 0),
        )  # fmt: skip
        hosted.algorithm.told(hosted.home, part, part.values)
        if node == self._here.node:
            return [partial(self._clients.answered, message, ())]
        if not self._codecs.decoder(hosted.plan, hosted.bucket).lossless:
            hosted.told[part.rank] = part.values
        return [partial(self._here.send, node, message, memoryview(b""))]

    def _packed(self, hosted: HostedHome, codec: BucketCodec, values: Array) -> memoryview:
        """Returns all values of a bucket as bytes of their own, which the statistics count."""
        payload = pack(codec, values)
        hosted.plan.note_message(codec, len(payload))
        return payload

    def _send(self, hosted: HostedHome, step: Send) -> list[Act]:
        here, ranks = self._here, hosted.ranks
        message = wire.Piece(
            here.epoch, hosted.plan.plan.id, hosted.bucket.index, step.kind, 0, ranks[hosted.home.rank], step.clock,
            hosted.home.version, 0, 0, weight=step.weight,
        )  # fmt: skip
        nodes = {position: hosted.nodes[position] for position in step.ranks}
        acts: list[Act] = []
        local = [position for position, node in nodes.items() if node == here.node]
        if local:
            values = step.values.copy()  # what was posted may be overwritten before its neighbours have read it
            for position in local:
                part = Contribution(
                    hosted.home.rank, values, kind=step.kind, clock=step.clock, version=hosted.home.version,
                    weight=step.weight, arrived=here.outside.clock(),
                )  # fmt: skip
                acts.append(partial(self._arrived, (hosted.plan.plan.id, hosted.bucket.index, position), part))
        if len(local) < len(nodes):
            payload = step.payload
            if payload is None:
                payload = self._packed(hosted, self._encoder(hosted, -1), step.values)
            elif hosted.home.codec is not None and len(payload):
                hosted.plan.note_message(hosted.home.codec, len(payload))
            for position, node in nodes.items():
                if node != here.node:
                    acts.append(partial(here.send, node, replace(message, home=position), memoryview(payload)))
        return acts

    def _tell(self, hosted: HostedHome, step: Tell) -> list[Act]:
        here, plan = self._here, hosted.plan.plan
        acts: list[Act] = []
        for bucket, node in enumerate(plan.homes):
            if bucket == hosted.bucket.index:
                continue
            if node == here.node:
                now = here.outside.clock()
                part = Contribution(0, step.numbers, kind="told", clock=step.clock, arrived=now)
                acts.append(partial(self._arrived, (plan.id, bucket, -1), part))
            else:
                message = wire.Piece(here.epoch, plan.id, bucket, "told", -1, hosted.ranks[0], step.clock, 0, 0, 0)
                acts.append(partial(here.send, node, message, memoryview(step.numbers.tobytes())))
        return acts

    def _refuse(self, hosted: HostedHome, step: Refuse) -> None:
        rank, node = hosted.ranks[step.part.rank], hosted.nodes[step.part.rank]
        message = wire.Piece(
            self._here.epoch, hosted.plan.plan.id, hosted.bucket.index, "refused", hosted.home.rank, rank,
            step.part.clock, 0, 0, 0,
        )  # fmt: skip
        why = f"bucket {hosted.bucket.index} of {hosted.plan.plan.group!r}: {step.why}"
        if node == self._here.node:
            self._clients.refused(message, why)
        else:
            self._here.send(node, message, memoryview(why.encode()))
