"""`--auto`: judges settings by prediction, tries the best, keeps the fastest as measured, and looks again later."""

from __future__ import annotations

from collections import Counter

from fusion_rt import codecs, wire
from fusion_rt.choice import prediction
from fusion_rt.choice.candidates import Mathematics, Setting, candidates
from fusion_rt.choice.codec_costs import ALLREDUCE, CODECS
from fusion_rt.choice.prediction import Conditions, Decision
from fusion_rt.settings import Settings
from fusion_rt.torch.autotune.director import UNMEASURED, Circumstances, Sample, Trial, nbytes_of, tell

_WARM_UP = 5  # steps of a job that are slower than others
_TRIES = 5  # settings that are tried in one look
_OF_A_KIND = 2  # of these, where there are several kinds, any of which may be other than predicted
_WAITS = 0.05  # share of a step that is waited, above which the wait is for the links
_SEVERAL = 4  # buckets from which on time that was not predicted is held to be theirs
_CHANGED = 1.25  # rates of links, or times of computing, have changed, so that others may be best
_CLEAR = 2.0  # by how much the default has to be slower for one measurement of each to tell
_FLOATS = ("float32", "float64")


class Predicted:
    """The judge of one optimizer's settings.

    Args:
        settings: the job's.
        where: gradients, and hosts.
    """

    def __init__(self, settings: Settings, where: Circumstances) -> None:
        self._settings = settings
        self._where = where
        self._nbytes = tuple(nbytes_of(where.tensors))
        self._seconds_per_byte = where.seconds_per_byte
        self._overheads: dict[Mathematics, float] = {}
        route: wire.Route = settings.dense_route  # type: ignore[assignment]  # one of its choices
        late = False if where.may_be_late else None
        self._default = Setting(where.threshold, exchange=route, codec=where.reduction.codec, late=late)
        self._present = self._default
        self._computing = 0.0
        self._tried: dict[Setting, float] = {}  # under these conditions, with the seconds of a step, as they were last
        self._often: Counter[Setting] = Counter()  # how often each was
        self._default_took = float("inf")  # seconds of a step, when the default was measured last
        self._settled = False

    def first(self) -> Trial:
        return Trial(self._default, "measuring", _WARM_UP)

    def measured(self, sample: Sample) -> Trial:
        """Decides, now that the present setting has been measured."""
        if self._settled or not self._tried:
            before = self._computing, self._seconds_per_byte
            self._computing = max(sample.computing, 1e-6)
            self._estimate_links(sample)
            now = self._computing, self._seconds_per_byte
            if any(max(a, b) > _CHANGED * min(a, b) for a, b in zip(before, now, strict=True)):
                self._tried = {}
                self._often.clear()
        else:
            self._estimate_overhead(sample)
        again, self._settled = self._settled, False
        present, seconds = self._present, sample.median.seconds
        self._tried[present] = seconds
        self._often[present] += 1
        if present == self._default:
            self._default_took = seconds
        found = self._decide()
        if found.setting not in self._tried and len(self._tried) <= _TRIES:
            return self._try(found.setting, found.why, seconds)
        found = self._decide(only_tried=True)
        if (doubtful := self._doubtful(found.setting)) is not None:
            return self._try(doubtful, found.why, seconds)
        if not again or found.setting != present:
            tell(f"{self._where.group}: {found.why}")
        self._present, self._settled = found.setting, True
        every = self._settings.auto_every
        unmeasured = max(UNMEASURED, every - self._settings.autotune_steps_per_sample)
        return Trial(found.setting, found.why, unmeasured, is_last=not every)

    def _try(self, setting: Setting, why: str, seconds: float) -> Trial:
        """Has a setting measured, after the present one took so many seconds a step."""
        again = " again" if setting in self._tried else ""
        tell(
            f"{self._where.group}: --auto={self._settings.auto} tries {setting}{again}, after {self._present} took "
            f"{seconds * 1e3:.4g} ms a step"
        )
        self._present = setting
        return Trial(setting, why)

    def _doubtful(self, chosen: Setting) -> Setting | None:
        """Returns the one of the choice and the default that has to be measured (again) before the choice is known not
        to be worse; None if it is known. Unless they are far apart, both are measured once more at the end, since the
        first steps of a job are slower than others."""
        default = self._default
        predicted = prediction.predict(self._conditions(), default).step
        expected = self._tried.get(default, min(predicted, self._default_took))
        if chosen == default or expected > _CLEAR * self._tried[chosen]:
            return None
        return next((one for one in (default, chosen) if self._often[one] < 2), None)

    def _decide(self, only_tried: bool = False) -> Decision:
        level, conditions = self._settings.auto, self._conditions()
        settings = candidates(
            level,
            self._default,
            nbytes=conditions.nbytes,
            nodes=conditions.nodes,
            largest_chunk=conditions.largest_chunk,
            codecs=self._may_compress(),
            late=self._where.may_be_late,
            local=self._where.may_step_locally and self._may_compress() and self._where.reduction.op == "average",
        )
        if len({setting.kind for setting in settings}) > 1:
            often = Counter(setting.kind for setting in self._tried if setting != self._default)
            known = (self._default, *self._tried)
            settings = [one for one in settings if one in known or often[one.kind] < _OF_A_KIND]
        return prediction.decide(conditions, settings, level, self._tried, only_tried)

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
            where.ring,
        )

    def _estimate_links(self, sample: Sample) -> None:
        """Corrects the rates of links that were measured at the start, when a step waits for gradients."""
        if (
            len(self._where.slots) == 1
            or self._present.algorithm != ALLREDUCE
            or not sample.median.reducing
            or sample.median.waited < _WAITS * sample.median.seconds
        ):
            return
        present = prediction.predict(self._conditions(), self._present)
        if present.sent > 0:
            beside = present.reducing - present.sent * self._seconds_per_byte  # messages, codecs, memory
            self._seconds_per_byte = max(sample.median.reducing - beside, sample.median.reducing / 2) / present.sent

    def _estimate_overhead(self, sample: Sample) -> None:
        """Takes the time of the present choice beyond the predicted one for the price of its buckets."""
        present = prediction.predict(self._conditions(), self._present)
        beyond = sample.median.seconds - present.step
        if beyond > 0 and present.buckets >= _SEVERAL:
            kind = self._present.kind
            self._overheads[kind] = self._overheads.get(kind, 0.0) + beyond * self._present.period / present.buckets

    def _may_compress(self) -> bool:
        reduction = self._where.reduction
        if reduction.codec != "dense" or any(t.dtype not in _FLOATS or t.sparse for t in self._where.tensors):
            return False
        try:
            for codec in CODECS:
                codecs.parse(codec).check_use(reduction.op)
        except codecs.CodecError:
            return False
        return True
