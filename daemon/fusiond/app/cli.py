"""The `fusiond` command: start, status, top, dashboard, stop, logs, clean."""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import time
from enum import Enum
from typing import Annotated

import typer

from fusion_rt import wire
from fusion_rt.core.errors import FusionError
from fusion_rt.core.topology import Topology
from fusion_rt.host import bootstrap, daemon_start
from fusion_rt.local.daemons import FoundDaemon, ask, find
from fusion_rt.settings import Settings

app = typer.Typer(
    help="The fusion_rt daemon: one on each node of a job, owner of all its communication.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
_ANSWER = 10.0  # seconds for a daemon


class Role(str, Enum):
    """Roles of a daemon's node."""

    WORKER = "worker"
    SHARD = "shard"


JobOption = Annotated[str, typer.Option(help="Id of the job; needed when daemons of several jobs run on this host.")]
NodeOption = Annotated[int, typer.Option(help="Index of the node, when several nodes of a job share this host.")]


@app.command()
def start(
    job: Annotated[str, typer.Option(help="Id of the job: letters, digits, - and _.")] = "default",
    size: Annotated[int, typer.Option(help="Number of workers, all on this host.", min=1)] = 1,
    foreground: Annotated[bool, typer.Option(help="Stay in the foreground and log to standard error.")] = False,
    config_stdin: Annotated[
        bool, typer.Option(help="Read the configuration from standard input (what fusionrun does).")
    ] = False,
    role: Annotated[
        Role | None,
        typer.Option(
            help="Role of the node: with workers, or only with parameter shards in a job of several nodes, which "
            "its configuration (--config-stdin) names. The default is that of the configuration."
        ),
    ] = None,
) -> None:
    """Starts a daemon; by default in the background, for `--size` workers on this host."""
    if config_stdin:
        line, rest = _read_line(0)
        try:
            config = bootstrap.decode_line(line, bootstrap.DaemonConfig)
        except FusionError as error:
            _cannot_start(str(error), as_json=True)
        if why := _is_not(role, config):
            _cannot_start(why, as_json=True)
        _serve(config, rest, as_json=True)
    if role is Role.SHARD:
        _cannot_start(
            "a node without workers is one of several, whose configuration and table of peers have to come on standard "
            "input (--config-stdin); `fusionrun --shard-hosts` starts such daemons by itself",
            as_json=False,
        )
    topology = Topology((socket.gethostname(),), (tuple(range(size)),))
    try:
        config = bootstrap.decode_line(
            bootstrap.encode_line(bootstrap.DaemonConfig(job, 0, topology, attached=False)), bootstrap.DaemonConfig
        )
    except FusionError as error:
        _cannot_start(f"the job cannot be called {job!r}: {error}", as_json=False)
    if foreground:
        _serve(config, b"", as_json=False)
    _detach(config)


@app.command()
def status(
    job: JobOption = "",
    node: NodeOption = -1,
    as_json: Annotated[bool, typer.Option("--json", help="Everything, as one JSON document.")] = False,
) -> None:
    """Shows the daemons of this user on this host: workers, operations, traffic."""
    found = [_ask(each, wire.StatusRequest()) for each in _listening(job, node)]
    if as_json:
        typer.echo(json.dumps(found, indent=2))
        return
    from fusiond.live.status_report import show_status  # rich is imported only where a table is drawn

    show_status(found)


@app.command()
def top(
    job: JobOption = "",
    interval: Annotated[float, typer.Option(help="Seconds between looks.", min=0.2)] = 2.0,
    once: Annotated[bool, typer.Option("--once", help="Show one interval, and end.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="One interval, as a JSON document.")] = False,
) -> None:
    """Shows what jobs do right now: speed of ranks, stragglers, links, memory. On any host of a job."""
    from dataclasses import asdict

    from fusiond.live.client import Lookout

    lookout = Lookout(Settings.from_env().runtime_root(), job)
    lookout.look()
    if once or as_json:
        time.sleep(interval)
        rates = lookout.look()
        if as_json:
            typer.echo(json.dumps([asdict(each) for each in rates], indent=2))
            return
    from fusiond.live import top as screen  # rich is imported only where something is drawn

    if once:
        screen.show(rates)
    else:
        screen.watch(lookout, interval)


@app.command()
def dashboard(
    job: JobOption = "",
    port: Annotated[int, typer.Option(help="Port on this host's loopback address; 0: any.", min=0, max=65535)] = 9465,
    interval: Annotated[float, typer.Option(help="Seconds between looks.", min=0.2)] = 2.0,
) -> None:
    """Serves the tables of `fusiond top` as a web page, read-only and for this host only, until Ctrl-C."""
    from fusiond.live.client import Lookout
    from fusiond.live.dashboard import serve

    server = serve(Lookout(Settings.from_env().runtime_root(), job), port, interval)
    typer.echo(f"{server.address('/')} (Ctrl-C ends it)")
    try:
        signal.pause()
    except KeyboardInterrupt:
        pass
    finally:
        server.close()


@app.command()
def stop(job: JobOption = "", node: NodeOption = -1) -> None:
    """Ends a job: its workers raise an error that says so."""
    found = _listening(job, node)
    if len({each.job for each in found}) > 1:
        raise typer.BadParameter("daemons of several jobs run here; name one with --job")
    for each in found:
        answer = _ask(each, wire.StopRequest("fusiond stop"))
        if answer.get("state") == "gone":
            typer.echo(f"the daemon at {each.socket_path} is gone: {answer['failure']}", err=True)
        else:
            _wait_until_gone(each.socket_path)


@app.command()
def clean() -> None:
    """Removes the sockets, locks, logs and records of dead daemons and ended jobs of this user on this host."""
    from fusion_rt.tracing import files
    from fusiond.host.leftovers import remove_dead

    settings = Settings.from_env()
    gone = remove_dead(settings.runtime_root(), logs=True)
    for path in (*gone, *files.remove_dead(settings.trace_root())):
        typer.echo(f"removed leftovers in {path}")


@app.command()
def logs(
    job: JobOption = "",
    node: NodeOption = -1,
    lines: Annotated[int, typer.Option("--lines", "-n", help="How many lines from the end.", min=1)] = 100,
) -> None:
    """Prints the end of the logs of daemons that run, or ran, in the background on this host."""
    directories = [each.directory for each in _found(job, node)]
    shown = False
    for directory in directories:
        path = os.path.join(directory, "log")
        if os.path.exists(path):
            shown = True
            with open(path, encoding="utf-8", errors="replace") as file:
                typer.echo(f"==> {path} <==")
                typer.echo("".join(file.readlines()[-lines:]), nl=False)
    if not shown:
        typer.echo("no daemon of this user has left a log on this host", err=True)
        raise typer.Exit(1)


def _is_not(role: Role | None, config: bootstrap.DaemonConfig) -> str:
    """Returns why a node cannot have a role, as a sentence; empty when it can."""
    ranks, host = config.topology.ranks[config.node], config.topology.hosts[config.node]
    if role is Role.SHARD and ranks:
        return (
            f"node {config.node} (host {host}) has workers (ranks {list(ranks)}), so it is not there for shards alone; "
            "leave --role out, and name the host in FUSION_SHARD_HOSTS if it is to keep shards, too"
        )
    if role is Role.WORKER and not ranks:
        return f"node {config.node} (host {host}) has no workers; start its daemon with --role shard"
    return ""


def _serve(config: bootstrap.DaemonConfig, stdin_start: bytes, as_json: bool) -> None:
    """Runs a daemon in this process until its job is over, and exits."""
    from fusiond.app.daemon import Daemon
    from fusiond.app.status import configure_logging
    from fusiond.host import log_writer

    try:
        settings = Settings.from_env()
        configure_logging(settings.log_level, settings.log_timestamp)
        daemon = Daemon(config, settings, 0, stdin_start)
    except (FusionError, OSError) as error:
        _cannot_start(str(error), as_json)
    if as_json:
        os.write(1, bootstrap.encode_line(daemon.endpoint()))
    else:
        typer.echo(f"fusiond of job {config.job!r} listens (pid {os.getpid()})")
    try:
        code = daemon.run()
    except FusionError as error:
        log_writer.flush()  # the reason comes last
        typer.echo(f"fusiond: {error}", err=True)
        code = 1
    sys.exit(code)


def _cannot_start(error: str, as_json: bool) -> None:
    if as_json:
        os.write(1, bootstrap.encode_line(bootstrap.StartError(error)))
    typer.echo(f"fusiond: {error}", err=True)
    raise typer.Exit(1)


def _detach(config: bootstrap.DaemonConfig) -> None:
    """Starts the daemon in a session of its own, its standard error in its log."""
    settings = Settings.from_env()
    try:
        started = daemon_start.start(config, os.path.abspath(settings.runtime_root()), settings.start_timeout)
    except FusionError as error:
        _cannot_start(str(error), as_json=False)
    typer.echo(f"fusiond of job {config.job!r} listens (pid {started.pid})")
    started.leave()


def _found(job: str, node: int) -> list[FoundDaemon]:
    return list(find(Settings.from_env().runtime_root(), job, node))


def _listening(job: str, node: int) -> list[FoundDaemon]:
    """Returns the chosen daemons; exits with a sentence when there is none."""
    found = [each for each in _found(job, node) if os.path.exists(each.socket_path)]
    if not found:
        typer.echo(f"no daemon{f' of job {job!r}' if job else ''} of this user runs on this host", err=True)
        raise typer.Exit(1)
    return found


def _ask(found: FoundDaemon, request: wire.ToolMessage) -> dict[str, object]:
    try:
        return ask(found, request, _ANSWER)[1]
    except FusionError as error:
        return {"socket": found.socket_path, "state": "gone", "failure": str(error)}


def _wait_until_gone(path: str, seconds: float = 10) -> None:
    deadline = time.monotonic() + seconds
    while os.path.exists(path):
        if time.monotonic() > deadline:
            typer.echo(f"the daemon at {path} has not ended within {seconds:g} s", err=True)
            raise typer.Exit(1)
        time.sleep(0.05)


def _read_line(fd: int) -> tuple[bytes, bytes]:
    """Reads the first line of a descriptor. Returns it, and the bytes that were read beyond it."""
    data = b""
    while b"\n" not in data and len(data) <= bootstrap.MAX_LINE:
        piece = os.read(fd, 1 << 16)
        if not piece:
            break
        data += piece
    line, _, rest = data.partition(b"\n")
    return line, rest


def main() -> None:
    """Entry point of the `fusiond` command."""
    try:
        app()
    except FusionError as error:
        typer.echo(f"fusiond: {error}", err=True)
        sys.exit(1)
