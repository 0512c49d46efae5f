"""Every knob once: name, unit, default, environment variable, launcher flag and YAML key.

A value is found in this order: launcher flag, YAML file, environment variable, default. Flags and YAML reach the
workers and daemons as environment variables, so that reading the environment is all a process has to do.

Sizes and durations accept suffixes everywhere (`64MiB`, `1ms`); a bare number has the unit that Horovod gave the
variable (bytes for a size, seconds for a time), or the flag (MB for `--fusion-threshold-mb`).
"""

from __future__ import annotations

import dataclasses
import math
import os
import re
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from fusion_rt.errors import SettingError

KIB = 1024
MIB = 1024 * KIB

_SIZE_SUFFIXES = {
    "": 1,
    "b": 1,
    "kb": 10**3,
    "mb": 10**6,
    "gb": 10**9,
    "kib": KIB,
    "mib": MIB,
    "gib": 1024 * MIB,
}
_TIME_SUFFIXES = {"": 1.0, "s": 1.0, "us": 1e-6, "ms": 1e-3, "m": 60.0, "min": 60.0, "h": 3600.0}


def parse_size(text: str, bare_unit: int = 1) -> int:
    """Bytes in a size such as `67108864`, `64MiB` or `0.5 GB`.

    Args:
        text: the number with an optional suffix, in any case.
        bare_unit: bytes that a number without a suffix counts for (Horovod's `--fusion-threshold-mb` counts MiB).

    Raises:
        SettingError: the text is not a size.
    """
    number, suffix = _number_and_suffix(text, _SIZE_SUFFIXES, "a size such as 64MiB")
    return round(number * (_SIZE_SUFFIXES[suffix] if suffix else bare_unit))


def parse_seconds(text: str, bare_unit: float = 1.0) -> float:
    """Seconds in a duration such as `30`, `1ms` or `2min`; a bare number counts `bare_unit` seconds.

    Raises:
        SettingError: the text is not a duration.
    """
    number, suffix = _number_and_suffix(text, _TIME_SUFFIXES, "a duration such as 30s or 1ms")
    return number * (_TIME_SUFFIXES[suffix] if suffix else bare_unit)


def _number_and_suffix(text: str, suffixes: Mapping[str, float], what: str) -> tuple[float, str]:
    match = re.fullmatch(r"\s*([0-9]*\.?[0-9]+(?:[eE][+-]?[0-9]+)?)\s*([a-zA-Z]*)\s*", text)
    if match is None or match[2].lower() not in suffixes or not math.isfinite(float(match[1])):
        raise SettingError(f"{text!r} is not {what}")
    return float(match[1]), match[2].lower()


def _parse_bool(text: str) -> bool:
    if text.strip().lower() in ("1", "true", "yes", "on"):
        return True
    if text.strip().lower() in ("0", "false", "no", "off", ""):
        return False
    raise SettingError(f"{text!r} is not a yes or no (1 or 0)")


_PARSERS: dict[str, Callable[[str], Any]] = {
    "bytes": parse_size,
    "seconds": parse_seconds,
    "bool": _parse_bool,
    "count": int,
    "text": str,
}


def _knob(
    default: Any,
    env: str,
    help: str,
    *,
    unit: str = "text",
    flag: str | None = None,
    yaml: str | None = None,
    choices: tuple[str, ...] = (),
    least: float | None = None,
) -> Any:
    """One row of the table of settings; `unit` is a key of `_PARSERS`, `least` the smallest value allowed."""
    metadata = {
        "env": env,
        "help": help,
        "unit": unit,
        "flag": flag,
        "yaml": yaml,
        "choices": choices,
        "least": least,
    }
    return dataclasses.field(default=default, metadata=metadata)


@dataclass(frozen=True)
class Settings:
    """The settings of one process, read from its environment by `Settings.from_env`."""

    fusion_threshold: int = _knob(
        16 * MIB,
        "HOROVOD_FUSION_THRESHOLD",
        "Largest bucket: gradients are fused until a bucket would grow beyond this.",
        unit="bytes",
        flag="--fusion-threshold-mb",
        yaml="params.fusion_threshold_mb",
        least=0,
    )
    start_timeout: float = _knob(
        30.0,
        "HOROVOD_START_TIMEOUT",
        "How long every process of a job may take to come up before the job is given up.",
        unit="seconds",
        flag="--start-timeout",
        least=0.001,
    )
    operation_timeout: float = _knob(
        600.0,
        "FUSION_OPERATION_TIMEOUT",
        "How long an operation may wait for ranks that have not submitted it before it fails on all ranks.",
        unit="seconds",
        least=0.001,
    )
    log_level: str = _knob(
        "warning",
        "HOROVOD_LOG_LEVEL",
        "Least severe message that is logged.",
        flag="--log-level",
        yaml="logging.level",
        choices=("trace", "debug", "info", "warning", "error", "fatal"),
    )
    runtime_dir: str = _knob(
        "",
        "FUSION_RUNTIME_DIR",
        "Directory (mode 0700) for the daemons' sockets and logs; empty: one for this user in XDG_RUNTIME_DIR or /tmp.",
    )
    algorithm: str = _knob("allreduce", "FUSION_ALGORITHM", "How the gradients of a DistributedOptimizer are combined.")
    compression: str = _knob(
        "dense", "FUSION_COMPRESSION", "Codec of the gradients of a DistributedOptimizer between nodes."
    )
    encryption: str = _knob(
        "auto",
        "FUSION_ENCRYPTION",
        "What is encrypted between daemons: all, control (payloads travel in the clear, for trusted networks), or "
        "auto: all, unless every daemon listens on loopback.",
        flag="--encryption",
        choices=("auto", "all", "control"),
    )
    chunk_bytes: int = _knob(
        2 * MIB,
        "FUSION_CHUNK_BYTES",
        "Largest payload of a message between daemons; a bucket travels as a pipeline of them, smaller on slow links.",
        unit="bytes",
        least=4 * KIB,
    )
    window_bytes: int = _knob(
        16 * MIB,
        "FUSION_WINDOW_BYTES",
        "Payload a daemon may have under way to one peer for one bucket before the peer has to grant more credit.",
        unit="bytes",
        least=4 * KIB,
    )
    connections: int = _knob(1, "FUSION_CONNECTIONS", "Payload connections to each peer daemon.", unit="count", least=1)
    io_threads: int = _knob(1, "FUSION_IO_THREADS", "ZeroMQ I/O threads of a daemon.", unit="count", least=1)
    kernel_threads: int = _knob(
        2, "FUSION_KERNEL_THREADS", "Threads of a daemon that reduce local buckets.", unit="count", least=1
    )
    heartbeat_interval: float = _knob(
        1.0,
        "FUSION_HEARTBEAT_INTERVAL",
        "How often a daemon's event loop tells its peers that it is alive.",
        unit="seconds",
        least=0.01,
    )
    heartbeat_timeout: float = _knob(
        10.0,
        "FUSION_HEARTBEAT_TIMEOUT",
        "Silence after which a peer daemon is given up.",
        unit="seconds",
        least=0.05,
    )

    @classmethod
    def from_env(cls, environ: Mapping[str, str] | None = None) -> Settings:
        """The settings that an environment describes; unset variables keep their defaults.

        Raises:
            SettingError: a variable's value cannot be used; the text names the variable.
        """
        environ = os.environ if environ is None else environ
        values: dict[str, Any] = {}
        for knob in dataclasses.fields(cls):
            text = environ.get(knob.metadata["env"], "")
            if text != "":
                values[knob.name] = _parse_knob(knob, text)
        return cls(**values)

    def runtime_root(self) -> str:
        """The directory in which each job's daemons keep their sockets, logs and locks (not created here)."""
        if self.runtime_dir:
            return self.runtime_dir
        base = os.environ.get("XDG_RUNTIME_DIR") or tempfile.gettempdir()
        return os.path.join(base, f"fusion_rt-{os.getuid()}")


def _parse_knob(knob: dataclasses.Field[Any], text: str) -> Any:
    meta = knob.metadata
    try:
        value = _PARSERS[meta["unit"]](text)
    except ValueError as error:
        raise SettingError(f"{meta['env']}={text!r} ({meta['help']}): {error}") from None
    if meta["choices"]:
        value = value.lower()
        if value not in meta["choices"]:
            raise SettingError(f"{meta['env']}={text!r} is not one of {', '.join(meta['choices'])}")
    if meta["least"] is not None and value < meta["least"]:
        raise SettingError(f"{meta['env']}={text!r} is below the least value allowed, {meta['least']}")
    return value
