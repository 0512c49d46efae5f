"""The range of ports that a person names."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from fusion_rt.core.errors import FusionError
from fusion_rt.host.ports import listen_in

HOST = "127.0.0.1"


def server(port: int) -> socket.socket:
    return socket.create_server((HOST, port))


@pytest.fixture
def taken() -> Iterator[range]:
    """Two ports that lie side by side, and are in use."""
    for first in range(21000, 29000, 2):
        with ExitStack() as stack:
            try:
                for port in (first, first + 1):
                    stack.enter_context(server(port))
            except OSError:
                continue
            yield range(first, first + 2)
            return


def test_the_first_port_that_is_free_is_taken(taken: range) -> None:
    wanted = range(taken[0], taken[-1] + 100)
    with listen_in(wanted, server) as found:
        assert found.getsockname()[1] in wanted[2:]


def test_without_a_range_the_system_chooses() -> None:
    with listen_in(range(0), server) as found:
        assert found.getsockname()[1] > 0


def test_a_range_that_is_used_up_says_so(taken: range) -> None:
    with pytest.raises(FusionError, match=rf"all ports of FUSION_PORTS={taken[0]}-{taken[1]} are taken on this host"):
        listen_in(taken, server)


def test_another_error_is_not_hidden() -> None:
    with pytest.raises(OSError, match="assign"):
        listen_in(range(21000, 29000), lambda port: socket.create_server(("192.0.2.1", port)))
