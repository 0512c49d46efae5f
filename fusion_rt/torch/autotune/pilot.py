"""`--auto`: predicts, tries what is predicted to be best, keeps what was measured to be, and looks again later."""

from __future__ import annotations

from fusion_rt import codecs, wire
from fusion_rt.settings import Settings
from fusion_rt.torch.autotune import decision
from fusion_rt.torch.autotune.decision import Choice, Conditions, Decision
from fusion_rt.torch.autotune.director import Circumstances, Director, Sample, Step, nbytes_of, tell

_WARM_UP = 5  # steps of a job that are slower than others
_TRIES = 5  # choices that are tried in one look
_WAITS = 0.05  # share of a step that is waited, above which the links are what is waited for
_SEVERAL = 4  # buckets from which on what was not predicted is held to be theirs
_CHANGED = 1.25  # what links carry, or computing takes, is another than before, so that others may be best
_FLOATS = ("float32", "float64")


class Pilot(Director):
    """Of one optimizer.

    Args:
        settings: what is asked for.
        where: gradients, and hosts.
    """

    def __init__(self, settings: Settings, where: Circumstances) -> None:
        self._settings = settings
        self._where = where
        self._nbytes = tuple(nbytes_of(where.tensors))
        self._seconds_per_byte = where.seconds_per_byte
        self._overheads: dict[tuple[str, bool], float] = {}
        route: wire.Route = settings.dense_route  # type: ignore[assignment]  # one of its choices
        self._default = self._choice = Choice(where.reduction.codec, route, where.threshold)
        self._computing = 0.0
        self._tried: dict[Choice, float] = {}  # under these conditions, with the seconds of a step
        self._why = "measuring"
        self._settled = False
        self._sample: Sample | None = None

    def next(self) -> wire.Tuning:
        count = self._settings.autotune_steps_per_sample
        if self._sample is None:
            self._sample = Sample(count, _WARM_UP)
        elif not self._sample.complete:
            self._sample = Sample(count)
        else:
            self._look(self._sample)
            every = self._settings.auto_every
            self._sample = Sample(count, max(2, every - count)) if self._settled else Sample(count)
        choice = self._choice
        return wire.Tuning(
            threshold=choice.threshold,
            exchange=choice.exchange,
            codec=choice.codec,
            late=choice.late if self._where.may_be_late else None,
            steps=0 if self._settled and not self._settings.auto_every else self._sample.steps,
            why=self._why[:4096],
        )

    def stepped(self, step: Step) -> None:
        if self._sample is not None:
            self._sample.add(step)

    def _look(self, sample: Sample) -> None:
        """Decides, now that the present choice has been measured."""
        if self._settled or not self._tried:
            before = self._computing, self._seconds_per_byte
            self._computing = max(sample.computing, 1e-6)
            self._estimate_links(sample)
            now = self._computing, self._seconds_per_byte
            if any(max(a, b) > _CHANGED * min(a, b) for a, b in zip(before, now, strict=True)):
                self._tried = {}
        else:
            self._estimate_overhead(sample)
        again, self._settled = self._settled, False
        self._tried[self._choice] = sample.seconds
        found = self._decide()
        if found.choice not in self._tried and len(self._tried) <= _TRIES:
            present, self._choice = self._choice, found.choice
            self._why = found.why
            tell(
                f"{self._where.group}: --auto={self._settings.auto} tries {found.choice}, after {present} took "
                f"{sample.seconds * 1e3:.4g} ms a step"
            )
            return
        found = self._decide(only_tried=True)
        if not again or found.choice != self._choice:
            tell(f"{self._where.group}: {found.why}")
        self._choice, self._why, self._settled = found.choice, found.why, True

    def _decide(self, only_tried: bool = False) -> Decision:
        level, conditions = self._settings.auto, self._conditions()
        choices = decision.candidates(
            level, self._default, conditions, codecs=self._may_compress(), late=self._where.may_be_late
        )
        return decision.decide(conditions, choices, level, self._tried, only_tried)

    def _conditions(self) -> Conditions:
        where = self._where
        return Conditions(
            len(where.slots),
            max(where.slots),
            where.latency,
            self._seconds_per_byte,
            self._computing,
            self._nbytes,
            self._settings.chunk_bytes,
            self._overheads,
        )

    def _estimate_links(self, sample: Sample) -> None:
        """Corrects what links were measured to carry at the start, when gradients are what is waited for."""
        if len(self._where.slots) == 1 or not sample.reducing or sample.waited < _WAITS * sample.seconds:
            return
        present = decision.predict(self._conditions(), self._choice)
        if present.sent > 0:
            beside = present.reducing - present.sent * self._seconds_per_byte  # messages, codecs, memory
            self._seconds_per_byte = max(sample.reducing - beside, sample.reducing / 2) / present.sent

    def _estimate_overhead(self, sample: Sample) -> None:
        """Takes what the present choice takes longer than predicted for the price of its buckets."""
        present = decision.predict(self._conditions(), self._choice)
        beyond = sample.seconds - present.step
        if beyond > 0 and present.buckets >= _SEVERAL:
            kind = self._choice.kind
            self._overheads[kind] = self._overheads.get(kind, 0.0) + beyond / present.buckets

    def _may_compress(self) -> bool:
        reduction = self._where.reduction
        if reduction.codec != "dense" or any(t.dtype not in _FLOATS or t.sparse for t in self._where.tensors):
            return False
        try:
            for codec in decision.CODECS:
                codecs.parse(codec).check_use(reduction.op)
        except codecs.CodecError:
            return False
        return True
