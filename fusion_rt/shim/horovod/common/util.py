"""The features of this installation, and small helpers, as scripts and test suites ask Horovod for them; `verbose` has
no effect, nor has what asks for files of extensions: there are none to be built."""

from __future__ import annotations

import os
import re
import sysconfig
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import torch

import fusion_rt.torch as hvd

_Item = TypeVar("_Item")
EXTENSIONS = ["torch"]


def get_ext_suffix() -> str:
    """Returns how names of extension modules end on this Python."""
    return sysconfig.get_config_var("EXT_SUFFIX") or ".so"


def get_extension_full_path(pkg_path: str, *args: str) -> str:
    """Returns the path that an extension would have beside the file `pkg_path`."""
    *folders, name = args
    return os.path.join(os.path.dirname(pkg_path), *folders, name + get_ext_suffix())


def check_extension(ext_name: str, ext_env_var: str, pkg_path: str, *args: str) -> None:
    """Raises `ImportError` unless the framework of an extension, such as "horovod.torch", is supported."""
    if not extension_available(ext_name.rpartition(".")[2]):
        raise ImportError(
            f"extension {ext_name} has not been built: this `horovod` is fusion_rt, which is for PyTorch only "
            f"({ext_env_var} has no effect)"
        )


def check_installed_version(name: str, version: str, exception: Exception | None = None) -> None:
    """Accepts any version of a framework: nothing was built for one."""


def mpi_built(verbose: bool = False) -> bool:
    return bool(hvd.mpi_built())


def gloo_built(verbose: bool = False) -> bool:
    return bool(hvd.gloo_built())


def nccl_built(verbose: bool = False) -> bool:
    return bool(hvd.nccl_built())


def ddl_built(verbose: bool = False) -> bool:
    return bool(hvd.ddl_built())


def ccl_built(verbose: bool = False) -> bool:
    return bool(hvd.ccl_built())


def extension_available(ext_base_name: str, verbose: bool = False) -> bool:
    """Tells whether a framework is supported."""
    return ext_base_name == "torch"


def gpu_available(ext_base_name: str, verbose: bool = False) -> bool:
    """Tells whether a framework has a GPU here."""
    return extension_available(ext_base_name) and torch.cuda.is_available()


@contextmanager
def env(**variables: str | None) -> Iterator[None]:
    """Sets environment variables for a while; None leaves one alone."""
    before = {name: os.environ.get(name) for name, value in variables.items() if value is not None}
    os.environ.update({name: value for name, value in variables.items() if value is not None})
    try:
        yield
    finally:
        for name, old in before.items():
            if old is None:
                del os.environ[name]
            else:
                os.environ[name] = old


def get_average_backwards_compatibility_fun(reduce_ops: Any) -> Callable[[Any, bool | None], Any]:
    """Returns a function that makes one op of the arguments `op` and `average`, of which one may be given.
    `reduce_ops`: has the ops as attributes."""

    def chosen(op: Any, average: bool | None) -> Any:
        if op is not None and average is not None:
            raise ValueError("The op parameter supersedes average. Please provide only one of them.")
        if average is not None:
            text = "Parameter `average` has been replaced with `op` and will be removed in v1.0"
            warnings.warn(text, DeprecationWarning, stacklevel=2)
            return reduce_ops.Average if average else reduce_ops.Sum
        return reduce_ops.Average if op is None else op

    return chosen


def num_rank_is_power_2(num_rank: int) -> bool:
    """Tells whether a number of ranks is a power of two; Horovod's Adasum needs one, that of fusion_rt does not."""
    return num_rank > 0 and num_rank.bit_count() == 1


def split_list(l: Sequence[_Item], n: int) -> list[Sequence[_Item]]:  # noqa: E741  # the names are Horovod's
    """Deals a list out to `n` lists of consecutive items, of which the first have one more where it does not come out
    even."""
    each, more = divmod(len(l), n)
    return [l[i * each + min(i, more) : (i + 1) * each + min(i + 1, more)] for i in range(n)]


def is_iterable(x: object) -> bool:
    """Tells whether something can be iterated over."""
    try:
        iter(x)  # type: ignore[call-overload]
    except TypeError:
        return False
    return True


def is_version_greater_equal_than(ver: str, target: str) -> bool:
    """Tells whether a version is at least `target`, which has the form major.minor.patch. A pre-release comes before
    its release.

    Raises:
        ValueError: it has another form, or one of them is no text.
    """
    if not (isinstance(ver, str) and isinstance(target, str) and re.fullmatch(r"\d+\.\d+\.\d+", target)):
        raise ValueError(f"texts are compared, the second of the form major.minor.patch, not {ver!r} and {target!r}")
    return _order_of(ver) >= _order_of(target)


def _order_of(version: str) -> tuple[tuple[int, ...], bool]:
    """Returns numbers by which versions are ordered: those of the release, and whether it is one."""
    release, rest = re.match(r"v?(\d+(?:\.\d+)*)(.*)", version.strip()).groups()  # type: ignore[union-attr]
    numbers = [int(number) for number in release.split(".")]
    before = re.match(r"[-_.]?(a|b|c|rc|alpha|beta|pre|preview|dev)", rest, re.IGNORECASE)
    return (*numbers, *[0] * (6 - len(numbers))), before is None
