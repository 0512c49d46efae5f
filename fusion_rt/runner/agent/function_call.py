"""Carries the function of a job that `fusion_rt.run` starts from the agent to the workers, and results back.

Both lie in files without a name (memfd) that the worker inherits: one with the function, which all workers of a host
share, and one for each worker's result. Nothing has to be pumped, nothing is left behind by a process that is killed,
and the output of a worker that has ended is all there.

`python -m fusion_rt.runner.agent.function_call` is the worker.
"""

from __future__ import annotations

import asyncio
import mmap
import os
import pickle
import sys
from collections.abc import Iterator, Mapping

_FUNCTION_FD = "FUSION_FUNCTION_FD"
_RESULT_FD = "FUSION_RESULT_FD"


class FunctionFile:
    """The function, as it comes in at an agent.

    Args:
        nbytes: its size; 0 if the job has none.
    """

    def __init__(self, nbytes: int) -> None:
        self._missing = nbytes
        self._complete = asyncio.Event()
        self._fd = os.memfd_create("fusion-function")
        if not nbytes:
            self._complete.set()

    def feed(self, data: bytes) -> None:
        """Takes a piece of it."""
        with os.fdopen(self._fd, "ab", closefd=False) as file:
            file.write(data)
        self._missing -= len(data)
        if self._missing <= 0:
            self._complete.set()

    async def open_result(self) -> ResultFile:
        """A place for one worker's result, when the function is complete."""
        await self._complete.wait()
        return ResultFile(self._fd, os.memfd_create("fusion-result"))


class ResultFile:
    """A place for one worker's result.

    Attributes:
        descriptors: those that the worker inherits.
    """

    def __init__(self, function: int, result: int) -> None:
        self.descriptors = (function, result)

    def variables(self) -> Mapping[bytes, bytes]:
        """The variables that tell the worker of its descriptors."""
        function, result = self.descriptors
        return {_FUNCTION_FD.encode(): b"%d" % function, _RESULT_FD.encode(): b"%d" % result}

    def pieces(self, nbytes: int) -> Iterator[bytes]:
        """Reads the worker's result, in pieces of at most so many bytes; closes it."""
        with open(self.descriptors[1], "rb", buffering=0) as file:
            file.seek(0)
            while data := file.read(nbytes):
                yield data


def main() -> None:
    """Calls the function, and leaves its result. Ends as a script does when the function raises."""
    function_fd, result_fd = (int(os.environ.pop(name)) for name in (_FUNCTION_FD, _RESULT_FD))
    with mmap.mmap(function_fd, 0, access=mmap.ACCESS_READ) as content:
        paths, call = pickle.loads(content)
    os.close(function_fd)
    os.set_inheritable(result_fd, False)
    sys.path[:] = [*paths, *(path for path in sys.path if path not in paths)]
    func, args, kwargs = pickle.loads(call)
    del call
    import cloudpickle  # type: ignore[import-untyped]

    try:
        result = func(*args, **kwargs)
    except Exception as error:
        trace = error.__traceback__
        # Without the line above; by the hook, which takes the traceback along to the other ranks.
        error.__traceback__ = trace and trace.tb_next
        sys.excepthook(type(error), error, error.__traceback__)
        sys.exit(1)
    try:
        data = cloudpickle.dumps(result)
    except (TypeError, pickle.PicklingError) as error:
        raise TypeError(f"the function's result, a {type(result).__name__}, cannot be sent back: {error}") from error
    with os.fdopen(result_fd, "wb") as file:
        file.write(data)
