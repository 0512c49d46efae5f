"""Where kernels come from: the cache on disk, and the compiler in a process of its own."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from fusion_rt.core.dtypes import DTYPES
from fusion_rt.kernels import cpu, machine_code
from fusion_rt.kernels.machine_code import KernelError, MachineCode, cache_folders

KERNEL = "convert-float32-float64"


@pytest.fixture(scope="module")
def code() -> bytes:
    """An object file, from the real compiler, which what people set for their own use of Numba must not confuse."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("NUMBA_DISABLE_JIT", "1")
        [(name, code)] = machine_code._compile([KERNEL])
    assert name == KERNEL
    return code


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch, code: bytes) -> list[str]:
    """The kernels that are compiled during the test, without the seconds that it takes."""
    names: list[str] = []

    def compile_quickly(kernels: list[str]) -> list[tuple[str, bytes]]:
        names.extend(kernels)
        return [(kernel, code) for kernel in kernels]

    monkeypatch.setattr(machine_code, "_compile", compile_quickly)
    return names


def test_the_second_process_compiles_nothing(tmp_path: Path, compiled: list[str]) -> None:
    first = MachineCode([tmp_path])
    assert first.address(KERNEL) == first.address(KERNEL) != 0
    assert first.statistics() == {"compiled": 1, "loaded": 0}
    second = MachineCode([tmp_path])
    assert second.address(KERNEL) != 0
    assert second.statistics() == {"compiled": 0, "loaded": 1}
    assert compiled == [KERNEL]


def test_a_process_that_uses_kernels_does_not_import_numba() -> None:
    code = (
        "import sys, numpy as np; from fusion_rt.kernels import cpu; from fusion_rt.core.dtypes import DTYPES\n"
        "a = np.ones(3, np.float32); cpu.reduce('sum', DTYPES['float32'], [a, a], [a])\n"
        "assert a.tolist() == [2.0] * 3; sys.exit('numba' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


def test_importing_the_package_loads_neither_numba_nor_llvm() -> None:
    code = "import sys, fusion_rt.kernels.cpu; sys.exit(bool({'numba', 'llvmlite'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0


# Leaves the only hole for a section of a kernel between 4 GiB that are taken: others have to go elsewhere.
FILL_THE_ADDRESS_SPACE = """
import ctypes, mmap, sys
import numpy as np
from fusion_rt.core.dtypes import DTYPES
from fusion_rt.kernels import cpu

PRIVATE_ANONYMOUS_WITHOUT_RESERVE, PAGE = 0x4022, 4096
libc = ctypes.CDLL(None)
libc.mmap.restype = ctypes.c_size_t
libc.mmap.argtypes = ctypes.c_size_t, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long
libc.munmap.argtypes = ctypes.c_size_t, ctypes.c_size_t


def take(size):
    return libc.mmap(0, size, 0, PRIVATE_ANONYMOUS_WITHOUT_RESERVE, -1, 0)


cpu.prepare([DTYPES["float64"]])  # so that LLVM is there
far = take(5 << 30)
assert far != ctypes.c_size_t(-1).value, "no address space"
size = 1 << 30
while size >= PAGE:  # all holes above, the largest first
    while (address := take(size)) > far:
        pass
    libc.munmap(address, size)
    size //= 2
libc.munmap(far + (5 << 29), int(sys.argv[1]) * PAGE)
a = np.ones(3, np.float32)
cpu.reduce("sum", DTYPES["float32"], [a, a], [a])
assert a.tolist() == [2.0] * 3
"""


@pytest.mark.parametrize("pages", [1, 3])
def test_kernels_are_loaded_although_much_memory_is_mapped(pages: int) -> None:
    cpu.prepare([DTYPES["float64"], DTYPES["float32"]])
    done = subprocess.run(
        [sys.executable, "-c", FILL_THE_ADDRESS_SPACE, str(pages)], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr


def test_a_kernel_is_found_in_a_folder_that_cannot_be_written(tmp_path: Path, compiled: list[str]) -> None:
    MachineCode([tmp_path]).address(KERNEL)
    tmp_path.chmod(0o555)
    assert MachineCode([tmp_path]).address(KERNEL) != 0
    assert compiled == [KERNEL]


def test_a_new_kernel_goes_to_the_first_folder_that_can_be_written(tmp_path: Path, compiled: list[str]) -> None:
    blocked, writable = tmp_path / "file" / "cache", tmp_path / "new" / "cache"
    (tmp_path / "file").touch()
    MachineCode([blocked, writable]).address(KERNEL)
    assert len(list(writable.iterdir())) == 1
    assert MachineCode([blocked, writable]).statistics() == {"compiled": 0, "loaded": 0}
    assert MachineCode([blocked, writable]).address(KERNEL) != 0
    assert compiled == [KERNEL]


def test_without_a_folder_it_works_and_says_so(
    tmp_path: Path, compiled: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").touch()
    assert MachineCode([tmp_path / "file" / "cache"]).address(KERNEL) != 0
    assert "compiled anew in every process" in caplog.text


def test_a_damaged_file_is_replaced(tmp_path: Path, compiled: list[str], caplog: pytest.LogCaptureFixture) -> None:
    MachineCode([tmp_path]).address(KERNEL)
    [path] = tmp_path.iterdir()
    whole = path.read_bytes()
    for damaged in (b"", whole[:20], whole[:-1], whole[:100] + b"?" + whole[101:]):
        path.write_bytes(damaged)
        assert MachineCode([tmp_path]).address(KERNEL) != 0
        assert "damaged" in caplog.text
        assert path.read_bytes() == whole
    assert compiled == [KERNEL] * 5


def test_a_file_that_others_could_have_written_is_not_run(
    tmp_path: Path, compiled: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    MachineCode([tmp_path]).address(KERNEL)
    [path] = tmp_path.iterdir()
    assert path.stat().st_mode & 0o777 == 0o644
    path.chmod(0o666)
    MachineCode([tmp_path]).address(KERNEL)
    assert "other users could have written it" in caplog.text
    assert compiled == [KERNEL] * 2
    assert path.stat().st_mode & 0o777 == 0o644


def test_a_change_of_the_source_makes_another_kernel(
    tmp_path: Path, compiled: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    source = tmp_path / "source.py"
    monkeypatch.setattr(machine_code, "_SOURCES", (source,))
    for text in ("a", "b", "a"):
        source.write_text(text)
        MachineCode([tmp_path / "cache"]).address(KERNEL)
    assert compiled == [KERNEL] * 2


def test_every_file_that_kernels_are_made_of_counts() -> None:
    folder = Path(machine_code.__file__).parent
    parts = {*folder.glob("_[a-z]*.py"), *folder.glob("llvm/[a-z]*.py")}
    assert parts <= set(machine_code._SOURCES)


def test_a_compiler_that_fails_is_quoted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine_code, "_COMPILER", "fusion_rt.kernels.no_such_module")
    with pytest.raises(KernelError, match=rf"could not compile {KERNEL}.*no_such_module"):
        MachineCode([]).address(KERNEL)


def test_a_compiler_that_cannot_be_started_is_a_kernel_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/no/such/python")
    with pytest.raises(KernelError, match=r"could not be started.*/no/such/python"):
        MachineCode([]).address(KERNEL)


def test_the_user_chooses_where_the_cache_of_a_read_only_package_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_folders()[-1] == tmp_path / "fusion_rt"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache_folders()[-1] == tmp_path / ".cache" / "fusion_rt"
