"""Host strings and hostfiles.

A host is written `[user@]name[:slots]` in `-H`, separated by commas, and `[user@]name [slots=N]` on a line of its own
in a hostfile, where `#` starts a comment. Slots default to those of `--slots-per-host`, which is 1. An IPv6 address
stands in brackets: `[fe80::1%eth0]:2`.

A host that is named more than once is one node with the sum of the slots, in the place of its first mention: batch
systems write one line a slot. Two names of one machine (`127.0.0.1:2,localhost:2`) are two nodes.
"""

from __future__ import annotations

import re
import socket
from collections.abc import Iterable
from dataclasses import dataclass, replace

from fusion_rt.core.errors import SettingError

MAX_SLOTS = 4096  # workers of one host; more is a typing mistake
_USER = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*")
_NAME = re.compile(r"[A-Za-z0-9_](?:[A-Za-z0-9_.-]*[A-Za-z0-9_])?")  # never starts like an option of ssh
_FORM = "NAME, NAME:SLOTS or USER@NAME:SLOTS, and an IPv6 address in brackets"


@dataclass(frozen=True)
class Host:
    """One host of a job: its name or IP address (no brackets), its slots, and the user to log in as ("": the same)."""

    name: str
    slots: int = 1
    user: str = ""

    @property
    def target(self) -> str:
        """The word that ssh is given to reach it."""
        return f"{self.user}@{self.name}" if self.user else self.name

    @property
    def is_loopback(self) -> bool:
        """Tells whether the name means the machine it is used on, whichever that is."""
        return self.name in ("localhost", "::1") or re.fullmatch(r"127(\.[0-9]{1,3}){3}", self.name) is not None

    @property
    def is_local(self) -> bool:
        """Tells whether the name means this machine, as far as the name alone tells."""
        own = socket.gethostname()
        return not self.user and (self.is_loopback or self.name in (own, own.split(".")[0]))


def parse_hosts(text: str, slots: int = 1) -> tuple[Host, ...]:
    """The hosts of `-H h1:2,h2:4`; `slots` are those of a host that is named without.

    Raises:
        SettingError: an entry is not a host, or one host is to be reached as two users.
    """
    return _merge(parse_host(entry.strip(), slots) for entry in text.split(","))


def parse_hostfile(text: str, source: str = "hostfile", slots: int = 1) -> tuple[Host, ...]:
    """The hosts of a hostfile's text; `source` names the file in messages, `slots` as in `parse_hosts`.

    Raises:
        SettingError: a line is not a host (the message has its number), or there is none.
    """
    hosts = []
    for number, line in enumerate(text.splitlines(), start=1):
        words = line.partition("#")[0].split()
        if not words:
            continue
        try:
            hosts.append(_parse_words(words, slots))
        except SettingError as error:
            raise SettingError(f"{source}, line {number}: {error}") from None
    if not hosts:
        raise SettingError(f"{source} names no host")
    return _merge(hosts)


def _parse_words(words: list[str], slots: int) -> Host:
    """One line of a hostfile, split at white space."""
    host = parse_host(words[0], slots)
    for word in words[1:]:
        key, equals, value = word.partition("=")
        if key != "slots" or not equals or ":" in words[0].rpartition("]")[2]:
            raise SettingError(f"{word!r} is not understood; a line is NAME [slots=N]")
        host = replace(host, slots=_parse_slots(value, words[0]))
    return host


def parse_host(text: str, default_slots: int) -> Host:
    """Parses `[user@]name[:slots]`.

    Raises:
        SettingError: the text is not a host.
    """
    user, at, rest = text.rpartition("@")
    if at and not _USER.fullmatch(user):
        raise SettingError(f"{user!r} in {text!r} is not a user name; a host is {_FORM}")
    if rest.startswith("["):
        name, closed, tail = rest[1:].partition("]")
        if not closed or not _is_ipv6(name):
            raise SettingError(f"{text!r} has no IPv6 address in its brackets; a host is {_FORM}")
        colon, slots = tail[:1], tail[1:]
    else:
        name, colon, slots = rest.partition(":")
        if ":" in slots:
            raise SettingError(f"{text!r} has more than one colon; a host is {_FORM}")
        if not _NAME.fullmatch(name):
            raise SettingError(f"{text!r} is not a host; a host is {_FORM}")
    if colon not in ("", ":"):
        raise SettingError(f"{text!r} goes on after its brackets; a host is {_FORM}")
    return Host(name, _parse_slots(slots, text) if colon else default_slots, user)


def _parse_slots(digits: str, text: str) -> int:
    if not re.fullmatch(r"[0-9]{1,9}", digits) or not 1 <= int(digits) <= MAX_SLOTS:
        raise SettingError(f"{digits!r} slots of {text!r} is not a number from 1 to {MAX_SLOTS}")
    return int(digits)


def _is_ipv6(text: str) -> bool:
    address, percent, zone = text.partition("%")
    if percent and not _NAME.fullmatch(zone):
        return False
    try:
        socket.inet_pton(socket.AF_INET6, address)
    except (OSError, ValueError):  # ValueError: a null character
        return False
    return True


def _merge(hosts: Iterable[Host]) -> tuple[Host, ...]:
    merged: dict[str, Host] = {}
    for host in hosts:
        seen = merged.get(host.name)
        if seen is not None and seen.user != host.user:
            raise SettingError(f"host {host.name} is named as {seen.target!r} and as {host.target!r}; name one user")
        merged[host.name] = host if seen is None else replace(seen, slots=seen.slots + host.slots)
    return tuple(merged.values())
