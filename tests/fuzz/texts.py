"""Targets: what people and launchers write."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping

from fusion_rt import algorithms, codecs, wire
from fusion_rt.algorithms import AlgorithmError
from fusion_rt.codecs import CodecError
from fusion_rt.core import mixing
from fusion_rt.core.errors import FusionError, MixingError, SettingError
from fusion_rt.launchers import meeting
from fusion_rt.launchers.environment import detect, hosts_of_list
from fusion_rt.local import stack_text
from fusion_rt.runner.command import config_file
from fusion_rt.runner.decisions.host_list import parse_hostfile, parse_hosts
from fusion_rt.runner.decisions.worker_errors import echo_of, excerpt, in_a_line, last_error
from fusion_rt.runner.launch.worker_output import Lines
from fusion_rt.settings import OF_SETTINGS, Settings
from tests.fuzz.engine import Target

_HOSTS = ("a:2,b:4", "user@a:1,[fe80::1%eth0]:3", "10.0.0.1", "a:2,a:3")
_HOSTFILES = ("a slots=2\nb\n# c\n\nuser@d:3 # e\n", "[::1] slots=4\n")
_CODECS = (
    "dense", "fp16", "topk(density=0.01, value='int8', index=\"delta\")", "gaussiank(warmup=3)", "randomk(seed=7)",
    "thresholdk(exclude='*.bias', densities='a*: 0.5, b: 0.1')", "int8(block=64)", "int2(rounding='random', decay=0.9)",
    "onebit(momentum=0.9, nesterov=True)",
    "powersgd(rank=2, warm_start=False)", "topk(density=1e999)", "topk(clip=1e308, minimum=0x10)",
)  # fmt: skip
_ALGORITHMS = (
    "allreduce", "ssp(staleness=4)", "local_sgd(steps=8)", "adpsgd", "dpsgd(topology='ring')", "choco(gamma=0.4)",
    "easgd(synchronous_home=True)", "softsync(contributions=2)", "partial(share=0.5)", "diloco", "sgp",
    "sparseloco(decay=0.9)",
    "diloco(fragments=3, delay=2, mix=0.5)", "decoupled(quorum=2, grace=1e308)", "noloco(topology='random-pairs')",
)  # fmt: skip
_GRAPHS = (
    "ring",
    "torus",
    "exponential",
    "one-peer-exponential",
    "complete",
    "bipartite",
    "hypercube",
    "random-pairs",
    "file:/dev/null",
)
_MATRICES = (
    "0.5 0.25 0.25\n0.25 0.5 0.25\n0.25 0.25 0.5\n", "# three\n1,0,0\n0 1 0\n0 0 1\n", ".5 .5 0\n.5 .25 .25\n0 .25 .75",
    "0 1 0\n0 0 1\n1 0 0",
)  # fmt: skip
_YAML = (
    "params:\n  fusion_threshold_mb: 32\n  compression: topk(density=0.01)\nautotune:\n  enabled: false\n",
    "stall_check: {enabled: yes, warning_time_seconds: 1m}\nlogging: {level: INFO, with_timestamp: 1}\ntypo: 1\n",
    "params: &p {algorithm: allreduce}\nverbose: true\nnum_proc: 0x10\n? [a, b]\n: 3\n",
    "a: &a {x: 1}\nb: &b {<<: [*a, *a]}\nc: {<<: *b}\nd: 2024-13-01\ne: !!binary aGVsbG8=\nf: 1:30:00\n",
)
_SETTINGS = (
    "64MiB",
    "1e3",
    "2min",
    "0",
    "topk(density=0.01)",
    "true",
    "ssp(staleness=4)",
    "-1",
    "a,b",
    "1e308GB",
    "all",
)
_NODE_LISTS = ("a[01-03,7],b", "rack[1-2]n[01-16]", "a[2:1-3,7]", "a[1-65536]")
_URIS = ("1234.0;tcp://10.0.0.1,10.1.0.1:4711;tcp6://[2001:db8::1]:4712",)
_TRACEBACKS = (
    'Traceback (most recent call last):\n  File "a.py", line 1\nValueError: x\n',
    "HorovodInternalError: rank 1 failed: Traceback (most recent call last):\n  File\nKeyError: 1\nafter\r\n",
)
_STACKS = (
    f'Stack (most recent call first):\n  File "{__file__}", line 12 in slow\n  File "a", line 3 in b\n'
    '  File "<string>", line 1 in <module>\n',
)
_OF_STACKS = (
    b'  File "/dev/zero", line 1 in f\n',
    b"Stack (most recent call first):\n",
    b"\n",
    b'"',
    b"\0",
    b" in ",
)
_ENVIRONMENTS = (
    {"RANK": "1", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "a",
     "MASTER_PORT": "9"},
    {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_LOCAL_RANK": "0",
     "OMPI_COMM_WORLD_LOCAL_SIZE": "1", "OMPI_MCA_orte_hnp_uri": _URIS[0]},
    {"SLURM_PROCID": "1", "SLURM_NTASKS": "4", "SLURM_LOCALID": "1", "SLURM_STEP_ID": "0", "SLURM_JOB_ID": "7",
     "SLURM_STEP_NODELIST": "a[1-2]", "SLURM_NODEID": "0"},
    {"PMI_RANK": "0", "PMI_SIZE": "2", "MPI_LOCALRANKID": "0", "MPI_LOCALNRANKS": "1"},
    {"HOROVOD_RANK": "0", "HOROVOD_SIZE": "2", "HOROVOD_LOCAL_RANK": "0", "HOROVOD_LOCAL_SIZE": "1",
     "HOROVOD_HOSTNAME": "a", "HOROVOD_GLOO_RENDEZVOUS_ADDR": "a", "HOROVOD_GLOO_RENDEZVOUS_PORT": "80"},
)  # fmt: skip
_KEYS = tuple(dict.fromkeys(knob.yaml.rpartition(".")[2].encode() for knob in OF_SETTINGS if knob.yaml))
_OF_YAML = (
    *_KEYS,
    b"&a ",
    b"*a",
    b"<<: ",
    b"!!int ",
    b"!!timestamp ",
    b"!!binary ",
    b"? ",
    b"---\n",
    b"|\n",
    b"{",
    b"]",
)
_OF_LISTS = (b"[", b"]", b"-", b",", b":", b"999999999")
_SYNTAX = (
    b"(",
    b")",
    b"='",
    b"'",
    b"density=",
    b"lambda: 0",
    b"f''",
    b"\\x01",
    b"1_0",
    b"1j",
    b"{}",
    b"[]",
    b"*",
    b"**",
)
_FILE = os.memfd_create("fuzz")  # for what is read from files
_PATH = f"/proc/self/fd/{_FILE}"


def targets() -> list[Target]:
    """Hosts, settings, choices, files, lists of launchers, and what workers print."""
    return [
        _text("hosts", parse_hosts, _HOSTS, SettingError),
        _text("hostfile", parse_hostfile, _HOSTFILES, SettingError, (b"slots=", b"#", b"@")),
        _text("codec", _codec, _CODECS, CodecError, _SYNTAX, cost=5),
        _text("algorithm", _algorithm, _ALGORITHMS, AlgorithmError, _SYNTAX, cost=5),
        _text("mixing graph", lambda text: mixing.parse(text, 8), _GRAPHS, MixingError, cost=5),
        Target("mixing matrix", _encoded(_MATRICES), _matrix, (MixingError,), words=(b"nan", b"inf", b"1e308"), cost=5),
        Target("YAML", _encoded(_YAML), _yaml, (SettingError,), words=_OF_YAML, cost=10),
        _text("settings", _settings, _SETTINGS, SettingError, (b"MiB", b"ms", b"1e400", b"inf", b"nan"), cost=5),
        _text("list of nodes", hosts_of_list, _NODE_LISTS, FusionError, _OF_LISTS, cost=10, nbytes=64 << 20),
        _text("Open MPI's URI", meeting.hosts_of_uri, _URIS, FusionError),
        Target("environment", list(map(_as_bytes, _ENVIRONMENTS)), _environment, (FusionError,), words=_NAMES, cost=5),
        Target("traceback", _encoded(_TRACEBACKS), _traceback, (), words=(b"Traceback (most recent call last):",)),
        Target("stacks", _encoded(_STACKS), _stacks, (), words=_OF_STACKS, cost=2),
        Target("output", [b"a\nb\r\nc\rd", b"x" * 100], _output, (), cost=5),
    ]  # fmt: skip


def _encoded(texts: tuple[str, ...]) -> list[bytes]:
    return [text.encode() for text in texts]


def _text(
    name: str,
    read: Callable[[str], object],
    seeds: tuple[str, ...],
    error: type[Exception],
    words: tuple[bytes, ...] = (),
    cost: int = 1,
    nbytes: int = 16 << 20,
) -> Target:
    def run(data: bytes) -> bool:
        read(data.decode("utf-8", "surrogateescape"))
        return True

    return Target(name, _encoded(seeds), run, (error,), nbytes, words, cost)


def _codec(text: str) -> None:
    codec = codecs.parse.__wrapped__(text)  # without its cache
    assert codecs.parse.__wrapped__(str(codec)) == codec


def _algorithm(text: str) -> None:
    algorithm = (
        algorithms.parse.__wrapped__(text) if hasattr(algorithms.parse, "__wrapped__") else algorithms.parse(text)
    )
    assert algorithms.parse(str(algorithm)) == algorithm


def _matrix(data: bytes) -> bool:
    _rewrite(data)
    found = mixing.parse(f"file:{_PATH}", 3)
    assert found.row_stochastic or found.column_stochastic
    assert 0 <= found.spectral_gap() <= 1
    return True


def _yaml(data: bytes) -> bool:
    _rewrite(data)
    config_file.read(_PATH)
    return True


def _rewrite(data: bytes) -> None:
    os.ftruncate(_FILE, 0)
    os.pwrite(_FILE, data, 0)


def _settings(text: str) -> None:
    """The text as the value of each variable."""
    clean = text.replace("\0", "")  # which no variable can have
    wrong = 0
    for knob in OF_SETTINGS:
        try:
            settings = Settings.from_env({knob.variable: clean, "FUSION_SNAPSHOT_DIRECTORY": "/tmp"})
            knob.write(getattr(settings, knob.name))
        except SettingError:
            wrong += 1
    if wrong == len(OF_SETTINGS):
        raise SettingError("none")


def _as_bytes(environ: Mapping[str, str]) -> bytes:
    return "\n".join(f"{name}={value}" for name, value in environ.items()).encode()


_NAMES = tuple(f"{name}=".encode() for environ in _ENVIRONMENTS for name in environ)


def _environment(data: bytes) -> bool:
    lines = data.replace(b"\0", b"").decode("utf-8", "surrogateescape").split("\n")
    pairs = (line.partition("=") for line in lines)
    detect({name: value for name, _, value in pairs if name})
    return True


def _traceback(data: bytes) -> bool:
    text = data.decode(errors="replace")
    last_error(text), in_a_line(text), echo_of(text), excerpt(text)
    return True


def _stacks(data: bytes) -> bool:
    """What a worker has written into the memory for its stacks, sent on to the coordinator."""
    stack = stack_text.with_sources(stack_text.parse(data.decode(errors="replace"), "/"))
    located = wire.Located(1, (wire.Whereabouts(0, 1, "sleeping (S)", "", stack),))
    assert wire.decode_peer_message(wire.encode(located)) == located
    return bool(stack.frames)


def _output(data: bytes) -> bool:
    lines = Lines(limit=64)
    parts = [lines.feed(data[start : start + 7]) for start in range(0, len(data), 7)]
    whole = b"".join(b"".join(part) for part in (*parts, lines.flush()))
    assert whole.replace(b"\n", b"") == data.replace(b"\n", b"")
    return True
