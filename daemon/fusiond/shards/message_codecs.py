"""The codecs of the messages of each bucket."""

from __future__ import annotations

from fusion_rt import codecs, wire
from fusion_rt.codecs import BucketCodec, layout_of
from fusion_rt.codecs.dense import Dense
from fusiond.buckets.plans import PlanState


class MessageCodecs:
    """Opens the codecs of messages, and keeps those that all share."""

    def __init__(self) -> None:
        self._decoders: dict[tuple[int, int], BucketCodec] = {}  # by plan and bucket
        self._plain: dict[tuple[int, int], BucketCodec] = {}

    def open(self, state: PlanState, bucket: wire.Bucket, remembers: bool = True) -> BucketCodec:
        """Opens a bucket's codec, for one user.

        Args:
            remembers: adds what it has not sent to what it sends next; else that is lost.
        """
        codec = _codec(state)
        return codecs.open_bucket(codec if remembers else codec.without_memory(), layout_of(bucket))

    def decoder(self, state: PlanState, bucket: wire.Bucket) -> BucketCodec:
        """Returns the codec that decodes messages of a bucket. Several threads may use it at the same time."""
        key = state.plan.id, bucket.index
        decoder = self._decoders.get(key)
        if decoder is None:
            decoder = self._decoders[key] = self.open(state, bucket, remembers=False)
        return decoder

    def plain(self, state: PlanState, bucket: wire.Bucket) -> BucketCodec:
        """Returns the codec of messages that have a bucket's values as they are. Several threads may use it."""
        key = state.plan.id, bucket.index
        plain = self._plain.get(key)
        if plain is None:
            plain = self._plain[key] = Dense().open(layout_of(bucket))
        return plain

    def encoder(self, state: PlanState, bucket: wire.Bucket) -> BucketCodec:
        """Returns a codec that encodes one message of a home. One that selects has scratch memory of its own even
        if what it leaves out is lost."""
        if _codec(state).stateful:
            return self.open(state, bucket, remembers=False)
        return self.decoder(state, bucket)

    def drop(self, plan: int) -> None:
        """The plan is no longer active."""
        self._decoders = {key: decoder for key, decoder in self._decoders.items() if key[0] != plan}
        self._plain = {key: plain for key, plain in self._plain.items() if key[0] != plan}


def _codec(state: PlanState) -> codecs.Codec:
    return codecs.parse(state.plan.reduction.codec)
