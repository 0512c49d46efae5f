"""The structure of the project: no circles of files or folders, and names that mean one thing.

What is known to be wrong is listed here. The lists only become shorter: what is mended must be taken off.
"""

from __future__ import annotations

import ast
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping

from tests.for_each import for_each
from tests.test_imports import ROOT, imported_names, modules

KNOWN_CIRCLES: set[frozenset[str]] = set()
KNOWN_MODULE_NAMES: set[str] = {
    "_kernels",
    "basics",
    "coding",
    "elastic",
    "process_sets",
    "rendezvous",
    "selection",
}
KNOWN_CLASS_NAMES: set[str] = {
    "Assignment",
    "Bucket",
    "Found",
    "Group",
    "Memory",
    "Pending",
    "Place",
    "ProcessSet",
    "State",
}


def graph(names: Mapping[str, str]) -> dict[str, set[str]]:
    """Which node imports which others, also where only a type checker sees it.

    Args:
        names: the node of each module: itself, or its folder.
    """
    found: dict[str, set[str]] = defaultdict(set)
    for module, path in modules().items():
        package = module if path.name == "__init__.py" else module.rpartition(".")[0]
        for _, imported in imported_names(path.read_text(), package):
            while imported and imported not in names:
                imported = imported.rpartition(".")[0]
            if imported and names[imported] != names[module]:
                found[names[module]].add(names[imported])
    return found


def reachable(edges: Mapping[str, set[str]], start: str) -> set[str]:
    found: set[str] = set()
    left = [*edges.get(start, ())]
    while left:
        node = left.pop()
        if node not in found:
            found.add(node)
            left.extend(edges.get(node, ()))
    return found


def circles(edges: Mapping[str, set[str]]) -> set[frozenset[str]]:
    """Sets of nodes that all reach each other."""
    reach = {node: reachable(edges, node) for node in edges}
    return {
        frozenset(other for other in reach[node] if node in reach.get(other, ()))
        for node in edges
        if node in reach[node]
    }


def new(found: Iterable[frozenset[str]]) -> list[list[str]]:
    return [sorted(circle) for circle in found if not any(circle <= known for known in KNOWN_CIRCLES)]


def used_twice(names: Iterable[tuple[str, str]]) -> set[str]:
    """Names that two modules of one top-level package use.

    Args:
        names: modules with a name.
    """
    counts = Counter((module.partition(".")[0], name) for module, name in names)
    return {name for (_, name), count in counts.items() if count > 1}


def public_classes() -> Iterator[tuple[str, str]]:
    """Modules with the name of each class that they define."""
    for module, path in modules().items():
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                yield module, node.name


def test_no_files_import_each_other() -> None:
    assert new(circles(graph({module: module for module in modules()}))) == []


def test_no_folders_import_each_other() -> None:
    assert new(circles(graph({module: str(path.parent.relative_to(ROOT)) for module, path in modules().items()}))) == []


@for_each(
    ("edges", "expected"),
    [
        ({"a": {"b"}, "b": {"c"}, "c": set()}, set()),
        ({"a": {"b"}, "b": {"c", "a"}}, {frozenset("ab")}),
        ({"a": {"b"}, "b": {"c"}, "c": {"a", "d"}, "d": {"e"}, "e": {"d"}}, {frozenset("abc"), frozenset("de")}),
    ],
)
def test_circles_are_found(edges: dict[str, set[str]], expected: set[frozenset[str]]) -> None:
    assert circles(edges) == expected


def test_no_two_modules_of_a_package_have_one_name() -> None:
    names = [(module, path.stem) for module, path in modules().items() if not path.stem.startswith("__")]
    assert used_twice(names) <= KNOWN_MODULE_NAMES


def test_no_two_classes_of_a_package_have_one_name() -> None:
    assert used_twice(public_classes()) <= KNOWN_CLASS_NAMES


def test_a_name_used_twice_is_seen() -> None:
    assert used_twice([("a.b", "x"), ("a.c", "x"), ("a.c", "y"), ("b.c", "y")]) == {"x"}
