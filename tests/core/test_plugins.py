"""Choices that other packages bring, by entry point."""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import pytest

from fusion_rt.core import plugins, spec_parser
from fusion_rt.core.plugins import Registry

Install = Callable[..., None]


class Worker(ABC):
    @abstractmethod
    def begin(self) -> None: ...

    @abstractmethod
    def end(self) -> None: ...


class Able(Worker):
    def begin(self) -> None: ...

    def end(self) -> None: ...


class Thing(ABC):
    name: ClassVar[str]
    worker: ClassVar[type[Worker]] = Able

    @abstractmethod
    def use(self) -> None: ...


@dataclass(frozen=True)
class Plain(Thing):
    name = "plain"

    def use(self) -> None: ...


SOURCE = """
from dataclasses import dataclass
from tests.core.test_plugins import Thing, Worker

@dataclass(frozen=True)
class Odd(Thing):
    name = "odd"
    size: int = 3

    def use(self): ...

    def __post_init__(self):
        if self.size > 9:
            raise ValueError("at most 9")

@dataclass
class Loose(Thing):
    name = "loose"

@dataclass(frozen=True)
class Useless(Thing):
    name = "useless"

class HalfAWorker(Worker):
    def end(self): ...

@dataclass(frozen=True)
class Lazy(Odd):
    name = "lazy"
    worker = HalfAWorker

@dataclass(frozen=True)
class Alien(Odd):
    name = "alien"
    worker = int
"""


@pytest.fixture
def registry() -> Registry[Thing]:
    return Registry("thing", "tests.things", Thing, [Plain], {"worker": Worker})  # type: ignore[type-abstract]


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Install]:
    """Puts a package where Python finds it: its source, and what its installation would leave."""
    before = set(sys.modules)

    def put(package: str, entries: str, version: str = "1.0", group: str = "tests.things") -> None:
        folder = tmp_path / package
        information = folder / f"{package}-{version}.dist-info"
        information.mkdir(parents=True)
        (folder / f"{package}_module.py").write_text(SOURCE)
        (information / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: {version}\n")
        (information / "entry_points.txt").write_text(f"[{group}]\n{entries}\n")
        monkeypatch.syspath_prepend(folder)
        plugins._installed.cache_clear()

    yield put
    plugins._installed.cache_clear()
    for name in set(sys.modules) - before:
        if name.endswith("_module"):
            del sys.modules[name]


def test_it_is_imported_when_its_name_is_asked_for(registry: Registry[Thing], install: Install) -> None:
    install("acme", "odd = acme_module:Odd")
    assert registry.names() == ["odd", "plain"]
    assert str(spec_parser.parse("plain", registry)) == "Plain()"
    assert "acme_module" not in sys.modules
    assert spec_parser.parse("odd(size=4)", registry).size == 4  # type: ignore[attr-defined]
    assert "acme_module" in sys.modules
    assert (registry.package("odd"), registry.package("plain")) == ("acme 1.0", "")


def test_there_is_none_that_is_not_installed(registry: Registry[Thing], install: Install) -> None:
    install("acme", "odd = acme_module:Odd")
    for text in ("os", "acme_module", "odds"):
        with pytest.raises(spec_parser.SpecError, match=f"there is no thing '{text}'; did you mean '(odd|plain)'"):
            spec_parser.parse(text, registry)
    assert "acme_module" not in sys.modules


def test_what_is_built_in_cannot_be_replaced(registry: Registry[Thing], install: Install) -> None:
    install("acme", "plain = acme_module:Odd")
    assert spec_parser.parse("plain", registry) == Plain()


def test_two_packages_with_the_same_name_are_refused(registry: Registry[Thing], install: Install) -> None:
    install("acme", "odd = acme_module:Odd")
    install("best", "odd = best_module:Odd", version="2.1")
    with pytest.raises(spec_parser.SpecError, match=r"packages .*acme 1.0.* both have a thing 'odd'; uninstall one"):
        spec_parser.parse("odd", registry)
    assert not {"acme_module", "best_module"} & set(sys.modules)


@pytest.mark.parametrize(
    ("entry", "why"),
    [
        ("odd = acme_module:Nothing", "cannot be imported: AttributeError: .*Nothing"),
        ("odd = acme_module.missing:Odd", "cannot be imported: ModuleNotFoundError"),
        ("odd = acme_module:dataclass", "is none: its entry point has to name a frozen dataclass"),
        ("loose = acme_module:Loose", "is none: its entry point has to name a frozen dataclass"),
        ("other = acme_module:Odd", "is none: .*whose `name` is 'other'"),
        ("useless = acme_module:Useless", r"cannot be used: its class acme_module\.Useless lacks methods: use"),
        ("lazy = acme_module:Lazy", r"cannot be used: its class acme_module\.HalfAWorker lacks methods: begin"),
        ("alien = acme_module:Alien", r"cannot be used: `worker` of Alien .* derived from .*test_plugins\.Worker"),
    ],
)
def test_what_cannot_be_used_is_refused_with_its_package(
    registry: Registry[Thing], install: Install, entry: str, why: str
) -> None:
    install("acme", entry)
    with pytest.raises(spec_parser.SpecError, match=f"thing '{entry.split()[0]}' of the package acme 1.0 {why}"):
        spec_parser.parse(entry.split()[0], registry)


def test_an_argument_that_it_refuses_is_refused_in_a_sentence(registry: Registry[Thing], install: Install) -> None:
    install("acme", "odd = acme_module:Odd")
    with pytest.raises(spec_parser.SpecError, match="the thing odd cannot be used like this: ValueError: at most 9"):
        spec_parser.parse("odd(size=10)", registry)


def test_a_package_that_is_missing_here_is_named(install: Install) -> None:
    install("acme", "odd = acme_module:Odd", version="1.1", group="fusion_rt.codecs")
    assert plugins.missing(()) == plugins.missing(("acme 1.1",)) == ""
    assert plugins.missing(("best 2.0",)) == "the package best 2.0 is not installed; install the same on every node"
    assert plugins.missing(("acme 1.0",)) == (
        "the package acme 1.0 is not installed, but acme 1.1; install the same on every node"
    )
