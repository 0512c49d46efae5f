"""Scripts written for Horovod: what `import horovod` means to them, and that they run as by `python`."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from fusion_rt.as_horovod import interpreter_options, python_path
from tests.for_each import for_each

TIMEOUT_S = 60.0
NAMES = """
import importlib, importlib.util, pickle, sys

import horovod
assert horovod.__version__ == "0.28.1"
assert "torch" not in sys.modules
assert importlib.util.find_spec("horovod.torch") is not None
assert "torch" not in sys.modules

import horovod.torch as hvd
import fusion_rt, fusion_rt.core.errors, fusion_rt.torch
assert hvd is fusion_rt.torch is sys.modules["horovod.torch"]
assert hvd.__name__ == hvd.__spec__.name == "fusion_rt.torch"
assert horovod.torch is hvd

for name in ("compression", "functions", "optimizer", "sync_batch_norm", "elastic", "elastic.sampler", "elastic.state"):
    assert importlib.import_module(f"horovod.torch.{name}") is importlib.import_module(f"fusion_rt.torch.{name}"), name
import horovod.torch.elastic.sampler
assert horovod.torch.elastic.sampler.ElasticSampler is hvd.elastic.ElasticSampler
assert sum(module is hvd.elastic.state for module in sys.modules.values()) == 2
assert pickle.loads(pickle.dumps(hvd.Compression.fp16)) is hvd.Compression.fp16

from horovod.torch.mpi_ops import Average, Sum, allgather_async, allreduce_async_, rank, size, synchronize
assert (Average, rank, synchronize) == (hvd.Average, hvd.rank, hvd.synchronize)
assert hvd.mpi_ops.Sum is hvd.Sum
from horovod.torch.compression import Compression, Compressor
from horovod.torch.functions import allgather_object, broadcast_object, broadcast_optimizer_state
from horovod.torch.optimizer import DistributedOptimizer
from horovod.torch.sync_batch_norm import SyncBatchNorm
from horovod.torch.elastic import ElasticSampler, TorchState, run
from horovod.torch.elastic.state import TorchState
assert SyncBatchNorm is hvd.SyncBatchNorm

from horovod.common.exceptions import HorovodInternalError, HostsUpdatedInterrupt
assert HorovodInternalError is hvd.HorovodInternalError
from horovod.common.elastic import ObjectState, State, run_fn
assert issubclass(TorchState, ObjectState)
from horovod.common.process_sets import ProcessSet, add_process_set, global_process_set, remove_process_set
assert global_process_set is hvd.global_process_set
from horovod.common.util import env, extension_available, gloo_built, gpu_available, mpi_built, nccl_built
from horovod.common.util import check_extension, num_rank_is_power_2, split_list
check_extension("horovod.torch", "HOROVOD_WITH_PYTORCH", horovod.__file__, "mpi_lib_v2")
try:
    check_extension("horovod.tensorflow", "HOROVOD_WITH_TENSORFLOW", horovod.__file__, "mpi_lib")
except ImportError as error:
    assert "extension horovod.tensorflow has not been built" in str(error), error
else:
    raise AssertionError
assert [n for n in range(-2, 70) if num_rank_is_power_2(n)] == [1, 2, 4, 8, 16, 32, 64]
assert split_list(list(range(7)), 3) == [[0, 1, 2], [3, 4], [5, 6]] and split_list([1], 2) == [[1], []]
from horovod.common.util import get_ext_suffix, get_extension_full_path, is_iterable, is_version_greater_equal_than
assert get_extension_full_path("/a/b.py", "c", "d") == "/a/c/d" + get_ext_suffix()
assert is_iterable([]) and not is_iterable(1)
at_least = is_version_greater_equal_than
assert at_least("2.10.0+cpu", "2.9.1") and at_least("2.9.1", "2.9.1") and not at_least("2.9.0rc1", "2.9.0")
from horovod.common.util import check_installed_version, get_average_backwards_compatibility_fun
check_installed_version("pytorch", "0.1")
one = get_average_backwards_compatibility_fun(hvd)
assert (one(None, None), one(hvd.Min, None)) == (hvd.Average, hvd.Min)
from horovod.common.exceptions import HorovodVersionMismatchError, get_version_mismatch_message
assert issubclass(HorovodVersionMismatchError, ImportError)
assert str(HorovodVersionMismatchError("torch", "2", "1")) == get_version_mismatch_message("torch", "2", "1")
from horovod.common.elastic import HostUpdateResult
assert HostUpdateResult.mixed == HostUpdateResult.added | HostUpdateResult.removed
assert extension_available("torch") and not extension_available("tensorflow")
assert gloo_built() == bool(hvd.gloo_built())
assert mpi_built() == bool(hvd.mpi_built())
assert nccl_built() == bool(hvd.nccl_built())

import horovod.runner
from horovod.runner.common.util.env import get_env_rank_and_size
from horovod.runner.launch import run_commandline
assert horovod.run is horovod.runner.run is fusion_rt.run
assert get_env_rank_and_size() == (0, 1)

for name in ("horovod.tensorflow", "horovod.tensorflow.keras", "horovod.spark.torch"):
    try:
        importlib.import_module(name)
    except ImportError as error:
        assert "is not there: this `horovod` is fusion_rt, which is for PyTorch only" in str(error), error
    else:
        raise AssertionError(name)
for name in ("horovod.torch.nothing", "horovod.common.nothing"):
    assert importlib.util.find_spec(name) is None, name
"""
SHOW = """
import horovod, json, multiprocessing, sys, warnings

def child(queue):
    queue.put(horovod.__file__)

if __name__ == "__main__":
    main = sys.modules["__main__"]
    context = multiprocessing.get_context("spawn")
    queue = context.Queue()
    process = context.Process(target=child, args=(queue,))
    process.start()
    found = queue.get(timeout=120)
    process.join()
    print(json.dumps([sys.argv, main.__name__, main.__spec__ and main.__spec__.name, horovod.__file__ == found,
                      sys.path[0], sys.flags.optimize, sys.flags.dev_mode]))
"""


def python(*arguments: str | Path, cwd: Path | None = None, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        cwd=cwd,
        env={**os.environ, **environment},
    )


@pytest.fixture
def installed(tmp_path: Path) -> str:
    """A directory with another package `horovod`, which is what is installed."""
    package = tmp_path / "installed" / "horovod"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("raise AssertionError('this is the installed one')\n")
    return str(package.parent)


def test_the_directory_holds_nothing_but_horovod() -> None:
    assert [name for name in os.listdir(python_path()) if name != "__pycache__"] == ["horovod"]


def test_every_name_that_scripts_import_is_this_projects(installed: str) -> None:
    done = python("-c", NAMES, PYTHONPATH=os.pathsep.join([python_path(), installed]))
    assert done.returncode == 0, done.stderr


@pytest.mark.multiprocess
def test_a_script_runs_as_by_python(tmp_path: Path, installed: str) -> None:
    script = tmp_path / "show.py"
    script.write_text(SHOW)
    done = python("-X", "dev", "-Om", "fusion_rt.as_horovod", script, "-m", "two words", PYTHONPATH=installed)
    assert done.returncode == 0, done.stderr
    expected = python("-X", "dev", "-O", script, "-m", "two words", PYTHONPATH=python_path())
    assert done.stdout == expected.stdout
    assert f'[["{script}", "-m", "two words"], "__main__", null, true, "{tmp_path}", 1, true]' == done.stdout.strip()


def test_modules_and_code_run_too(tmp_path: Path) -> None:
    (tmp_path / "show.py").write_text("import horovod, sys; print(__name__, __spec__.name, sys.argv[1:])")
    done = python("-m", "fusion_rt.as_horovod", "-m", "show", "x", cwd=tmp_path)
    assert done.stdout == "__main__ show ['x']\n", done.stderr
    done = python("-m", "fusion_rt.as_horovod", "-c", "import horovod, sys; sys.exit(f'{horovod.__version__}')")
    assert (done.returncode, done.stderr) == (1, "0.28.1\n")


@for_each(
    ("words", "options"),
    [
        (["python", "-m", "fusion_rt.as_horovod"], []),
        (["python", "-u", "-X", "dev", "-m", "fusion_rt.as_horovod"], ["-u", "-X", "dev"]),
        (["python", "-um", "fusion_rt.as_horovod"], ["-u"]),
        (["python", "-W", "error", "-mfusion_rt.as_horovod"], ["-W", "error"]),
        (["python", "-OOmfusion_rt.as_horovod"], ["-OO"]),
    ],
)
def test_options_of_the_interpreter_are_kept(words: list[str], options: list[str]) -> None:
    assert interpreter_options([*words, "script.py", "-m", "x"], 3) == options


def test_how_it_is_called_is_said_when_it_is_called_otherwise() -> None:
    done = python("-m", "fusion_rt.as_horovod")
    assert done.returncode == 1
    assert done.stderr.startswith("usage: python -m fusion_rt.as_horovod (SCRIPT | -m MODULE")
    done = python("-E", "-m", "fusion_rt.as_horovod", "script.py")
    assert done.returncode == 1
    assert "Python ignores PYTHONPATH with the options -E and -I" in done.stderr
