"""Work on files that may block: a dead network file system blocks a thread for ever, and must block nothing else."""

from __future__ import annotations

import errno
import threading
import time

from fusiond.host.loop import EventLoop
from fusiond.host.thread_pool import Job, Then

_CLOSE_S = 1.0  # seconds that the end of a daemon waits for files


class FileWork:
    """Runs each job on a thread of its own, so that neither the event loop nor the kernel pool waits for files.

    Args:
        loop: runs completions.
    """

    def __init__(self, loop: EventLoop) -> None:
        self._loop = loop
        self._threads: set[threading.Thread] = set()

    def run(self, job: Job, then: Then) -> None:
        """Runs a job; when it has ended, `then` gets its exception, or None, in the loop."""

        def work() -> None:
            failure: BaseException | None = None
            try:
                job()
            except BaseException as error:  # handed to `then`
                failure = error

            def ended() -> None:
                self._threads.discard(thread)
                then(failure)

            self._loop.call_from_thread(ended)

        thread = threading.Thread(target=work, name="files", daemon=True)
        self._threads.add(thread)
        try:
            thread.start()
        except RuntimeError as error:  # the limit of processes is reached, which must not end the loop
            self._threads.discard(thread)
            failure = OSError(errno.EAGAIN, f"no thread can be started for it ({error}); raise `ulimit -u`")
            self._loop.call_soon(lambda: then(failure))

    def close(self) -> None:
        """Waits for the jobs for at most a second; later ones end with the process."""
        deadline = time.monotonic() + _CLOSE_S
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
