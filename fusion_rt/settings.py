"""Every knob once: flag, environment variable, YAML key, unit, default and meaning.

From this table come the settings of a process (`Settings.from_env`), the flags of `fusionrun` and its `--help`, the
keys of its YAML file, and the page docs/settings.md, which `python -m fusion_rt.settings_page` writes.

A value is found in this order: flag, YAML file, environment variable, default. Flags and YAML reach the workers and
daemons as environment variables, so that reading the environment is all that a process has to do.
"""

from __future__ import annotations

import dataclasses
import math
import os
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from fusion_rt.core.errors import SettingError
from fusion_rt.knobs import (
    AUTOTUNE,
    COMPATIBLE,
    DAEMON,
    ELASTIC,
    FUSION,
    HOSTS,
    LOGGING,
    OUTPUT,
    REACH,
    STALLS,
    START,
    TIMELINE,
    Knob,
)
from fusion_rt.units import (
    ALGORITHM,
    BYTES,
    CODEC,
    COUNT,
    GIB,
    KIB,
    LIMIT,
    MIB,
    NUMBER,
    PORTS,
    SECONDS,
    SWITCH,
    parse_range,
)

# Why nothing comes of a knob.
_NO_MPI = "MPI is not used"
_NO_CYCLE = "buckets start when they are full, by a plan that is agreed once: there is neither a cycle nor a cache"
_NODE_FIRST = "each node is reduced in shared memory first, then the nodes by the way that is measured to be faster"
_NO_NCCL = "Horovod's NCCL streams are not used"
_NO_THREAD = "workers have no background thread"
_NO_GLOO = "Gloo is not used; --stall-check-shutdown-time-seconds limits how long an operation may wait"
_NO_CHECKS = "no checks are cached"


# A row of the table is easier to read in two or three lines than with a line for each argument.
# fmt: off

def _row(default: Any, group: str, help: str, **columns: Any) -> Any:
    """A row that is also an attribute of `Settings`."""
    return dataclasses.field(default=default, metadata={"group": group, "help": help, **columns})


@dataclass(frozen=True)
class Settings:
    """The settings of one process, read from its environment by `Settings.from_env`."""

    start_timeout: float = _row(
        30.0, START, "Time limit for every process of a job to come up.",
        unit=SECONDS, flags=("--start-timeout",), variable="HOROVOD_START_TIMEOUT", least=0.001)
    job_secret_file: str = _row(
        "", START, "File on each host with a secret that the job's processes share, readable by this user alone "
        "(mode 0600). Launchers other than fusionrun need it on several hosts (docs/launchers.md).",
        variable="FUSION_JOB_SECRET_FILE", placeholder="FILE")
    insecure_rendezvous: bool = _row(
        False, START, "Start of a job of several hosts without a secret, under launchers other than fusionrun: "
        "every process that reaches its rendezvous can take part in it.",
        unit=SWITCH, flags=("--insecure-rendezvous",), variable="FUSION_INSECURE_RENDEZVOUS",
        yaml="params.insecure_rendezvous")
    fusion_threshold: int = _row(
        16 * MIB, FUSION, "Largest bucket: gradients are fused up to this size (Horovod's is 128 MiB).",
        unit=BYTES, flags=("--fusion-threshold-mb",), variable="HOROVOD_FUSION_THRESHOLD",
        yaml="params.fusion_threshold_mb", bare=MIB)
    compression: str = _row(
        "dense", FUSION, "Codec of the gradients of a DistributedOptimizer between nodes, such as fp16 or "
        "topk(density=0.01); `fusionrun --check-build` lists them.",
        unit=CODEC, flags=("--compression",), variable="FUSION_COMPRESSION", yaml="params.compression")
    algorithm: str = _row(
        "allreduce", FUSION, "Training algorithm of a DistributedOptimizer, such as allreduce, ssp(staleness=4) or "
        "adpsgd.",
        unit=ALGORITHM, flags=("--algorithm",), variable="FUSION_ALGORITHM", yaml="params.algorithm")
    overlap: str = _row(
        "none", FUSION, "When a DistributedOptimizer applies an update: none (before step() returns), forward (when "
        "the next forward pass needs it) or stale (one step late).",
        flags=("--overlap",), variable="FUSION_OVERLAP", yaml="params.overlap", choices=("none", "forward", "stale"))
    check_parameters: int = _row(
        200, FUSION, "Steps after which a DistributedOptimizer compares the ranks' parameters by digests, where they "
        "should be the same, and warns of ranks that differ (0: never).",
        unit=COUNT, variable="FUSION_CHECK_PARAMETERS", least=0)
    mirror_shards: str = _row(
        "commit", FUSION, "A copy of each parameter shard's state on another host, so that it survives the loss of its "
        "own host: made at each commit of an elastic state (commit), or also kept up to date by each update, so that a "
        "loss costs one step (update), or none (off).",
        variable="FUSION_MIRROR_SHARDS", shared=True, choices=("commit", "update", "off"))
    sparse_route: str = _row(
        "auto", FUSION, "Way of selected elements between nodes: owners (each sums up a range), gather (everything "
        "to everybody), or auto (the one that is predicted to be faster).",
        variable="FUSION_SPARSE_ROUTE", shared=True, choices=("auto", "owners", "gather"))
    gpu_selection: str = _row(
        "off", FUSION, "Selection of gradients on their GPU, by a worker that contributes alone for its node, so "
        "that only the selection is copied to the host: auto (where it is possible, with fusion_rt[cuda12] or "
        "[cuda13]) or off. It has run on one GPU only.",
        variable="FUSION_GPU_SELECTION", choices=("auto", "off"))
    dense_route: str = _row(
        "auto", FUSION, "All-reduce between nodes where no codec selects: ring, halving (its bytes in log2 N "
        "rounds each way), doubling (recursive; of buckets up to FUSION_CHUNK_BYTES, larger ones go round the ring), "
        "or auto (the one that is predicted to be the fastest).",
        variable="FUSION_DENSE_ROUTE", shared=True, choices=("auto", "ring", "halving", "doubling"))
    memory: str = _row(
        "auto", FUSION, "Way of a script's large tensors to its host's daemon: auto (the daemon reads and writes "
        "them in place, if the kernel allows it, which `fusionrun --check-build` says), adopt (as auto, and tensors of "
        "64 KiB and more that are used again are moved into shared memory, under their own addresses) or copy (through "
        "shared memory).",
        variable="FUSION_MEMORY", choices=("auto", "adopt", "copy"))
    shard_hosts: str = _row(
        "", HOSTS, "Hosts, separated by commas, whose daemons keep parameter shards. One that is not among the job's "
        "hosts gets a daemon and no workers.",
        flags=("--shard-hosts",), variable="FUSION_SHARD_HOSTS", shared=True, yaml="params.shard_hosts",
        placeholder="HOSTS", absent="every host that has workers")
    tolerate_losses: bool = _row(
        False, STALLS, "Go on without lost workers and hosts. The algorithm must be asynchronous, the host must keep "
        "no parameter shard, and more than half of the hosts must be left.",
        unit=SWITCH, flags=("--tolerate-losses",), variable="FUSION_TOLERATE_LOSSES", shared=True,
        yaml="params.tolerate_losses")
    stall_check: bool = _row(
        True, STALLS, "Warnings about operations that wait for ranks, and their end after a limit. Without it they "
        "may wait forever.",
        unit=SWITCH, flags=("--stall-check",), off=("--no-stall-check",), variable="HOROVOD_STALL_CHECK_DISABLE",
        inverse=True, yaml="stall_check.enabled")
    stall_warning_time: float = _row(
        60.0, STALLS, "Time after which a warning names the ranks that have not submitted an operation (0: never).",
        unit=LIMIT, flags=("--stall-check-warning-time-seconds",), variable="HOROVOD_STALL_CHECK_TIME_SECONDS",
        yaml="stall_check.warning_time_seconds")
    operation_timeout: float = _row(
        600.0, STALLS, "Time after which an operation fails on all ranks because some have not submitted it (0: "
        "never, which is Horovod's default).",
        unit=LIMIT, flags=("--stall-check-shutdown-time-seconds",), variable="HOROVOD_STALL_SHUTDOWN_TIME_SECONDS",
        yaml="stall_check.shutdown_time_seconds")
    log_level: str = _row(
        "WARNING", LOGGING, "Least severe message that is logged.",
        flags=("--log-level",), variable="HOROVOD_LOG_LEVEL", yaml="logging.level",
        choices=("TRACE", "DEBUG", "INFO", "WARNING", "ERROR", "FATAL"))
    log_timestamp: bool = _row(
        True, LOGGING, "The time at the beginning of each of the daemons' log lines.",
        unit=SWITCH, flags=("--log-with-timestamp", "--no-log-hide-timestamp"),
        off=("--log-without-timestamp", "--log-hide-timestamp"), variable="HOROVOD_LOG_HIDE_TIME", inverse=True,
        yaml="logging.with_timestamp")
    snapshot_every: float = _row(
        0.0, DAEMON, "Time between two snapshots of each daemon's parameter shards in --snapshot-directory (0: none "
        "are written).",
        unit=SECONDS, flags=("--snapshot-every",), variable="FUSION_SNAPSHOT_EVERY", yaml="params.snapshot_every",
        least=0)
    snapshot_directory: str = _row(
        "", DAEMON, "Directory for snapshots of parameter shards, on each host or shared by all.",
        flags=("--snapshot-directory",), variable="FUSION_SNAPSHOT_DIRECTORY", yaml="params.snapshot_directory",
        placeholder="DIR")
    snapshot_restore: bool = _row(
        False, DAEMON, "Begin with the snapshots in --snapshot-directory instead of the first rank's parameters.",
        unit=SWITCH, flags=("--snapshot-restore",), variable="FUSION_SNAPSHOT_RESTORE", shared=True,
        yaml="params.snapshot_restore")
    timeline_filename: str = _row(
        "", TIMELINE, "File for Horovod's timeline of all operations on rank 0's node, or DYNAMIC (no timeline until "
        "the script calls start_timeline).",
        flags=("--timeline-filename",), variable="HOROVOD_TIMELINE", yaml="timeline.filename", placeholder="FILE")
    timeline_mark_cycles: bool = _row(
        False, TIMELINE, "Mark the beginning of each step in the timeline, as CYCLE_START.",
        unit=SWITCH, flags=("--timeline-mark-cycles",), off=("--no-timeline-mark-cycles",),
        variable="HOROVOD_TIMELINE_MARK_CYCLES", yaml="timeline.mark_cycles")
    timeline_all_ranks: bool = _row(
        False, TIMELINE, "A timeline of each rank, in a file of its own: FILE with the rank before its suffix.",
        unit=SWITCH, flags=("--timeline-all-ranks",), variable="FUSION_TIMELINE_ALL_RANKS", yaml="timeline.all_ranks")
    timeline_steps: str = _row(
        "", TIMELINE, "Steps in the timeline, counted from its start, from 0. A:B is from A up to, but without, B; "
        "either may be left out.",
        flags=("--timeline-steps",), variable="FUSION_TIMELINE_STEPS", yaml="timeline.steps", placeholder="A:B",
        absent="all")
    timeline_max_bytes: int = _row(
        GIB, TIMELINE, "Size at which a timeline's file is renamed to FILE.1, replacing an older one, and begun anew "
        "(0: never).",
        unit=BYTES, flags=("--timeline-max-bytes",), variable="FUSION_TIMELINE_MAX_BYTES", yaml="timeline.max_bytes",
        least=0)
    trace: bool = _row(
        True, TIMELINE, "Records of every worker and daemon, for fusion-trace (docs/tracing.md).",
        unit=SWITCH, flags=("--trace",), off=("--no-trace",), variable="FUSION_TRACE", yaml="timeline.trace")
    trace_dir: str = _row(
        "", TIMELINE, "Directory on each host for the records of all jobs.",
        flags=("--trace-dir",), variable="FUSION_TRACE_DIR", yaml="timeline.trace_dir", placeholder="DIR",
        absent="one for this user in /tmp (or TMPDIR)")
    trace_buffer: int = _row(
        16 * MIB, TIMELINE, "Largest file of records of a process. The newest records overwrite the oldest when it "
        "is full.",
        unit=BYTES, flags=("--trace-buffer",), variable="FUSION_TRACE_BUFFER", yaml="timeline.trace_buffer",
        least=2 * MIB)
    encryption: str = _row(
        "auto", DAEMON, "Encryption between daemons: all, control (payloads are authenticated and "
        "not encrypted), or auto (all, unless every daemon listens on loopback).",
        flags=("--encryption",), variable="FUSION_ENCRYPTION", yaml="params.encryption",
        choices=("auto", "all", "control"))
    runtime_dir: str = _row(
        "", DAEMON, "Directory (mode 0700) for the daemons' sockets and logs.",
        variable="FUSION_RUNTIME_DIR", absent="one for this user in XDG_RUNTIME_DIR or /tmp")
    chunk_bytes: int = _row(
        MIB, DAEMON, "Largest payload of a message between daemons. A bucket travels as a pipeline of such chunks, "
        "smaller ones on slow links.",
        unit=BYTES, variable="FUSION_CHUNK_BYTES", shared=True, least=4 * KIB)
    window_bytes: int = _row(
        16 * MIB, DAEMON, "Payload of one bucket that a daemon may have under way to one peer before the peer has to "
        "grant more credit.",
        unit=BYTES, variable="FUSION_WINDOW_BYTES", shared=True, least=4 * KIB)
    link_credit: int = _row(
        16 * MIB, DAEMON, "Largest payload that a connection may have under way before the peer has received some of "
        "it, less on slow links. The rest waits, the most urgent first (0: nothing waits, and nothing overtakes).",
        unit=BYTES, variable="FUSION_LINK_CREDIT", least=0)
    priority: bool = _row(
        True, FUSION, "Send the buckets first that the next forward pass needs first.",
        unit=SWITCH, variable="FUSION_PRIORITY")
    node_reduction: str = _row(
        "daemon", FUSION, "Place where gradients, and tensors of torch.distributed, of a host's ranks are combined: "
        "daemon (in the host's memory), nccl (on its GPUs, before the daemon has them), auto (nccl where each rank has "
        "a GPU of its own), or gloo (for tests of nccl's way without GPUs). nccl has never run on several GPUs.",
        variable="FUSION_NODE_REDUCTION", choices=("auto", "nccl", "gloo", "daemon"))
    ports: range = _row(
        range(0), DAEMON, "Range of ports on which daemons listen, and rank 0 where it serves a store, for a "
        "firewall between hosts. Each takes the first free one; a daemon needs two.",
        unit=PORTS, flags=("--ports",), variable="FUSION_PORTS", yaml="params.ports",
        absent="any that the system chooses")
    metrics_port: int = _row(
        0, DAEMON, "Port on each host's loopback address on which its daemon serves metrics for Prometheus to "
        "readers who have a token (0: none).",
        unit=COUNT, flags=("--metrics-port",), variable="FUSION_METRICS_PORT", yaml="params.metrics_port", least=0,
        most=65535)
    metrics_token_file: str = _row(
        "", DAEMON, "File on each host with the token that readers of the metrics must show, readable by this user "
        "alone (mode 0600). Without it every daemon draws one, which `fusiond status` shows.",
        flags=("--metrics-token-file",), variable="FUSION_METRICS_TOKEN_FILE", yaml="params.metrics_token_file",
        placeholder="FILE")
    connections: int = _row(
        0, DAEMON, "Payload connections to each peer daemon (0: one on a local network, and over a distance as many "
        "as bandwidth x delay needs; docs/distance.md).",
        unit=COUNT, variable="FUSION_CONNECTIONS", shared=True, least=0)
    ring_order: str = _row(
        "measured", DAEMON, "Order in which a ring visits hosts over a distance: measured (along the fastest links) "
        "or given (as hosts were named). Sums are added up in that order.",
        variable="FUSION_RING_ORDER", shared=True, choices=("measured", "given"))
    io_threads: int = _row(
        0, DAEMON, "ZeroMQ I/O threads of a daemon (0: one for each four processors, from 1 to 4).",
        unit=COUNT, variable="FUSION_IO_THREADS", least=0)
    kernel_threads: int = _row(
        0, DAEMON, "Threads of a daemon that reduce buckets and, if more than two, encrypt payloads and take in those "
        "that arrive (0: half of the processors, from 2 to 8).",
        unit=COUNT, variable="FUSION_KERNEL_THREADS", least=0)
    heartbeat_interval: float = _row(
        1.0, DAEMON, "Time between two signs of life of a daemon's event loop to its peers.",
        unit=SECONDS, variable="FUSION_HEARTBEAT_INTERVAL", least=0.01)
    heartbeat_timeout: float = _row(
        10.0, DAEMON, "Longest silence before a peer daemon is declared dead; half of that where its heartbeats are "
        "regular.",
        unit=SECONDS, variable="FUSION_HEARTBEAT_TIMEOUT", least=0.05)

    autotune: bool = _row(
        False, AUTOTUNE, "Find good values of bucket size, chunk size, window, threads and kind of all-reduce during "
        "training (docs/autotune.md; needs optuna).",
        unit=SWITCH, flags=("--autotune",), off=("--no-autotune",), variable="HOROVOD_AUTOTUNE",
        yaml="autotune.enabled")
    autotune_log_file: str = _row(
        "", AUTOTUNE, "CSV file of all samples, written by rank 0.",
        flags=("--autotune-log-file",), variable="HOROVOD_AUTOTUNE_LOG", yaml="autotune.log_file", placeholder="FILE")
    autotune_warmup_samples: int = _row(
        3, AUTOTUNE, "Number of first samples that are dropped.",
        unit=COUNT, flags=("--autotune-warmup-samples",), variable="HOROVOD_AUTOTUNE_WARMUP_SAMPLES",
        yaml="autotune.warmup_samples", least=0)
    autotune_steps_per_sample: int = _row(
        10, AUTOTUNE, "Number of steps of a sample.",
        unit=COUNT, flags=("--autotune-steps-per-sample",), variable="HOROVOD_AUTOTUNE_STEPS_PER_SAMPLE",
        yaml="autotune.steps_per_sample", least=1)
    autotune_max_samples: int = _row(
        20, AUTOTUNE, "Number of samples after which the search ends.",
        unit=COUNT, flags=("--autotune-bayes-opt-max-samples",), variable="HOROVOD_AUTOTUNE_BAYES_OPT_MAX_SAMPLES",
        yaml="autotune.bayes_opt_max_samples", least=1)
    autotune_noise: float = _row(
        0.8, AUTOTUNE, "Expected noise of samples, from 0 to 1. With more noise, more samples measure the best "
        "settings and the default again.",
        unit=NUMBER, flags=("--autotune-gaussian-process-noise",), variable="HOROVOD_AUTOTUNE_GAUSSIAN_PROCESS_NOISE",
        yaml="autotune.gaussian_process_noise", least=0, most=1)
    autotune_directory: str = _row(
        "", AUTOTUNE, "Directory on rank 0's host that keeps results for the next job with the same hosts and model.",
        flags=("--autotune-directory",), variable="FUSION_AUTOTUNE_DIRECTORY", yaml="autotune.directory",
        placeholder="DIR", absent="fusion_rt/autotune in XDG_CACHE_HOME or ~/.cache")
    autotune_keep_order: bool = _row(
        False, AUTOTUNE, "Tune only settings that keep the order in which gradients are added up, so that results "
        "equal those without tuning, bit by bit.",
        unit=SWITCH, flags=("--autotune-keep-order",), variable="FUSION_AUTOTUNE_KEEP_ORDER",
        yaml="autotune.keep_order")
    auto: str = _row(
        "off", AUTOTUNE, "Choose settings by measured links and computing times, and print the reason: lossless "
        "(how gradients travel), lossy (a codec, too), or async (besides these, updates one step late, or an "
        "algorithm with local steps).",
        flags=("--auto",), variable="FUSION_AUTO", yaml="params.auto", choices=("off", "lossless", "lossy", "async"))
    auto_every: int = _row(
        500, AUTOTUNE, "Number of steps after which --auto decides again (0: never).",
        unit=COUNT, flags=("--auto-every",), variable="FUSION_AUTO_EVERY", yaml="params.auto_every", least=0)

    @classmethod
    def from_env(cls, environ: Mapping[str, str] | None = None) -> Settings:
        """The settings that an environment describes; unset and empty variables keep their defaults.

        Raises:
            SettingError: a variable's value cannot be used; the text names the variable.
        """
        environ = os.environ if environ is None else environ
        values = {
            knob.name: knob.parse(environ[knob.variable], knob.variable)
            for knob in OF_SETTINGS
            if environ.get(knob.variable, "") != ""
        }
        if (values.get("snapshot_every") or values.get("snapshot_restore")) and not values.get("snapshot_directory"):
            raise SettingError("--snapshot-every and --snapshot-restore need --snapshot-directory")
        if values.get("autotune") and values.get("auto", "off") != "off":
            raise SettingError("--autotune, which measures, and --auto, which predicts, exclude each other; use one")
        if not values.get("stall_check", True):
            values.update(stall_warning_time=math.inf, operation_timeout=math.inf)
        settings = cls(**values)
        settings.timeline_range()
        return settings

    def timeline_range(self) -> tuple[int, int]:
        """The first and the last step that are in a timeline; the last is -1 if there is no end.

        Raises:
            SettingError: `timeline_steps` cannot be used.
        """
        try:
            first, stop = parse_range(self.timeline_steps)
        except SettingError as error:
            raise SettingError(f"--timeline-steps: {error}") from None
        return first or 0, -1 if stop is None else stop - 1

    def runtime_root(self) -> str:
        """The directory in which each job's daemons keep their sockets, logs and locks (not created here)."""
        if self.runtime_dir:
            return self.runtime_dir
        base = os.environ.get("XDG_RUNTIME_DIR") or tempfile.gettempdir()
        return os.path.join(base, f"fusion_rt-{os.getuid()}")

    def trace_root(self) -> str:
        """The directory in which each job's records are (not created here).

        It does not depend on the runtime directory, which launchers set and people who look at records do not. Nor is
        it in XDG_RUNTIME_DIR, which is memory, and small.
        """
        if self.trace_dir:
            return os.path.abspath(self.trace_dir)
        return os.path.join(tempfile.gettempdir(), f"fusion_rt-traces-{os.getuid()}")


OF_SETTINGS = tuple(Knob(row.name, default=row.default, **row.metadata) for row in dataclasses.fields(Settings))
SHARED = tuple(knob for knob in OF_SETTINGS if knob.shared)

OF_LAUNCHER = (
    Knob("num_proc", START, "Number of workers.",
         COUNT, flags=("-np", "--num-proc"), least=1, absent="all slots of the hosts"),
    Knob("config_file", START, "YAML file with settings. Flags beat it, and it beats the environment.",
         flags=("--config-file",), placeholder="FILE"),
    Knob("check_build", START, "List of the features of this installation; no job is started.",
         SWITCH, flags=("-cb", "--check-build")),
    Knob("advise", START, "Advice without a job: measures the links between the hosts, and predicts a step of a model "
         "with so many MB of gradients that computes so many ms on one host (docs/start/two-machines.md).",
         flags=("--advise",), placeholder="MODEL_MB STEP_MS", many="2"),
    Knob("as_horovod", START, "Let `import horovod.torch` in an unchanged script mean this package.",
         SWITCH, flags=("--as-horovod",)),
    Knob("verbose", START, "Report of the phases of the job, with their times.", SWITCH, flags=("--verbose",)),
    Knob("hosts", HOSTS, "Hosts as host:slots,host:slots,...; ranks fill them in this order.",
         flags=("-H", "--hosts"), placeholder="HOSTS", absent="localhost:N"),
    Knob("hostfile", HOSTS, "File with a line `name slots=N` for each host; # starts a comment.",
         flags=("-hostfile", "--hostfile"), placeholder="FILE"),
    Knob("host_discovery_script", HOSTS, "Program that prints the hosts, a line `host[:slots]` for each; it is run "
         "every second, and the job follows (docs/launchers.md).",
         flags=("--host-discovery-script",), placeholder="SCRIPT"),
    Knob("slots_per_host", HOSTS, "Slots of each host without a number of its own.",
         COUNT, 1, flags=("--slots-per-host",), least=1),
    Knob("network_interfaces", HOSTS, "Network interface on whose address daemons listen. If several are named (a,b "
         "or the flag repeated), each host uses its first one.",
         flags=("--network-interface", "--network-interfaces"), placeholder="NAME", many="append",
         absent="the way to the other hosts"),
    Knob("ssh_port", REACH, "Port of ssh on all hosts.",
         COUNT, flags=("-p", "--ssh-port"), least=1, most=65535, placeholder="PORT", absent="ssh's own"),
    Knob("ssh_identity_file", REACH, "File with the private key for ssh.",
         flags=("-i", "--ssh-identity-file"), placeholder="FILE", absent="ssh's own"),
    Knob("rsh_agent", REACH, "Command instead of ssh that reaches a host; the agent's command line is appended.",
         flags=("--rsh-agent",), placeholder="'CMD {host}'"),
    Knob("output_filename", OUTPUT, "Directory for a copy of each worker's output: rank.<rank>/stdout and stderr.",
         flags=("--output-filename",), placeholder="DIR"),
    Knob("prefix_output_with_timestamp", OUTPUT, "Start each line of the workers' output with the time.",
         SWITCH, flags=("-prefix-timestamp", "--prefix-output-with-timestamp")),
    Knob("min_num_proc", ELASTIC, "Least number of workers with which the job goes on when others are lost; it waits "
         "for hosts while there are fewer. Makes the job elastic, as --host-discovery-script does.",
         COUNT, flags=("--min-np", "--min-num-proc"), least=1, absent="that of -np"),
    Knob("max_num_proc", ELASTIC, "Largest number of workers.",
         COUNT, flags=("--max-np", "--max-num-proc"), least=1, absent="all slots of the hosts"),
    Knob("elastic_timeout", ELASTIC, "Longest wait for enough hosts, at the start and after a change.",
         SECONDS, 600.0, flags=("--elastic-timeout",), variable="HOROVOD_ELASTIC_TIMEOUT", least=0.001),
    Knob("reset_limit", ELASTIC, "Largest number of changes of membership; the next one ends the job. A lost worker "
         "and its replacement count as one.",
         COUNT, 100, flags=("--reset-limit",), least=0),
    Knob("restart_limit", ELASTIC, "Number of workers that may fail in a slot in a row, none after 60 s of training, "
         "until the slot is abandoned. Another worker starts in it while the others train on: at once, then after 1, "
         "2, 4 s and so on, up to a minute. 0: none does, and the host is left out, as in Horovod.",
         COUNT, 5, flags=("--restart-limit",), least=0),
    Knob("newcomer_timeout", ELASTIC, "Time limit for a worker that starts while others train to reach the training "
         "function. A slower one is killed, and counts as failed.",
         SECONDS, 600.0, flags=("--newcomer-timeout",), least=0.001),
    Knob("leave_timeout", ELASTIC, "Time limit for a worker to leave a membership epoch after another one has, because "
         "of a loss. A slower one is killed, and its host left out. Choose a longer limit than a rank ever is away "
         "from the others, for a checkpoint that it saves, for example.",
         SECONDS, 60.0, flags=("--leave-timeout",), least=0.001),
    Knob("blacklist_cooldown_range", ELASTIC, "Seconds for which a failed host is left out, at first and at most; "
         "each time twice as long.",
         default="10 300", flags=("--blacklist-cooldown-range",), placeholder="MIN MAX", many="2"),
    Knob("use_gloo", COMPATIBLE, "Horovod's controller without MPI. No effect: fusionrun never uses MPI.",
         SWITCH, flags=("--gloo",)),
    Knob("use_mpi", COMPATIBLE, "Horovod's controller with MPI.", SWITCH, flags=("--mpi",), idle=_NO_MPI),
    Knob("use_jsrun", COMPATIBLE, "Horovod's start through jsrun.", SWITCH, flags=("--jsrun",), idle=_NO_MPI),
    Knob("controller", COMPATIBLE, "Horovod's controller.",
         default="gloo", yaml="controller", choices=("gloo", "mpi"), idle=_NO_MPI),
    Knob("disable_cache", COMPATIBLE, "Horovod's: repeat the checks of the hosts.",
         SWITCH, flags=("--disable-cache",), idle=_NO_CHECKS),
    Knob("cycle_time_ms", COMPATIBLE, "Horovod's delay between two fusion cycles.",
         SECONDS, flags=("--cycle-time-ms",), variable="HOROVOD_CYCLE_TIME", yaml="params.cycle_time_ms",
         bare=1e-3, bare_variable=1e-3, idle=_NO_CYCLE),
    Knob("cache_capacity", COMPATIBLE, "Horovod's number of tensors whose negotiation is cached.",
         COUNT, flags=("--cache-capacity",), variable="HOROVOD_CACHE_CAPACITY", yaml="params.cache_capacity", least=0,
         idle=_NO_CYCLE),
    Knob("hierarchical_allreduce", COMPATIBLE, "Horovod's reduction inside a node first.",
         SWITCH, flags=("--hierarchical-allreduce",), off=("--no-hierarchical-allreduce",),
         variable="HOROVOD_HIERARCHICAL_ALLREDUCE", yaml="params.hierarchical_allreduce", idle=_NODE_FIRST),
    Knob("hierarchical_allgather", COMPATIBLE, "Horovod's gathering inside a node first.",
         SWITCH, flags=("--hierarchical-allgather",), off=("--no-hierarchical-allgather",),
         variable="HOROVOD_HIERARCHICAL_ALLGATHER", yaml="params.hierarchical_allgather", idle=_NODE_FIRST),
    Knob("torus_allreduce", COMPATIBLE, "Horovod's reduction on a torus.",
         SWITCH, flags=("--torus-allreduce",), off=("--no-torus-allreduce",), variable="HOROVOD_TORUS_ALLREDUCE",
         yaml="params.torus_allreduce", idle=_NODE_FIRST),
    Knob("mpi_threads_disable", COMPATIBLE, "Horovod's use of MPI from one thread.",
         SWITCH, flags=("--mpi-threads-disable",), off=("--no-mpi-threads-disable",),
         variable="HOROVOD_MPI_THREADS_DISABLE", yaml="library_options.mpi_threads_disable", idle=_NO_MPI),
    Knob("mpi_args", COMPATIBLE, "Horovod's arguments for mpirun.", flags=("--mpi-args",), idle=_NO_MPI),
    Knob("tcp", COMPATIBLE, "Horovod's: MPI over TCP only.",
         SWITCH, flags=("--tcp",), variable="NCCL_IB_DISABLE", idle=_NO_MPI),
    Knob("binding_args", COMPATIBLE, "Horovod's arguments that bind processes to cores.",
         flags=("--binding-args",), idle=_NO_MPI),
    Knob("num_nccl_streams", COMPATIBLE, "Horovod's number of NCCL streams.",
         COUNT, flags=("--num-nccl-streams",), variable="HOROVOD_NUM_NCCL_STREAMS",
         yaml="library_options.num_nccl_streams", least=0, idle=_NO_NCCL),
    Knob("thread_affinity", COMPATIBLE, "Horovod's core for its background thread.",
         COUNT, flags=("--thread-affinity",), variable="HOROVOD_THREAD_AFFINITY",
         yaml="library_options.thread_affinity", least=0, idle=_NO_THREAD),
    Knob("gloo_timeout_seconds", COMPATIBLE, "Horovod's time limit of Gloo's operations.",
         SECONDS, flags=("--gloo-timeout-seconds",), variable="HOROVOD_GLOO_TIMEOUT_SECONDS",
         yaml="library_options.gloo_timeout_seconds", idle=_NO_GLOO),
)
# fmt: on

KNOBS = OF_LAUNCHER + OF_SETTINGS
