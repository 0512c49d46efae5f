"""The features of this installation, as scripts and test suites ask Horovod for them; `verbose` has no effect."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch

import fusion_rt.torch as hvd


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
