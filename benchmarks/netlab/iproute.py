"""The commands `ip` and `tc`, their requirements, and rates in their notation."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

_CAPABILITIES = {"CAP_NET_ADMIN": 12, "CAP_SYS_ADMIN": 21}  # bit numbers, linux/capability.h
_UNITS = {"bit": 1, "kbit": 10**3, "mbit": 10**6, "gbit": 10**9}

# A bucket of one millisecond, but never less than two of the largest segments that the kernel passes down in one piece.
_BURST_S = 1e-3
_MIN_BURST_BYTES = 128 * 1024
# How long a packet may queue before it is dropped: one stream then fills the link while it recovers from a loss.
_QUEUE_S = 20e-3


class NetlabError(RuntimeError):
    """A lab cannot be made, changed or removed; the message says what to do about it."""


def preflight() -> str | None:
    """Returns a sentence that says why no lab can be made here, or None when one can."""
    if os.geteuid() != 0:
        return "network namespaces need root: run this with sudo."
    for command in ("ip", "tc"):
        if shutil.which(command) is None:
            return f"the command `{command}` is missing: install iproute2 (Debian: apt-get install iproute2)."
    effective = int(
        re.findall(r"^CapEff:\s*(\w+)", Path("/proc/self/status").read_text(encoding="utf-8"), re.MULTILINE)[0], 16
    )
    missing = [name for name, bit in _CAPABILITIES.items() if not effective >> bit & 1]
    if missing:
        return f"root lacks {' and '.join(missing)} here: start the container with them (docker run --privileged)."
    return None


def command(*argv: str) -> str:
    """Runs `ip` or `tc` and returns what it printed.

    Raises:
        NetlabError: it failed; the message has the command and its error output.
    """
    # A session of its own: Ctrl-C at the terminal must not kill the command that is just removing the lab.
    done = subprocess.run(argv, stdin=subprocess.DEVNULL, capture_output=True, text=True, start_new_session=True)
    if done.returncode != 0:
        raise NetlabError(f"`{' '.join(argv)}` failed with status {done.returncode}: {done.stderr.strip()}")
    return done.stdout


def bits_per_second(rate: str) -> int:
    """Parses a rate such as "1gbit", "2.5gbit" or "100mbit", in bit/s.

    Raises:
        NetlabError: `rate` is not a positive number followed by bit, kbit, mbit or gbit.
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)(k|m|g)?bit", rate.strip().lower())
    bits = int(float(match[1]) * _UNITS[f"{match[2] or ''}bit"]) if match else 0
    if bits < 1:
        raise NetlabError(f"{rate!r} is not a rate: write a number and bit, kbit, mbit or gbit, such as 1gbit.")
    return bits


def shape(namespace: str, device: str, rate: str | None) -> None:
    """Limits what `device` sends to `rate`, or lifts the limit when `rate` is None.

    The rate counts Ethernet frames, as `tc` does: at an MTU of 1500 TCP's payload is 95.6 % of it (1448 of 1514 bytes).
    """
    if rate is None:
        if " tbf " in command("tc", "-n", namespace, "qdisc", "show", "dev", device, "root"):
            command("tc", "-n", namespace, "qdisc", "del", "dev", device, "root")
        return
    bits = bits_per_second(rate)
    burst = max(_MIN_BURST_BYTES, int(bits / 8 * _BURST_S))
    limit = burst + max(_MIN_BURST_BYTES, int(bits / 8 * _QUEUE_S))
    tbf = ("tbf", "rate", f"{bits}bit", "burst", str(burst), "limit", str(limit))
    command("tc", "-n", namespace, "qdisc", "replace", "dev", device, "root", *tbf)
