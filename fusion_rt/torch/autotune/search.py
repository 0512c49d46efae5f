"""The search for the best setting, one sample after the other. No I/O.

The first sample is the default. Then come other sizes of buckets, since they decide most, the default otherwise: as
many as there are samples to begin with, the nearest first. From then on optuna's sampler (TPE: Bergstra et al.,
"Algorithms for hyper-parameter optimization", 2011) asks for settings and is told their scores. The highest of many
noisy scores is a lucky one, so the last samples measure the leaders and the default again, in turns, and the highest
median wins; the default, unless another one is higher. A setting that was measured before is not measured again while
there are others: the sampler is told the known results.
"""

from __future__ import annotations

import statistics
from dataclasses import dataclass, field

from fusion_rt.choice.candidates import Setting, Space
from fusion_rt.core.errors import FusionError

MISSING = "--autotune needs optuna, which is not installed: pip install optuna, or leave --autotune out"
_LEADERS = 2
_ASKED_AGAIN = 8


class AutotuneError(FusionError):
    """Nothing can be tuned; the text says why."""


class OptunaSampler:
    """The source of the settings that are measured: optuna's TPE.

    Args:
        space: what there is.
        startup: samples before TPE asks for any: the default, and other sizes of buckets; if there are not so many,
            what is drawn at random.
        seed: of it.

    Raises:
        AutotuneError: optuna is not installed.
    """

    def __init__(self, space: Space, startup: int, seed: int = 0) -> None:
        try:
            import optuna
        except ImportError:
            raise AutotuneError(MISSING) from None
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        sampler = optuna.samplers.TPESampler(n_startup_trials=startup, seed=seed)
        self._study = optuna.create_study(direction="maximize", sampler=sampler)
        self._values = {name: values for name, values in space.values.items() if name != "exchange"}
        self._distributions: dict[str, optuna.distributions.BaseDistribution] = {
            name: optuna.distributions.IntDistribution(0, len(values) - 1) for name, values in self._values.items()
        }
        self._distributions["exchange"] = optuna.distributions.CategoricalDistribution(space.values["exchange"])
        default = {name: values.index(getattr(space.default, name)) for name, values in self._values.items()}
        usual = default["threshold"]
        sizes = sorted(range(len(self._values["threshold"])), key=lambda size: abs(size - usual))  # the default first
        for size in sizes[:startup]:
            self._study.enqueue_trial(default | {"threshold": size, "exchange": space.default.exchange})
        self._trial: optuna.Trial | None = None

    def ask(self) -> Setting:
        """A setting that may be good."""
        self._trial = self._study.ask(self._distributions)
        drawn = self._trial.params
        chosen = {name: values[drawn[name]] for name, values in self._values.items()}
        return Setting(**chosen, exchange=drawn["exchange"])

    def tell(self, score: float) -> None:
        """The score of the one asked for last; higher is better."""
        assert self._trial is not None
        self._study.tell(self._trial, score)


@dataclass
class Search:
    """One search.

    Args:
        space: what there is.
        sampler: asks; it begins with the default.
        samples: that are measured in all.
        noise: from 0 to 1; the share of a third of the samples that measure again.

    Attributes:
        scores: of the measured settings.
    """

    space: Space
    sampler: OptunaSampler
    samples: int
    noise: float
    scores: dict[Setting, list[float]] = field(default_factory=dict)
    _taken: int = 0
    _again: list[Setting] = field(default_factory=list)

    @property
    def _exploring(self) -> int:
        """Samples before those that measure again."""
        return max(1, self.samples - round(self.noise * self.samples / 3))

    @property
    def over(self) -> bool:
        """Tells whether all samples have been taken."""
        return self._taken >= self.samples

    def ask(self) -> Setting:
        """The setting to measure next. Not to be called when the search is over."""
        if self._taken < self._exploring:
            for _ in range(_ASKED_AGAIN):
                setting = self.sampler.ask()
                if setting not in self.scores:
                    return setting
                self.sampler.tell(self.score(setting))
        if not self._again:
            self._again = self.finalists()
        return self._again.pop(0)

    def tell(self, setting: Setting, score: float) -> None:
        """Records the score of the setting that was asked for."""
        if setting not in self.scores and self._taken < self._exploring:
            self.sampler.tell(score)
        self.scores.setdefault(setting, []).append(score)
        self._taken += 1

    def score(self, setting: Setting) -> float:
        """The median of the measurements."""
        return statistics.median(self.scores[setting])

    def finalists(self) -> list[Setting]:
        """The leaders and the default, the best first."""
        others = sorted((s for s in self.scores if s != self.space.default), key=self.score, reverse=True)
        return sorted({*others[:_LEADERS], self.space.default} & self.scores.keys(), key=self.score, reverse=True)

    @property
    def best(self) -> Setting:
        """The best of those that have been measured most often: a setting that led by luck was measured again, and lost
        its lead."""
        most = max(len(found) for found in self.scores.values())
        often = [setting for setting, found in self.scores.items() if len(found) >= min(most, 2)]
        best = max(often, key=self.score)
        default = self.space.default
        return default if default in self.scores and self.score(default) >= self.score(best) else best
