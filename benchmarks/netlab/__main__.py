"""python -m benchmarks.netlab --hosts 4 --rate 1gbit -- COMMAND...   runs COMMAND beside a lab of four hosts
python -m benchmarks.netlab list                                    shows the labs on this machine
python -m benchmarks.netlab clean [--all]                           removes the labs whose owner is dead (or all)

COMMAND runs in the machine's own network, or with --inside I on host I, and finds in its environment NETLAB_HOSTS
(names, comma between) and NETLAB_AGENT (for fusionrun --rsh-agent). The exit status is COMMAND's.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Sequence

from benchmarks.netlab import registry
from benchmarks.netlab.iproute import NetlabError, preflight
from benchmarks.netlab.lab import Netlab
from benchmarks.netlab.paths import Path, parsed

TERM_GRACE_S = 10.0


def main(argv: Sequence[str]) -> int:
    # argparse rather than Typer: a subcommand or `-- COMMAND` is one choice too many for click's groups.
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.netlab", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("action", nargs="?", choices=["list", "clean"])
    parser.add_argument("--all", action="store_true", help="clean: also labs whose owner is alive")
    parser.add_argument("--hosts", type=int, default=2, metavar="N", help="hosts in the lab (2)")
    parser.add_argument("--rate", help="limit of every link in each direction, such as 1gbit (none)")
    parser.add_argument(
        "--host-rate", action="append", default=[], metavar="I=RATE", help="limit of host I in its place; repeatable"
    )
    parser.add_argument("--delay", help="what a packet takes longer to any host, such as 20ms (none); one way")
    parser.add_argument("--jitter", help="by how much the delay goes up and down, such as 5ms (none)")
    parser.add_argument("--loss", help="share of packets that are lost, such as 0.01%% (none)")
    parser.add_argument(
        "--path", action="append", default=[], metavar="I[-J]=WHAT",
        help="path of host I, or of the pair I-J, as 0-1=delay:40ms,loss:0.1%%,rate:9mbit; repeatable",
    )  # fmt: skip
    parser.add_argument("--congestion", help="TCP's congestion control, such as cubic, with a delay, loss or path")
    parser.add_argument("--mtu", type=int, default=1500, metavar="BYTES", help="bytes in a packet (1500)")
    parser.add_argument("--inside", type=int, metavar="I", help="run COMMAND on host I")
    own, command = _split(argv)
    options = parser.parse_args(own)
    if (options.action is None) == (not command):
        parser.error("give either `-- COMMAND...`, or one of `list` and `clean`")
    try:
        rates = _host_rates(options.host_rate)
    except ValueError:
        parser.error("--host-rate takes I=RATE, such as 2=100mbit")
    try:
        special = _paths(options.path)
    except ValueError:
        parser.error("--path takes I=WHAT or I-J=WHAT, such as 0-1=delay:40ms")
    try:
        if problem := preflight():
            raise NetlabError(problem)
        if options.action == "list":
            return _show("", registry.records())
        if options.action == "clean":
            return _show("removed ", registry.clean(everything=options.all))
        words = [f"{name}:{value}" for name in ("delay", "jitter", "loss") if (value := getattr(options, name))]
        path = parsed(",".join(words), Path()) if words else None
        lab = Netlab(
            options.hosts, options.rate, rates=rates, mtu=options.mtu, path=path, paths=special,
            congestion=options.congestion,
        )  # fmt: skip
        try:
            with lab:
                return _run(lab, command, options.inside)
        finally:
            if lab.relayed:
                print(f"netlab: the relay {json.dumps(lab.relayed)}", file=sys.stderr)
    except NetlabError as error:
        print(f"netlab: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130


def _split(argv: Sequence[str]) -> tuple[list[str], list[str]]:
    cut = argv.index("--") if "--" in argv else len(argv)
    return list(argv[:cut]), list(argv[cut + 1 :])


def _host_rates(items: Sequence[str]) -> dict[int, str | None]:
    pairs = [item.partition("=") for item in items]
    return {int(index): rate for index, _, rate in pairs}


def _paths(items: Sequence[str]) -> dict[int | tuple[int, int], str]:
    found: dict[int | tuple[int, int], str] = {}
    for item in items:
        ends, _, what = item.partition("=")
        one, dash, other = ends.partition("-")
        found[(int(one), int(other)) if dash else int(one)] = what
    return found


def _show(verb: str, records: Sequence[registry.LabRecord]) -> int:
    for record in records:
        state = "alive" if record.alive else "dead"
        owner = f"owner {record.owner} {state}" if record.owner is not None else "owner unknown"
        print(f"{verb}nl{record.lab}  10.77.{record.lab}.0/24  {owner}  {' '.join(record.hosts)}")
    return 0


def _run(lab: Netlab, command: Sequence[str], inside: int | None) -> int:
    environment = {**os.environ, "NETLAB_HOSTS": ",".join(h.name for h in lab.hosts), "NETLAB_AGENT": lab.agent}
    try:
        child = lab.run(inside, command, env=environment)
    except FileNotFoundError as error:
        raise NetlabError(f"the command {command[0]!r} cannot be started: {error.strerror}.") from error
    try:
        status = child.wait()
    except BaseException:
        child.terminate()
        try:
            child.wait(TERM_GRACE_S)
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()
        raise
    return status if status >= 0 else 128 - status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
