"""Memory of other processes: offered, found, and refused by kernels that forbid it."""

from __future__ import annotations

import ctypes
import os
import struct
import threading
from collections.abc import Callable, Iterator

import numpy as np
import pytest

from fusion_rt.core.dtypes import DTYPES
from fusion_rt.host import process_memory
from fusion_rt.host.process_memory import OfferedText, Process, ProcessMemoryError
from fusion_rt.kernels import ordinary
from fusion_rt.kernels.ordinary import Remote

pytestmark = pytest.mark.multiprocess
_NOBODY = 65534
_READ_AND_WRITE = {"x86_64": (310, 311), "aarch64": (270, 271)}  # numbers of the two system calls
_libc = ctypes.CDLL(None, use_errno=True)


@pytest.fixture
def myself() -> Iterator[Process]:
    process = Process(os.getpid(), "rank 3")
    yield process
    process.end()


def _in_a_child(does: Callable[[], bool]) -> bool:
    """What `does` returns in a forked child."""
    pid = os.fork()
    if not pid:
        try:
            os._exit(0 if does() else 1)
        finally:
            os._exit(2)
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    assert code in (0, 1)
    return code == 0


def _forbid_calls() -> None:
    """Has the kernel answer both system calls of this process with EPERM, as the filters of containers do."""
    numbers = _READ_AND_WRITE[os.uname().machine]
    filter = b"".join(
        (
            struct.pack("HBBI", 0x20, 0, 0, 0),  # load the number of the call
            struct.pack("HBBI", 0x15, 1, 0, numbers[0]),
            struct.pack("HBBI", 0x15, 0, 1, numbers[1]),
            struct.pack("HBBI", 0x06, 0, 0, 0x00050001),  # EPERM
            struct.pack("HBBI", 0x06, 0, 0, 0x7FFF0000),  # go on
        )
    )
    buffer = ctypes.create_string_buffer(filter)
    program = struct.pack("HxxxxxxQ", 5, ctypes.addressof(buffer))
    assert _libc.prctl(38, 1, 0, 0, 0) == 0  # no new privileges
    assert _libc.prctl(22, 2, ctypes.c_char_p(program), 0, 0) == 0


def test_an_offer_is_found_and_answered_by_another_process(myself: Process) -> None:
    offer = OfferedText(os.getpid())
    assert not offer.is_answered()
    assert not myself.accepts(offer.address, bytes(len(offer.text)))
    assert not myself.accepts(4096, offer.text)
    assert not offer.is_answered()
    assert _in_a_child(lambda: myself.accepts(offer.address, offer.text))
    assert offer.is_answered()
    offer.withdraw()


@pytest.mark.skipif(os.uname().machine not in _READ_AND_WRITE, reason="the numbers of its system calls are not known")
def test_a_filter_of_system_calls_refuses_an_offer(myself: Process) -> None:
    offer = OfferedText(os.getpid())

    def accepts() -> bool:
        _forbid_calls()
        return myself.accepts(offer.address, offer.text)

    assert not _in_a_child(accepts)
    assert not offer.is_answered()


@pytest.mark.root
@pytest.mark.skipif(os.geteuid() != 0, reason="needs root: it becomes another user")
def test_another_user_cannot_read_what_is_offered(myself: Process) -> None:
    offer = OfferedText(os.getpid())

    def accepts() -> bool:
        os.setgroups([])
        os.setgid(_NOBODY)
        os.setuid(_NOBODY)
        return myself.accepts(offer.address, offer.text)

    assert not _in_a_child(accepts)
    assert not offer.is_answered()


def test_a_process_that_cannot_be_seen_has_no_memory() -> None:
    with pytest.raises(ProcessMemoryError, match="cannot be seen here"):
        Process(2**22 + 1, "rank 0")


def test_memory_is_refused_once_the_connection_is_over(myself: Process) -> None:
    values = np.arange(3, dtype=np.float32)
    found = np.empty_like(values)
    myself.read(values.ctypes.data, found.ctypes.data, values.nbytes)
    assert list(found) == [0, 1, 2]
    myself.end()
    with pytest.raises(ProcessMemoryError, match="the memory of rank 3 is gone: its process has ended"):
        myself.write(values.ctypes.data, found.ctypes.data, values.nbytes)


def test_other_threads_go_on_while_the_kernel_waits_for_a_page(
    myself: Process, monkeypatch: pytest.MonkeyPatch
) -> None:
    """read(2) stands in for the call: it takes one byte from a pipe, and waits for it as a call waits for a page."""
    ordinary.copy(np.zeros(1, np.uint8), [np.zeros(1, np.uint8)])
    get, put = os.pipe()
    monkeypatch.setattr(process_memory.CALLS, "reads", ctypes.cast(_libc.read, ctypes.c_void_p).value)
    monkeypatch.setattr(myself, "pid", get)
    target = np.zeros(1, np.uint8)
    source = Remote(myself, 0, target.dtype, 1)
    thread = threading.Thread(target=ordinary.reduce, args=("sum", DTYPES["uint8"], [source], [target]))
    thread.start()
    os.write(put, b"x")  # never, if the thread kept the interpreter's lock while it waits
    thread.join(60)
    assert not thread.is_alive()
    os.close(get)
    os.close(put)
