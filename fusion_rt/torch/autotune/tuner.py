"""`--autotune`: measures settings while the model trains, and ends with the best one."""

from __future__ import annotations

import os

from fusion_rt import wire
from fusion_rt.cost import CostModel
from fusion_rt.settings import Settings
from fusion_rt.torch.autotune import cache
from fusion_rt.torch.autotune.director import UNMEASURED, Circumstances, Director, Sample, Step, nbytes_of, tell
from fusion_rt.torch.autotune.log import Log
from fusion_rt.torch.autotune.search import OptunaSampler, Search
from fusion_rt.torch.autotune.space import Setting, Space


class Tuner(Director):
    """Of one optimizer.

    Args:
        settings: what is asked for.
        where: gradients, and hosts.
        log_path: of the log file; empty: none.

    Raises:
        AutotuneError: optuna is not installed.
    """

    def __init__(self, settings: Settings, where: Circumstances, log_path: str) -> None:
        self._where = where
        self._nbytes = sum(nbytes_of(where.tensors))
        default = default_setting(settings, where)
        space = Space.around(
            default,
            nbytes=self._nbytes,
            nodes=len(where.slots),
            cores=os.cpu_count() or 1,
            largest_chunk=settings.chunk_bytes,
            keep_order=settings.autotune_keep_order,
        )
        self._default = default
        self._folder = cache.directory(settings.autotune_directory)
        self._fingerprint = cache.Fingerprint.of(
            where.slots, where.seconds_per_byte, where.tensors, where.reduction, settings.autotune_keep_order
        )
        self._settings = settings
        self._chosen: Setting | None = None
        self._trying: Setting | None = None
        self._sample: Sample | None = None
        known = cache.load(self._folder, self._fingerprint)
        if known is not None:
            self._chosen = known[0]
            self._why = f"found by an earlier job, in {known[1]}"
            tell(f"autotune of {where.group}: begins with {self._chosen}, {self._why}; nothing more is tried")
            return
        if space.size == 1:
            self._chosen, self._why = default, "there is nothing to choose"
            return
        self._why = ""
        samples = settings.autotune_max_samples
        self._search = Search(space, OptunaSampler(space, max(3, samples // 4)), samples, settings.autotune_noise)
        self._log = Log(log_path)
        tell(f"autotune of {where.group}: {samples} samples of {settings.autotune_steps_per_sample} steps each")

    def next(self) -> wire.Tuning:
        if self._chosen is None:
            self._evaluate()
        if self._chosen is not None:
            return self._chosen.tuning(0, f"--autotune: {self._why}")
        assert self._trying is not None
        assert self._sample is not None
        return self._trying.tuning(self._sample.steps, "--autotune: a sample")

    def stepped(self, step: Step) -> None:
        if self._sample is not None:
            self._sample.add(step)

    def _evaluate(self) -> None:
        """Takes note of the sample, if there is one, and goes on."""
        count = self._settings.autotune_steps_per_sample
        unmeasured = UNMEASURED
        if self._trying is None:  # the first one
            self._trying = self._search.ask()
            unmeasured += self._settings.autotune_warmup_samples * count
        elif self._sample is not None and self._sample.complete:
            score = self._nbytes / max(self._sample.seconds, 1e-9) / 1e6
            self._search.tell(self._trying, score)
            self._log.sample(self._trying, score)
            if self._search.over:
                self._choose()
                return
            self._trying = self._search.ask()
        self._sample = Sample(count, unmeasured)

    def _choose(self) -> None:
        chosen, search = self._search.best, self._search
        score, default = search.score(chosen), search.score(self._default)
        self._chosen, self._sample = chosen, None
        self._log.sample(chosen, score)
        kept = cache.save(self._folder, self._fingerprint, chosen, score, default)
        self._why = f"{score / default:.3f} times as fast as the default in {search.samples} samples"
        tell(
            f"autotune of {self._where.group}: chose {chosen}: {self._why}"
            + (f"; kept in {kept} for the next job" if kept else "")
        )


def default_setting(settings: Settings, where: Circumstances) -> Setting:
    """What holds without tuning."""
    cost = CostModel(where.latency, where.seconds_per_byte) if where.seconds_per_byte > 0 else CostModel()
    route: wire.Route = settings.dense_route  # type: ignore[assignment]  # one of its choices
    return Setting(
        where.threshold,
        cost.chunk_bytes(settings.chunk_bytes),
        settings.window_bytes,
        settings.kernel_threads,
        route,
    )
