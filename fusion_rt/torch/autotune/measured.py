"""`--autotune`: judges settings by measuring them while the model trains, and ends with the best one."""

from __future__ import annotations

import os
import warnings

from fusion_rt import wire
from fusion_rt.choice.candidates import Setting, Space
from fusion_rt.core.cost import CostModel
from fusion_rt.host.cores import cores, kernel_threads
from fusion_rt.host.private_files import open_private
from fusion_rt.settings import Settings
from fusion_rt.torch.autotune import cache
from fusion_rt.torch.autotune.director import UNMEASURED, Circumstances, Sample, Trial, nbytes_of, tell
from fusion_rt.torch.autotune.search import OptunaSampler, Search
from fusion_rt.units import KIB, MIB

COLUMNS = (
    "hierarchical_allreduce", "hierarchical_allgather", "torus_allreduce", "cache_enabled", "cycle_time_ms",
    "tensor_fusion_threshold", "chunk_kib", "window_mib", "kernel_threads", "dense_route", "score",
)  # fmt: skip


class Log:
    """The file, which is written anew, and closed after each line: the end of training is not known.

    Args:
        path: empty: there is none. One that cannot be written is warned of, and left out.
    """

    def __init__(self, path: str) -> None:
        self._path = path
        self._write(",".join(COLUMNS), os.O_TRUNC)

    def sample(self, setting: Setting, score: float) -> None:
        """A setting, and its score."""
        values = (
            0, 0, 0, 1, 0, f"{setting.threshold / MIB:g}", f"{(setting.chunk_bytes or 0) / KIB:g}",
            f"{(setting.window_bytes or 0) / MIB:g}", setting.threads, setting.exchange, f"{score:g}",
        )  # fmt: skip
        self._write(",".join(map(str, values)), os.O_APPEND)

    def _write(self, line: str, flags: int) -> None:
        if not self._path:
            return
        try:
            with open(open_private(self._path, flags=os.O_WRONLY | flags), "w", encoding="utf-8") as file:
                file.write(line + "\n")
        except OSError as error:
            warnings.warn(f"the log file of --autotune cannot be written: {error}", stacklevel=3)
            self._path = ""


class Measured:
    """The judge of one optimizer's settings.

    Args:
        settings: the job's.
        where: gradients, and hosts.
        log_path: of the log file; empty: none.
    """

    def __init__(self, settings: Settings, where: Circumstances, log_path: str) -> None:
        self._settings = settings
        self._where = where
        self._nbytes = sum(nbytes_of(where.tensors))
        self._default = default_setting(settings, where)
        self._space = Space.around(
            self._default,
            nbytes=self._nbytes,
            nodes=len(where.slots),
            cores=os.cpu_count() or 1,
            largest_chunk=settings.chunk_bytes,
            keep_order=settings.autotune_keep_order,
        )
        self._search: Search
        self._log: Log
        self._trying = self._default
        self._log_path = log_path
        self._folder = cache.directory(settings.autotune_directory)
        self._fingerprint = cache.Fingerprint.of(
            where.slots, where.seconds_per_byte, where.tensors, where.reduction, settings.autotune_keep_order
        )

    def first(self) -> Trial:
        settings, name = self._settings, f"autotune of {self._where.group}"
        known = cache.load(self._folder, self._fingerprint)
        if known is not None:
            setting, path = known
            why = f"found by an earlier job, in {path}"
            tell(f"{name}: begins with {setting}, {why}; nothing more is tried")
            return _last(setting, why)
        if self._space.size == 1:
            return _last(self._default, "there is nothing to choose")
        samples, count = settings.autotune_max_samples, settings.autotune_steps_per_sample
        sampler = OptunaSampler(self._space, max(3, samples // 4))
        self._search = Search(self._space, sampler, samples, settings.autotune_noise)
        self._log = Log(self._log_path)
        tell(f"{name}: {samples} samples of {count} steps each")
        return self._next()._replace(unmeasured=UNMEASURED + settings.autotune_warmup_samples * count)

    def measured(self, sample: Sample) -> Trial:
        score = self._nbytes / max(sample.median.seconds, 1e-9) / 1e6
        self._search.tell(self._trying, score)
        self._log.sample(self._trying, score)
        return self._choose() if self._search.over else self._next()

    def _next(self) -> Trial:
        self._trying = self._search.ask()
        return Trial(self._trying, "--autotune: a sample")

    def _choose(self) -> Trial:
        chosen, search = self._search.best, self._search
        score, default = search.score(chosen), search.score(self._default)
        self._log.sample(chosen, score)
        kept = cache.save(self._folder, self._fingerprint, chosen, score, default)
        why = f"{score / default:.3f} times as fast as the default in {search.samples} samples"
        tell(
            f"autotune of {self._where.group}: chose {chosen}: {why}"
            + (f"; kept in {kept} for the next job" if kept else "")
        )
        return _last(chosen, why)


def default_setting(settings: Settings, where: Circumstances) -> Setting:
    """The setting without tuning."""
    cost = CostModel(where.latency, where.seconds_per_byte) if where.seconds_per_byte > 0 else CostModel()
    route: wire.Route = settings.dense_route  # type: ignore[assignment]  # one of its choices
    return Setting(
        where.threshold,
        cost.chunk_bytes(settings.chunk_bytes),
        settings.window_bytes,
        settings.kernel_threads or kernel_threads(cores()),
        route,
    )


def _last(setting: Setting, why: str) -> Trial:
    return Trial(setting, f"--autotune: {why}", is_last=True)
