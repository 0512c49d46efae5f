"""The sdist, the wheel that is built from it, and a job of what the wheel installs, where nothing can be written."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
SOURCES = {
    "fusion_rt": ROOT / "fusion_rt",
    "fusiond": ROOT / "daemon/fusiond",
    "fusion_trace": ROOT / "tools/fusion_trace",
}
JOB = """
import torch, fusion_rt, fusion_rt.torch as hvd
hvd.init()
print(fusion_rt.__file__, round(hvd.allreduce(torch.full((3000,), hvd.rank() + 1.0), op=hvd.Sum)[-1].item()))
"""


def setup(folder: Path, *commands: str) -> None:
    done = subprocess.run([sys.executable, "setup.py", "-q", *commands], cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.fixture(scope="module")
def sdist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The sdist, unpacked. It is made beside the sources, so that nothing is written among them."""
    folder = tmp_path_factory.mktemp("sdist")
    (folder / "sources").mkdir()
    for path in ROOT.iterdir():
        if path.name not in ("build", "dist", ".git", ".venv") and path.suffix != ".egg-info":
            (folder / "sources" / path.name).symlink_to(path)
    setup(folder / "sources", "egg_info", "--egg-base", str(folder), "sdist", "--dist-dir", str(folder))
    with tarfile.open(next(folder.glob("*.tar.gz"))) as archive:
        archive.extractall(folder, **({"filter": "data"} if hasattr(tarfile, "data_filter") else {}))
        return folder / archive.getnames()[0].partition("/")[0]


@pytest.fixture(scope="module")
def wheel(sdist: Path) -> Iterator[zipfile.ZipFile]:
    setup(sdist, "bdist_wheel", "--dist-dir", str(sdist.parent))
    with zipfile.ZipFile(next(sdist.parent.glob("*.whl"))) as archive:
        yield archive


def test_the_sdist_is_the_repository(sdist: Path) -> None:
    if not (ROOT / ".git").exists():
        pytest.skip("this is no clone")
    listed = subprocess.run(
        ["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.splitlines()
    present = [name for name in listed if (ROOT / name).exists()]
    assert [name for name in present if not (sdist / name).is_file()] == [".gitignore"]


def test_the_wheel_has_three_packages_and_all_of_their_files(wheel: zipfile.ZipFile) -> None:
    names = set(wheel.namelist())
    assert {name.partition("/")[0] for name in names if ".dist-info/" not in name} == SOURCES.keys()
    for package, folder in SOURCES.items():
        files = (path for path in folder.rglob("*") if path.suffix in (".py", ".typed", ".html"))
        assert {f"{package}/{path.relative_to(folder)}" for path in files} <= names


def test_what_an_index_shows_has_no_link_into_the_repository(wheel: zipfile.ZipFile) -> None:
    text = wheel.read(next(name for name in wheel.namelist() if name.endswith("/METADATA"))).decode()
    assert "fusion_rt trains one PyTorch model" in text
    assert [link for link in re.findall(r"\]\(([^)]*)\)", text) if not link.startswith("https://")] == []


@pytest.mark.multiprocess
def test_a_job_of_the_wheel_runs_without_a_home_a_cache_or_a_locale(wheel: zipfile.ZipFile, tmp_path: Path) -> None:
    """Kernels are compiled, because nobody has put any beside the package; and kept nowhere, because nothing can be
    written there, nor into the home directory."""
    site = tmp_path / "site"
    wheel.extractall(site)
    (site / "fusion_rt" / "kernels" / "__pycache__").touch()  # a file: no directory can be made there, not even by root
    keep = {name: value for name, value in os.environ.items() if not name.startswith(("LC_", "XDG_", "FUSION_RUNTIME"))}
    environment = {
        **keep,
        "HOME": "/dev/null",
        "LC_ALL": "C",
        "PYTHONUTF8": "0",
        "PYTHONCOERCECLOCALE": "0",
        "PYTHONDONTWRITEBYTECODE": "1",
        "PYTHONPATH": str(site),
        "TMPDIR": str(tmp_path),
    }
    command = [
        sys.executable,
        "-m",
        "fusion_rt.runner",
        "-np",
        "2",
        "--log-level",
        "WARNING",
        sys.executable,
        "-c",
        JOB,
    ]
    done = subprocess.run(command, cwd="/", env=environment, capture_output=True, timeout=120)
    said, warned = done.stdout.decode("ascii"), done.stderr.decode("ascii")
    assert done.returncode == 0, warned
    assert sorted(re.findall(r"\[(\d)\]<stdout>:(\S+) 3$", said, re.MULTILINE)) == [
        (rank, str(site / "fusion_rt" / "__init__.py")) for rank in "01"
    ]
    assert "is compiled anew in every process" in warned
