"""The decision of `--auto`, and its reason: a pure function of measurements.

A step is predicted for each candidate by a small model. Gradients arrive evenly over the backward pass, two thirds of
the time that a step computes; a bucket leaves when it is full and the one before has left; what is left when the
backward pass ends is waited for. With updates one step late, buckets leave at the end of a step and have the next one
to travel in. With local steps they leave once in so many steps, while nothing is computed. A bucket costs a fixed
overhead, its codec's work, and the bytes of `core.cost`; latencies, and the way of the last chunk through all nodes,
count once.

Where a candidate has been tried, what it took counts. Candidates with the same mathematics make up a class. Of the
classes whose best one takes about as long as the fastest of all, the one is chosen that changes least; and in it the
fastest.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from fusion_rt import algorithms
from fusion_rt.choice.candidates import Mathematics, Setting
from fusion_rt.choice.codec_costs import ALLREDUCE, CodecCost, cost_of
from fusion_rt.choice.step_model import BucketCost, Network, Parcel, exchange_cost, in_turn
from fusion_rt.core.cost import CostModel

ALIKE = 1.05
"""By how much the prediction of a class may be worse than that of another, which changes more, and still be as good."""
SAME = 1.01
"""By how much that of the default may be worse than that of another one in its class."""
_REDUCE = 0.4e-9  # seconds a byte of local gradients, of each rank of a node
_BACKWARD = 2 / 3
_ALLREDUCE = algorithms.parse(ALLREDUCE)
_TAIL = 8  # the last bucket has at most the threshold divided by this, or one tensor, as in planning


@dataclass(frozen=True)
class Conditions:
    """The measured conditions under which a step is predicted.

    Attributes:
        nodes: that take part.
        ranks: on the node with most.
        latency, seconds_per_byte: of the worst link (s).
        computing: seconds of a step that nothing is waited for in.
        tensors: bytes of each gradient, in the order in which they arrive.
        largest_chunk: bytes of the largest message.
        overheads: seconds that a bucket costs beyond the model, by the `kind` of a setting.
        ring: the slowest link of a ring, and its mean latency, where nodes are visited in a measured order, which
            avoids the worst link; None: that is in every ring.
    """

    nodes: int
    ranks: int
    latency: float
    seconds_per_byte: float
    computing: float
    tensors: tuple[int, ...]
    largest_chunk: int
    overheads: Mapping[Mathematics, float] = field(default_factory=dict)
    ring: CostModel | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of all gradients."""
        return sum(self.tensors)

    @property
    def network(self) -> Network:
        """The nodes and their links."""
        cost = CostModel(self.latency, self.seconds_per_byte)
        return Network(self.nodes, self.ranks, cost, self.largest_chunk, self.ring)


@dataclass(frozen=True)
class Prediction:
    """The predicted cost of a setting.

    Attributes:
        step: seconds that it takes.
        exposed: those of it that are waited.
        reducing: those for which gradients are under way, if nothing else keeps them.
        sent: bytes that a node sends in it.
        buckets: into which gradients are cut.
        tried: that is a measurement.
    """

    setting: Setting
    step: float
    exposed: float
    reducing: float
    sent: float
    buckets: int
    tried: bool = False


@dataclass(frozen=True)
class Decision:
    """The chosen setting, the predictions of all, and the reason, in one paragraph."""

    setting: Setting
    predictions: tuple[Prediction, ...]
    why: str


def predict(conditions: Conditions, setting: Setting) -> Prediction:
    """Predicts the cost of a setting."""
    computing = conditions.computing
    codec = cost_of(setting.codec)
    buckets = _buckets(conditions.tensors, setting.threshold)
    costs = [_bucket_cost(conditions, setting, codec, bucket, len(buckets)) for bucket in buckets]
    reducing = in_turn([0.0] * len(costs), costs)
    sent = sum(cost.sent for cost in costs) / setting.period
    if setting.algorithm != ALLREDUCE:
        step = computing + reducing / setting.period
    elif setting.late:
        step = max(computing, reducing)
    else:
        filled = np.cumsum([sum(bucket) for bucket in buckets]) / max(1, conditions.nbytes)
        full = computing * (1 - _BACKWARD + _BACKWARD * filled)
        step = max(computing, in_turn(full.tolist(), costs))
    return Prediction(setting, step, step - computing, reducing, sent, len(buckets))


def decide(
    conditions: Conditions,
    settings: Sequence[Setting],
    level: str,
    tried: Mapping[Setting, float] | None = None,
    only_tried: bool = False,
) -> Decision:
    """Chooses, and says why.

    Args:
        settings: as `candidates` orders them, so that the first is the default.
        tried: seconds of a step of those that have been.
        only_tried: no other one is to be chosen.
    """
    tried = tried or {}
    predictions = tuple(_expected(conditions, setting, tried) for setting in settings)
    eligible = [one for one in predictions if one.tried or not only_tried]
    best = _best_of_classes(eligible)
    fastest = min(one.step for one in best.values())
    chosen = next(one for one in best.values() if one.step <= ALIKE * fastest)
    default = predictions[0]
    if default in eligible and chosen.setting.kind == default.setting.kind and default.step <= SAME * chosen.step:
        chosen = default
    return Decision(chosen.setting, predictions, _why(conditions, predictions, chosen, level))


def _expected(conditions: Conditions, setting: Setting, tried: Mapping[Setting, float]) -> Prediction:
    """The cost of a setting as it was measured, or else is predicted."""
    found = predict(conditions, setting)
    if setting not in tried:
        return found
    return replace(found, step=tried[setting], exposed=tried[setting] - conditions.computing, tried=True)


def _best_of_classes(predictions: Sequence[Prediction]) -> dict[Mathematics, Prediction]:
    """The fastest of each class, in the order of the classes."""
    best: dict[Mathematics, Prediction] = {}
    for one in predictions:
        if one.setting.kind not in best or one.step < best[one.setting.kind].step:
            best[one.setting.kind] = one
    return best


def _buckets(tensors: Sequence[int], threshold: int) -> list[list[int]]:
    """Bytes of the tensors of each bucket, filled as planning does, with a small one at the end."""
    tail = 0
    while tail < len(tensors) and (not tail or sum(tensors[-tail - 1 :]) <= threshold // _TAIL):
        tail += 1
    found: list[list[int]] = []
    filled = 0
    for nbytes in tensors[: len(tensors) - tail]:
        if found and filled + nbytes <= threshold:
            found[-1].append(nbytes)
            filled += nbytes
        else:
            found.append([nbytes])
            filled = nbytes
    return [*found, list(tensors[len(tensors) - tail :])] if tail else found


def _bucket_cost(
    conditions: Conditions, setting: Setting, codec: CodecCost, tensors: Sequence[int], buckets: int
) -> BucketCost:
    """Returns the cost of a bucket with these tensors (bytes), one of so many."""
    nbytes = sum(tensors)
    work = codec.bucket + conditions.overheads.get(setting.kind, 0.0) + _REDUCE * nbytes * conditions.ranks
    if conditions.nodes > 1:
        work += codec.work * nbytes
    parcel = Parcel(nbytes, sum(map(codec.travels, tensors)), codec.exchange, setting.exchange)
    cost = exchange_cost(conditions.network, _ALLREDUCE, parcel, buckets)
    # Nothing that a running job has measured says how far work and link overlap: the link waits for the work here.
    return cost._replace(link=work + cost.link)


def _why(conditions: Conditions, predictions: Sequence[Prediction], chosen: Prediction, level: str) -> str:
    links = ""
    if conditions.nodes > 1:
        links = (
            f", whose worst link carries {rate_text(conditions.seconds_per_byte)} with a latency of "
            f"{conditions.latency * 1e3:.3g} ms"
        )
        if conditions.ring is not None and conditions.ring.seconds_per_byte < conditions.seconds_per_byte:
            links += f" and is left out of a ring, whose links carry {rate_text(conditions.ring.seconds_per_byte)}"
    told = "; ".join(
        f"{kind} {one.step * 1e3:.4g} ms ({'measured, ' if one.tried else ''}{one.sent / 1e6:.3g} MB sent)"
        for kind, one in _best_of_classes(predictions).items()
    )
    default = predictions[0]
    if chosen.setting == default.setting:
        reason = "which is the default, since nothing else is worth a change"
    else:
        how = "measured" if chosen.tried else "predicted"
        reason = f"{how} to take {chosen.step / default.step:.0%} of the default's {default.step * 1e3:.4g} ms"
        if min(one.step for one in predictions) < chosen.step:
            reason += " (choices that are faster by less than 5 % change more)"
    nodes = "is 1 node" if conditions.nodes == 1 else f"are {conditions.nodes} nodes"
    return (
        f"--auto={level} chose {chosen.setting}, {reason}: there {nodes}{links}, and a step computes for "
        f"{conditions.computing * 1e3:.4g} ms and has {conditions.nbytes / 1e6:.4g} MB of gradients; predicted for a "
        f"step, with the best buckets for each: {told}."
    )


def rate_text(seconds_per_byte: float) -> str:
    """Returns the rate of a link for people."""
    rate = 8 / seconds_per_byte  # bit/s
    if rate > 100e9:  # within a host, a message is there before the measurement has looked
        return "over 100 Gbit/s"
    return f"{rate / 1e9:.3g} Gbit/s" if rate >= 10e9 else f"{rate / 1e6:.4g} Mbit/s"
