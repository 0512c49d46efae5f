"""Advice before a job: how long a step would take between hosts whose links were measured, and which options to pass.

No I/O. Each way to exchange gradients is predicted by `prediction.predict`, as `--auto` does. Of the ways that wait for
the network for at most a fifth of a step, the advice is the one that changes training least; if all wait longer, the
fastest one.
"""

from __future__ import annotations

import math
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from fusion_rt import algorithms, codecs
from fusion_rt.choice.candidates import Setting
from fusion_rt.choice.codec_costs import ALLREDUCE, cost_of
from fusion_rt.choice.memory_needs import needs
from fusion_rt.choice.prediction import Conditions, Prediction, predict, rate_text
from fusion_rt.core.cost import CostModel
from fusion_rt.core.wording import counted

_STEP, _MODELS = 1.02, 90  # how much smaller each model is than the one before, and how many: down to a sixth
_LITTLE = 0.2  # share of a step that may be communication before the advice looks further
_TENSORS = 32  # gradients that a model is taken to have; each is the same share of the rest after those before it
_LARGEST = (
    0.75,
    0.16,
)  # shares of the largest one of small and of large models, which are of so many bytes: an MLP for
_SIZES = (0.3e6, 16e6)  # digits has 77 % in one matrix, ResNet-50 9 %. It counts, since codecs send small tensors whole


@dataclass(frozen=True)
class Way:
    """A way to exchange gradients, and the flags of `fusionrun` that ask for it."""

    codec: str
    algorithm: str
    flags: tuple[str, ...]

    @property
    def name(self) -> str:
        """The codec, or the algorithm with local steps."""
        return self.codec if self.algorithm == ALLREDUCE else self.algorithm


def _codec(codec: str) -> Way:
    return Way(codec, ALLREDUCE, () if codec == "dense" else ("--compression", codec))


def _local(algorithm: algorithms.Algorithm) -> Way:
    return Way("dense", str(algorithm), ("--algorithm", str(algorithm)))


WAYS = (
    *map(_codec, ("dense", "fp16", "topk(density=0.01)")),
    *map(_local, (algorithms.LocalSGD(), algorithms.DiLoCo(steps=100))),
)
"""The ways that are compared; each changes training more than the one before."""


@dataclass(frozen=True)
class Advice:
    """The predictions for all of `WAYS`, in their order, and the way to take.

    Attributes:
        alone: seconds of a step on one host.
        nodes: hosts of the job.
    """

    alone: float
    nodes: int
    predictions: tuple[Prediction, ...]
    way: Way

    @property
    def chosen(self) -> Prediction:
        """The prediction of the way to take."""
        return self.predictions[WAYS.index(self.way)]

    def speed(self, prediction: Prediction) -> float:
        """Returns the samples a second of all hosts together, in units of one host's alone."""
        return self.nodes * self.alone / prediction.step


@dataclass(frozen=True)
class HostMemory:
    """The memory that a host has left before the job.

    Attributes:
        host: its name.
        workers: of the job, on it.
        nbytes: what is left.
        group: the control group whose limit decides; empty if none does.
    """

    host: str
    workers: int
    nbytes: int
    group: str = ""


def conditions_of(
    slots: Sequence[int],
    link: tuple[float, float],
    ring: tuple[float, float] | None,
    model: float,
    step: float,
    largest_chunk: int,
) -> Conditions:
    """Returns the conditions of a job that is planned.

    Args:
        slots: workers of each host.
        link: latency (s) and seconds a byte of the worst link.
        ring: the same of a ring in a measured order; None: the worst link is in it.
        model: bytes of the gradients of a step.
        step: seconds of a step on one host alone.
        largest_chunk: bytes of the largest message between daemons.
    """
    share = float(np.interp(math.log(model), np.log(_SIZES), _LARGEST))
    weights = [(1 - share) ** place for place in range(_TENSORS)]
    tensors = tuple(round(model * weight / sum(weights)) for weight in weights)
    around = None if ring is None else CostModel(*ring)
    return Conditions(len(slots), max(slots), *link, step, tensors, largest_chunk, ring=around)


def advise(conditions: Conditions, threshold: int) -> Advice:
    """Predicts all ways, and chooses one; `threshold`: bytes of the largest bucket."""
    predictions = tuple(
        _cautious(conditions, Setting(threshold, codec=way.codec, late=False, algorithm=way.algorithm)) for way in WAYS
    )
    little = (way for way, one in zip(WAYS, predictions, strict=True) if one.exposed <= _LITTLE * one.step)
    fastest = min(zip(WAYS, predictions, strict=True), key=lambda pair: pair[1].step)[0]
    return Advice(conditions.computing, conditions.nodes, predictions, next(little, fastest))


def _cautious(conditions: Conditions, setting: Setting) -> Prediction:
    """Predicts the cost of a setting for the slowest of models up to this one.

    A codec sends tensors below its minimum whole. So a model whose second tensor is just above the minimum takes half
    the time of a smaller one. Nobody has told the sizes of tensors, and such luck is not to be counted on.
    """
    if not cost_of(setting.codec).minimum:
        return predict(conditions, setting)
    models = (tuple(round(nbytes / _STEP**place) for nbytes in conditions.tensors) for place in range(_MODELS))
    return max((predict(replace(conditions, tensors=model), setting) for model in models), key=lambda one: one.step)


def tell(conditions: Conditions, advice: Advice, hosts: Sequence[HostMemory], flags: str, command: str) -> str:
    """Returns the advice in sentences.

    Args:
        hosts: all of the job.
        flags: those of `fusionrun` that name workers and hosts.
        command: of the workers.
    """
    lines = [
        f"The slowest link between the {advice.nodes} hosts carries {rate_text(conditions.seconds_per_byte)}, with a "
        f"latency of {_ms(conditions.latency)}.",
        f"A step that computes for {_ms(advice.alone)} and has {conditions.nbytes / 1e6:.4g} MB of gradients is "
        "predicted to take:",
        "",
    ]
    width = max(len(way.name) for way in WAYS)
    for way, one in zip(WAYS, advice.predictions, strict=True):
        lines.append(
            f"  {way.name:{width}}  {_ms(one.step):>8}, of which {one.exposed / one.step:4.0%} is communication: "
            f"{advice.speed(one):.2f} x the speed of one host alone"
        )
    lines += ["", _verdict(advice), _memory(conditions, advice.way, hosts)]
    if advice.speed(advice.chosen) > 1:
        if codecs.parse(advice.way.codec).selecting:
            bounded = advice.way.codec.replace(")", ", clip=NORM)")
            lines.append(f"If the script clips gradients by their norm, have the codec do it instead: {bounded}.")
        lines.append(f"Start it with: fusionrun {flags} {' '.join([*map(shlex.quote, advice.way.flags), command])}")
    return "\n".join(lines)


def _memory(conditions: Conditions, way: Way, hosts: Sequence[HostMemory]) -> str:
    """Compares the needs of the host that comes closest to what it has left."""
    found = needs(algorithms.parse(way.algorithm), codecs.parse(way.codec), conditions.nodes, conditions.ranks)
    needed = {host: found.host_nbytes(conditions.nbytes, host.workers) for host in hosts}
    host = max(hosts, key=lambda one: needed[one] / max(one.nbytes, 1))
    within = f" within the limit of the control group {host.group}" if host.group else ""
    line = (
        f"With {way.name} a host of {counted(host.workers, 'worker')} needs at most {needed[host] / 1e9:.1f} GB for "
        "parameters, gradients and their exchange, besides activations and the state of the script's optimizer. "
        f"Host {host.host} has {host.nbytes / 1e9:.1f} GB left{within}"
    )
    if needed[host] <= host.nbytes:
        return f"{line}."
    return f"{line}, which may be too little: run fewer workers there, free memory, or raise the limit."


def _verdict(advice: Advice) -> str:
    dense, chosen = advice.predictions[0], advice.chosen
    name, speed = advice.way.name, advice.speed(chosen)
    if speed <= 1:
        return (
            f"More hosts do not pay off on this network: the fastest way, {name}, reaches {speed:.2f} x the speed of "
            "one host. Train on one host, or with a larger batch a worker, which computes longer."
        )
    if chosen is dense:
        return f"{advice.nodes} hosts pay off as they are: {speed:.2f} x the speed of one host."
    verb = "also pay off" if advice.speed(dense) > 1 else "do not pay off"
    what = (
        "It sends less of each gradient"
        if advice.way.algorithm == ALLREDUCE
        else f"It exchanges parameters every {chosen.setting.period} steps instead of gradients in each, "
        "which is for jobs of many times that"
    )
    return (
        f"{advice.nodes} hosts pay off with {name}: {speed:.2f} x the speed of one host. Dense gradients {verb} "
        f"({advice.speed(dense):.2f} x). {what}, so compare the loss with that of one host."
    )


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.3g} ms" if seconds < 1 else f"{seconds:.3g} s"
