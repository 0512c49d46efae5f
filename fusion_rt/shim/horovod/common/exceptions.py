"""The exceptions."""

from fusion_rt.core.errors import HorovodInternalError, HostsUpdatedInterrupt

__all__ = [
    "HorovodInternalError",
    "HorovodVersionMismatchError",
    "HostsUpdatedInterrupt",
    "get_version_mismatch_message",
]


def get_version_mismatch_message(name: str, version: str, installed_version: str) -> str:
    """Returns Horovod's sentence about a framework of another version than it was built for."""
    return (
        f"Framework {name} installed with version {installed_version} but found version {version}.\n"
        "This can result in unexpected behavior including runtime errors."
    )


class HorovodVersionMismatchError(ImportError):
    """Horovod's error for a framework of another version than it was built for. Nothing of fusion_rt raises it.

    Attributes:
        name: the framework's; `version`: that was found; `installed_version`: that was there at the installation.
    """

    def __init__(self, name: str, version: str, installed_version: str) -> None:
        super().__init__(get_version_mismatch_message(name, version, installed_version))
        self.name, self.version, self.installed_version = name, version, installed_version
