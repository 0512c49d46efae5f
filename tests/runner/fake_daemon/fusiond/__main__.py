"""Stands in for the daemon where a test is about the launcher: keeps the contract of `fusion_rt.host.bootstrap`, and
misbehaves as FAKE_DAEMON says (a word, or `word@node` for one node only)."""

import os
import signal
import sys

from fusion_rt.host.bootstrap import (
    Abandon,
    Awake,
    DaemonConfig,
    Endpoint,
    EpochOver,
    Farewell,
    Knock,
    PeerTable,
    Phase,
    Reform,
    Reformed,
    StartError,
    decode_line,
    encode_line,
)


def say(message):
    sys.stdout.buffer.write(encode_line(message))
    sys.stdout.buffer.flush()


def main():
    assert sys.argv[1:] == ["start", "--foreground", "--config-stdin"], sys.argv
    config = decode_line(sys.stdin.buffer.readline(), DaemonConfig)
    word, _, node = os.environ.get("FAKE_DAEMON", "").partition("@")
    if node not in ("", str(config.node)):
        word = ""
    print(f"fake daemon of node {config.node} on {config.address}, mode {word or 'good'}", file=sys.stderr, flush=True)
    if word == "silent":
        sys.stdin.buffer.read()
        return
    if word == "refuse":
        say(StartError("port 4711 is taken"))
        sys.exit(1)
    if word == "crash":
        sys.exit("no kernels here")
    if word == "garble":
        print("this is no endpoint", flush=True)
    say(Endpoint(config.node, os.getpid(), config.address, 1000 + config.node, 2000 + config.node, "k" * 40))
    if config.elastic:
        for line in sys.stdin.buffer:
            order = decode_line(line, Reform | Abandon | Knock | Farewell)
            if isinstance(order, Farewell):
                continue
            if isinstance(order, Knock):
                say(Awake())
                continue
            if isinstance(order, Reform):
                say(Reformed(order.number))
                say(Phase("started"))
                print(f"epoch {order.number} of {order.topology.size}", file=sys.stderr, flush=True)
            else:
                say(EpochOver(order.number, (), order.reason))
    elif len(config.topology.hosts) > 1:
        line = sys.stdin.buffer.readline()
        if not line:
            return
        table = decode_line(line, PeerTable | Farewell)
        if isinstance(table, Farewell):
            sys.stdin.buffer.read()
            return
        assert [endpoint.node for endpoint in table.endpoints] == list(range(len(config.topology.hosts)))
        print("peers:", *(endpoint.control_port for endpoint in table.endpoints), file=sys.stderr, flush=True)
    if word == "die":
        os.kill(os.getpid(), signal.SIGKILL)
    if word == "fail":
        sys.exit("out of descriptors")
    if word == "stubborn":
        signal.pause()
    sys.stdin.buffer.read()


main()
