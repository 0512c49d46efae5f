"""Codecs and algorithms of other packages: found by entry point, imported when their name is asked for.

A name that another process has sent imports only packages that are installed here: it is looked up in a table of the
entry points of installed packages (`importlib.metadata`), which no message changes.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from fusion_rt.core.errors import FusionError

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

_Choice = TypeVar("_Choice")


class PluginError(FusionError, ValueError):
    """An installed package brings something that cannot be used."""


class Registry(dict[str, type[_Choice]]):
    """Frozen dataclasses by name: the built-in ones, and those of other packages once they have been asked for.

    `registry[name]` raises `KeyError` if there is none, and `PluginError` if there is one that cannot be used.

    Args:
        kind: their word in messages to people: "codec".
        group: of the entry points that name others.
        base: from which they are all derived.
        built_in: cannot be replaced.
        parts: attributes that name the classes they make objects of, and from which these are derived.
    """

    def __init__(
        self,
        kind: str,
        group: str,
        base: type[_Choice],
        built_in: Iterable[type[_Choice]],
        parts: Mapping[str, type] | None = None,
    ) -> None:
        super().__init__({each.name: each for each in built_in})  # type: ignore[attr-defined]  # each has a name
        self.kind, self._group, self._base, self._parts = kind, group, base, parts or {}
        self._packages: dict[str, str] = {}

    def __missing__(self, name: str) -> type[_Choice]:
        entries = _installed(self._group).get(name, [])
        if not entries:
            raise KeyError(name)
        packages = " and ".join(package(entry) for entry in entries)
        what = f"the {self.kind} {name!r} of the package {packages}"
        if len(entries) > 1:
            raise PluginError(f"the packages {packages} both have a {self.kind} {name!r}; uninstall one of them")
        try:
            found: Any = entries[0].load()
        except Exception as error:
            raise PluginError(f"{what} cannot be imported: {type(error).__name__}: {error}") from error
        fits = (
            isinstance(found, type)
            and issubclass(found, self._base)
            and dataclasses.is_dataclass(found)
            and found.__dataclass_params__.frozen  # type: ignore[attr-defined]  # it has to be hashable
            and getattr(found, "name", "") == name
        )
        if not fits:
            raise PluginError(
                f"{what} is none: its entry point has to name a frozen dataclass derived from {self._base.__module__}."
                f"{self._base.__name__}, whose `name` is {name!r}"
            )
        _check_methods(what, found)
        for attribute, base in self._parts.items():
            part = getattr(found, attribute, None)
            if not (isinstance(part, type) and issubclass(part, base)):
                raise PluginError(
                    f"{what} cannot be used: `{attribute}` of {found.__name__} has to be a class derived from "
                    f"{base.__module__}.{base.__name__}"
                )
            _check_methods(what, part)
        self[name], self._packages[name] = found, packages
        return self[name]

    def names(self) -> list[str]:
        """All that there are, sorted; those of other packages need not be usable."""
        return sorted({*self, *_installed(self._group)})

    def package(self, name: str) -> str:
        """The name and version of the package that brings one that has been asked for; empty: it is built in."""
        return self._packages.get(name, "")


def _check_methods(what: str, made: type) -> None:
    """Raises `PluginError` for a class of which no object can be made, since it lacks methods."""
    if inspect.isabstract(made):
        lacking = ", ".join(sorted(made.__abstractmethods__))  # type: ignore[attr-defined]  # all that are abstract have
        raise PluginError(
            f"{what} cannot be used: its class {made.__module__}.{made.__name__} lacks methods: {lacking}"
        )


def missing(packages: Sequence[str]) -> str:
    """Says which of these (names with versions) is not installed on this node, in a sentence; empty: all are."""
    if not packages:
        return ""
    groups = ("fusion_rt.codecs", "fusion_rt.algorithms")
    here = {package(entry) for group in groups for found in _installed(group).values() for entry in found}
    for wanted in packages:
        if wanted not in here:
            others = [each for each in sorted(here) if each.split()[0] == wanted.split()[0]]
            instead = f", but {others[0]}" if others else ""
            return f"the package {wanted} is not installed{instead}; install the same on every node"
    return ""


def package(entry: EntryPoint) -> str:
    """The name and version of the package that an entry point is of."""
    return "" if entry.dist is None else f"{entry.dist.name} {entry.dist.version}"


@functools.cache
def _installed(group: str) -> dict[str, list[EntryPoint]]:
    from importlib.metadata import entry_points  # takes as long as some processes need to start

    found: dict[str, list[EntryPoint]] = {}
    for entry in entry_points(group=group):
        found.setdefault(entry.name, []).append(entry)
    return found
