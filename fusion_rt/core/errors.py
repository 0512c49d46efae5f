"""The exceptions that users see; workers, the launcher and the daemon share them."""

DIED = "died (killed, or crashed) without leaving the job"  # of a worker, in the text of what fails because of it


class FusionError(Exception):
    """Base of all errors that this project raises on purpose; the text is a sentence for people."""


class SettingError(FusionError, ValueError):
    """A setting (flag, YAML key or environment variable) has a value that cannot be used."""


class WireError(FusionError):
    """Bytes from another process are not a message of this protocol, or break one of its limits."""


class ArenaError(FusionError, MemoryError):
    """Shared memory cannot be allocated, or a descriptor that another process offers is not a sealed memfd."""


class ArenaShortage(ArenaError):
    """This host, or a control group on it, has too little memory left now for a part of an arena."""


class HorovodInternalError(FusionError, RuntimeError):
    """A collective operation failed on every rank; the text names the rank, the host and the tensor.

    The name is Horovod's, so that `except HorovodInternalError` in existing scripts keeps working.
    """


class StepGivenUp(HorovodInternalError):
    """No rank may take a step, because a rank's backward pass has failed; the text names the rank and its exception."""

    SAYS = "gave this step up"  # in the text of each such failure


def failure_of(text: str) -> HorovodInternalError:
    """Returns the exception for an operation that has failed on all ranks with this text."""
    return StepGivenUp(text) if StepGivenUp.SAYS in text else HorovodInternalError(text)


class HostsUpdatedInterrupt(FusionError, RuntimeError):
    """The hosts of an elastic job have changed: `elastic.run` keeps the state and brings it to all ranks.

    The name is Horovod's.

    Attributes:
        skip_sync: hosts were only lost, so that every rank that is left has the state already.
    """

    def __init__(self, skip_sync: bool = False) -> None:
        super().__init__("the hosts of the job have changed")
        self.skip_sync = skip_sync


class JobError(FusionError, RuntimeError):
    """A job that `fusion_rt.run` started has failed; the text ends with the first failure and its traceback."""


class MixingError(FusionError, ValueError):
    """A mixing graph is not known, is not possible with so many ranks, or does not suit the algorithm."""
