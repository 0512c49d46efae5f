"""The one command for all benchmarks."""

from __future__ import annotations

import argparse
import importlib
import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import __main__ as driver
from benchmarks import suites
from benchmarks.common import results
from benchmarks.suites import SUITES, Part, Suite

ROOT = Path(__file__).resolve().parents[2]


def quick(directory: Path, *names: str) -> dict[str, results.Results]:
    """Runs quick suites by their names, and returns the results that they leave in a folder."""
    command = [sys.executable, "-m", "benchmarks", *names, "--quick", "--out", str(directory)]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env={**os.environ, "COLUMNS": "160"})
    assert run.returncode == 0, run.stderr
    return results.load_all(directory)


@pytest.mark.multiprocess
def test_two_quick_suites_run_and_leave_results_that_are_in_order(tmp_path: Path) -> None:
    found = quick(tmp_path, "topk", "kernels")
    assert list(found) == ["kernels", "topk"]
    (record,) = found["topk"].records
    assert [measure.name for measure in record.measures] == ["0.001", "0.01"]
    assert {len(row) for measure in record.measures for row in measure.samples.values()} == {3}
    assert record.machine is not None
    assert record.command == "python -m benchmarks.topk --elements 1000000 --rounds 3"


@pytest.mark.long
@pytest.mark.multiprocess
def test_the_quick_all_reduce_is_beside_gloo(tmp_path: Path) -> None:
    (record,) = quick(tmp_path, "allreduce")["allreduce"].records
    assert [measure.name for measure in record.measures] == ["4", "65536", "1048576"]
    assert all({"arena", "copy", "gloo"} <= measure.samples.keys() for measure in record.measures)
    assert {len(row) for measure in record.measures for row in measure.samples.values()} == {3}
    assert record.command.startswith("python -m benchmarks.allreduce --ranks 2")


def test_the_quick_step_asks_for_runtimes_that_there_are() -> None:
    from benchmarks import step

    (part,) = SUITES["step"].quick
    names = part.arguments[part.arguments.index("--runtimes") + 1].split(";")
    assert set(names) <= set(step.RUNTIMES)


def test_the_list_has_all_suites_and_imports_none_of_them(capsys: pytest.CaptureFixture[str]) -> None:
    assert driver.main(["--list"]) == 0
    told = capsys.readouterr().out
    assert all(f" {name} " in told for name in SUITES)
    heavy = "import sys, benchmarks.__main__ as d; d.main(['--list']); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", heavy], cwd=ROOT, stdout=subprocess.PIPE).returncode == 0


def test_an_unknown_suite_exits_with_2(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        driver.main(["all-reduce"])
    assert ended.value.code == 2
    assert "no suite 'all-reduce'; there are allreduce, " in capsys.readouterr().err


def test_a_suite_that_is_not_there_fails_when_it_is_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(SUITES, "teleport", Suite("", 1, (Part(),), (Part(),)))
    assert suites.missing("teleport").startswith("There is no benchmarks/teleport.py in this version")
    assert driver.main(["teleport", "--out", str(tmp_path)]) == 1
    assert "cannot be measured" in capsys.readouterr().out


def test_what_needs_root_is_left_out_without(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(driver, "preflight", lambda: "network namespaces need root")
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: pytest.fail("it ran"))
    assert driver.run("sparse", False, tmp_path) == "left out: it needs root"
    assert "network namespaces need root" in capsys.readouterr().err


def test_a_suite_that_fails_or_writes_nonsense_is_a_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    suite = Suite("", 1, (Part(("good",)), Part(("bad",))), ())
    monkeypatch.setitem(SUITES, "topk", suite)
    began: list[str] = []

    def run(command: list[str]) -> subprocess.CompletedProcess[str]:
        began.append(command[3])
        return subprocess.CompletedProcess(command, 3 if command[3] == "bad" else 0)

    monkeypatch.setattr(subprocess, "run", run)
    assert driver.run("topk", False, tmp_path) == "failed with status 3: bad"
    assert began == ["good", "bad"]
    monkeypatch.setitem(SUITES, "topk", Suite("", 1, (Part(),), ()))
    monkeypatch.setattr(subprocess, "run", lambda command: subprocess.CompletedProcess(command, 0))
    assert driver.run("topk", False, tmp_path).startswith("failed: it wrote no")
    (tmp_path / "topk.json").write_text("[]")
    assert "is no file of results" in driver.run("topk", False, tmp_path)


def test_each_module_beside_the_driver_is_a_suite() -> None:
    found = {path.stem for path in Path(driver.__file__).parent.glob("*.py") if not path.stem.startswith("__")}
    assert found - {"suites"} <= SUITES.keys()  # what they share is in `benchmarks.common`


@pytest.mark.parametrize("name", [name for name in SUITES if not suites.missing(name)])
def test_the_parts_of_a_suite_are_arguments_that_its_module_takes(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each module's own parser is asked, without measuring anything."""
    module = importlib.import_module(suites.module(name))

    class ParsedError(Exception):
        pass

    original = argparse.ArgumentParser.parse_args

    def parse(parser: argparse.ArgumentParser, *arguments: object) -> None:
        original(parser, *arguments)  # type: ignore[call-overload]
        raise ParsedError

    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", parse)
    for part in (*SUITES[name].full, *SUITES[name].quick):
        monkeypatch.setattr(sys, "argv", [name, *part.arguments, "--out", str(tmp_path / "out.json")])
        with pytest.raises(ParsedError):
            module.main()
