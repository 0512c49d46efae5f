"""Files in directories that others can write to: what they have put there is not used."""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import IO

import pytest

from fusion_rt.core.errors import FusionError
from fusion_rt.host.private_files import open_private, open_private_directory, read_secret, replacing
from fusion_rt.runner.launch.worker_output import WorkerOutput
from fusion_rt.torch.autotune.measured import Log
from fusion_trace.export.output_file import opened
from fusiond.timeline.writer_process import ArrayFile

NOBODY = 65534
SECRET = "0123456789abcdef" * 2
needs_root = [
    pytest.mark.root,
    pytest.mark.skipif(os.geteuid() != 0, reason="needs root: it makes files of another user"),
]


class Sink:
    """Writes at once."""

    def write(self, fd: int, data: bytes) -> None:
        os.write(fd, data)


def write(path: Path) -> None:
    os.close(open_private(str(path)))


@pytest.fixture
def precious(tmp_path: Path) -> Path:
    path = tmp_path / "precious"
    path.write_text("mine")
    return path


@pytest.fixture
def world(tmp_path: Path) -> Path:
    """A directory as /tmp is."""
    path = tmp_path / "world"
    path.mkdir()
    path.chmod(0o1777)
    return path


@pytest.fixture
def open_umask() -> object:
    before = os.umask(0)
    yield
    os.umask(before)


@pytest.mark.usefixtures("open_umask")
def test_a_new_file_is_for_this_user_alone(world: Path) -> None:
    write(world / "file")
    assert stat.S_IMODE((world / "file").stat().st_mode) == 0o600


def test_a_file_of_this_user_is_begun_anew_and_keeps_its_mode(world: Path) -> None:
    (world / "file").write_text("of the last job")
    (world / "file").chmod(0o640)
    write(world / "file")
    assert (world / "file").read_text() == ""
    assert stat.S_IMODE((world / "file").stat().st_mode) == 0o640


def test_a_device_of_the_system_may_be_named() -> None:
    os.close(open_private("/dev/null"))


def test_nothing_is_written_through_links(world: Path, precious: Path) -> None:
    (world / "symbolic").symlink_to(precious)
    (world / "hard").hardlink_to(precious)
    (world / "nowhere").symlink_to(precious.with_name("made"))
    for name, why in (("symbolic", "symbolic link"), ("nowhere", "symbolic link"), ("hard", "second name")):
        with pytest.raises(OSError, match=why):
            write(world / name)
    assert precious.read_text() == "mine"
    assert not precious.with_name("made").exists()


def test_a_pipe_that_nobody_reads_is_an_error_and_no_wait(world: Path) -> None:
    os.mkfifo(world / "pipe")
    with pytest.raises(OSError, match="No such device"):
        write(world / "pipe")


class TestFilesOfAnotherUser:
    pytestmark = needs_root

    def test_a_file_of_another_user_is_not_written_to(self, world: Path) -> None:
        path = world / "file"
        path.touch()
        path.chmod(0o666)
        os.chown(path, NOBODY, NOBODY)
        with pytest.raises(PermissionError):  # by the kernel, where it protects sticky directories, or by us
            write(path)

    def test_a_directory_of_another_user_is_not_written_to(self, world: Path) -> None:
        (world / "rank.0").mkdir(0o777)
        os.chown(world / "rank.0", NOBODY, NOBODY)
        with pytest.raises(PermissionError, match="belongs to user 65534"):
            WorkerOutput(Sink(), 1, str(world))
        assert os.listdir(world / "rank.0") == []


@pytest.mark.usefixtures("open_umask")
def test_timelines_and_output_are_for_this_user_alone_and_follow_no_link(world: Path, precious: Path) -> None:
    ArrayFile(str(world / "timeline")).close()
    WorkerOutput(Sink(), 1, str(world / "output")).close()
    for path in (world / "timeline", world / "output" / "rank.0" / "stdout"):
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
    (world / "link").symlink_to(precious)
    with pytest.raises(OSError, match="symbolic link"):
        ArrayFile(str(world / "link"))
    (world / "planted").mkdir()
    (world / "planted" / "rank.0").symlink_to(world / "output" / "rank.0")
    with pytest.raises(NotADirectoryError):
        WorkerOutput(Sink(), 1, str(world / "planted"))
    assert precious.read_text() == "mine"


def test_what_a_command_or_a_setting_names_is_written_through_no_link(world: Path, precious: Path) -> None:
    (world / "link").symlink_to(precious)
    for suffix in ("html", "html.gz"):
        (world / f"report.{suffix}").symlink_to(precious)
        with pytest.raises(OSError, match="symbolic link"), opened(str(world / f"report.{suffix}")):
            pass
    with pytest.warns(UserWarning, match="symbolic link"):
        Log(str(world / "link"))
    assert precious.read_text() == "mine"


def write_a_part(file: IO[bytes]) -> None:
    file.write(b"a part")
    file.flush()
    raise BufferError


@pytest.mark.parametrize("part", ["", "file.new"])
def test_a_file_is_replaced_wholly_or_not_at_all(world: Path, precious: Path, part: str) -> None:
    path = world / "file"
    path.symlink_to(precious)  # and one under the name of the part
    (world / "file.new").symlink_to(precious)
    for mode in (0o600, 0o644):
        with replacing(str(path), part and str(world / part), mode) as file:
            file.write(b"all of it")
        assert path.read_text() == "all of it"
        assert stat.S_IMODE(path.lstat().st_mode) == mode
    assert precious.read_text() == "mine"
    with pytest.raises(BufferError), replacing(str(path), part and str(world / part)) as file:
        write_a_part(file)
    assert path.read_text() == "all of it"
    assert {each.name for each in world.iterdir()} == {"file"} | ({"file.new"} if not part else set())


def test_a_file_may_go_on_where_it_ends(world: Path) -> None:
    for text in (b"first", b"second"):
        with os.fdopen(open_private(str(world / "file"), flags=os.O_WRONLY | os.O_APPEND), "wb") as file:
            file.write(text)
    assert (world / "file").read_text() == "firstsecond"
    with os.fdopen(open_private(str(world / "file"), flags=os.O_RDWR), "r+b") as file:
        assert file.read() == b"firstsecond"


def test_a_directory_is_opened_as_often_as_it_is_asked_for(world: Path) -> None:
    for _ in range(2):
        os.close(open_private_directory(str(world / "a" / "b")))
    assert stat.S_IMODE((world / "a" / "b").stat().st_mode) == 0o700


# --- secrets ----------------------------------------------------------------------------------------------------------


def test_a_secret_is_what_its_file_has(tmp_path: Path) -> None:
    path = tmp_path / "secret"
    path.write_text(f"{SECRET}\n")
    path.chmod(0o600)
    assert read_secret(str(path), "X") == SECRET.encode()


@pytest.mark.parametrize("mode", [0o604, 0o640, 0o660])
def test_a_secret_that_others_can_read_or_write_is_none(tmp_path: Path, mode: int) -> None:
    path = tmp_path / "secret"
    path.write_text(SECRET)
    path.chmod(mode)
    with pytest.raises(FusionError, match=rf"X=.*secret is not a file that only user \d+ can read: .* mode {mode:04o}"):
        read_secret(str(path), "X")


def test_what_is_no_secret_is_said(tmp_path: Path) -> None:
    with pytest.raises(FusionError, match="cannot be read: No such file"):
        read_secret(str(tmp_path / "nowhere"), "X")
    with pytest.raises(FusionError, match="cannot be read: Is a directory"):
        read_secret(str(tmp_path), "X")
    for text in ("", "short\n", "x" * 5000):
        (tmp_path / "file").write_text(text)
        (tmp_path / "file").chmod(0o600)
        with pytest.raises(FusionError, match="has to hold a secret of 16 to 4096 bytes"):
            read_secret(str(tmp_path / "file"), "X")


@pytest.mark.root
@pytest.mark.skipif(os.geteuid() != 0, reason="needs root: it makes a file of another user")
def test_a_secret_of_another_user_is_none(tmp_path: Path) -> None:
    path = tmp_path / "secret"
    path.write_text(SECRET)
    path.chmod(0o600)
    os.chown(path, NOBODY, NOBODY)
    with pytest.raises(FusionError, match="belongs to user 65534"):
        read_secret(str(path), "X")
