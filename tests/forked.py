"""What a launcher starts instead of Python: has a fork run the arguments, and ends as it does (`forks.interpreter`).

It stands for the fork among the launcher's children: signals that it gets are passed on, and when it is killed, so is
the fork, with all that is in its session. It imports little, since it is started for each worker.
"""

import contextlib
import os
import pickle
import signal
import socket
import sys

PASSED_ON = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)

address, *arguments = sys.argv[1:]
signal.pthread_sigmask(signal.SIG_BLOCK, PASSED_ON)
sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
sock.connect(address)
status, theirs = os.pipe()
kept = [0, 1, 2]
network = f"/proc/{os.getpid()}/ns/net"  # the launcher may be in another than the nursery
environment = {**os.environ, "FUSION_TEST_PARENT": str(os.getppid())}
socket.send_fds(sock, [pickle.dumps((arguments, network, environment, os.getcwd(), kept))], [theirs, *kept])
for fd in (theirs, *kept):
    os.close(fd)
pid = int(sock.recv(16))


def pass_on(number: int, frame: object) -> None:
    try:
        os.killpg(pid, number)
    except ProcessLookupError:  # it has no session of its own yet, or has ended
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


for number in PASSED_ON:
    signal.signal(number, pass_on)
signal.pthread_sigmask(signal.SIG_UNBLOCK, PASSED_ON)
ended = int(os.read(status, 16) or -signal.SIGKILL)
if ended >= 0:
    os._exit(ended)
signal.pthread_sigmask(signal.SIG_SETMASK, ())
if -ended != signal.SIGKILL:
    signal.signal(-ended, signal.SIG_DFL)
os.kill(os.getpid(), -ended)
