"""The meeting of the workers of a job that `fusionrun` did not start: from the launcher's words to hosts and ports."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field

from fusion_rt.core.errors import FusionError

Address = tuple[str, int]  # host name or IP address, and port

LIKELY_HOSTS = 4  # hosts of a list on which rank 0 is looked for
PORTS_OF_A_MEETING = range(20000, 29000)  # where none was chosen: below those that systems hand out
_PORTS_TRIED = 4


@dataclass(frozen=True)
class Meeting:
    """The way in which the workers of a job without `fusionrun` meet.

    Attributes:
        kind: the server of the store: "horovodrun", "torchrun" (its agent), "rank0", or "script" (which has opened it).
        addresses: where it is, or may be, likeliest first.
        scope: first part of the keys, of this start of the job alone.
        node: the same for the workers of one node, and for no others.
        host: name of this host, for people.
        expected: names of all hosts, if the launcher tells.
        interfaces: network interfaces that the daemon may use; empty: any.
        secret: known to the job's processes alone, if not empty.
    """

    kind: str
    addresses: tuple[Address, ...]
    scope: str
    node: str
    host: str
    expected: tuple[str, ...] = ()
    interfaces: tuple[str, ...] = ()
    secret: bytes = field(default=b"", repr=False)

    @property
    def tells_hosts(self) -> bool:
        """True if only the meeting tells whether the job runs on several hosts, and so needs a secret."""
        return self.kind == "script"


def addresses_of(
    hosts: tuple[str, ...], scope: str, address: str, port: int, among: range = PORTS_OF_A_MEETING
) -> tuple[Address, ...]:
    """The addresses at which rank 0 may serve a store.

    Args:
        hosts: those that the launcher names, likeliest first.
        scope: of the job's keys; its ports are drawn from it.
        address: MASTER_ADDR, or "".
        port: MASTER_PORT, or 0.
        among: ports from which one is drawn where that is 0.

    Raises:
        FusionError: nothing says where rank 0 is.
    """
    hosts = (address,) if address else hosts[:LIKELY_HOSTS]
    if not hosts:
        raise FusionError("this job runs on several hosts, and its launcher does not say where rank 0 is: set "
                          "MASTER_ADDR to the name or address of its host, the same on all hosts")  # fmt: skip
    drawn = hashlib.blake2b(scope.encode(), digest_size=2 * _PORTS_TRIED).digest()
    ports = [among[int.from_bytes(drawn[i : i + 2], "big") % len(among)] for i in range(0, len(drawn), 2)]
    return tuple((host, each) for host in hosts for each in ([port] if port else ports))


def hosts_of_uri(uri: str) -> tuple[str, ...]:
    """The addresses in Open MPI's `1234.0;tcp://10.0.0.1,10.1.0.1:4711;tcp6://[2001:db8::1]:4712`."""
    found: list[str] = []
    for part in uri.split(";")[1:]:
        addresses = part.partition("://")[2].rpartition(":")[0]
        found += [address.strip("[]") for address in addresses.split(",") if address]
    return tuple(found)


def identity(launcher: str, *parts: str) -> str:
    """An id that tells a start of a job from all others."""
    text = "\0".join(parts).encode("utf-8", "surrogateescape")
    return f"{launcher}-{hashlib.blake2b(text, digest_size=8).hexdigest()}"
