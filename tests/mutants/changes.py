"""The changes: where an operator or a constant stands, those that could not be noticed left out, and a sample of them.

Cosmic Ray has the operators, says where each applies, and rewrites the source. A change is named after its folder,
definition, line and new line, so that it keeps its name, and its place in the sample, while other lines come and go.
"""

from __future__ import annotations

import ast
import hashlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

# The nearest neighbour of each operator. Cosmic Ray knows all pairs, but most of them (`x << y` of two floats, `is` of
# two numbers) fail at once or change nothing: they would say little about the tests.
BINARY = {
    "Add": ("Sub",),
    "Sub": ("Add",),
    "Mul": ("Div",),
    "Div": ("Mul",),
    "FloorDiv": ("Mul",),
    "Mod": ("FloorDiv",),
    "Pow": ("Mul",),
    "LShift": ("RShift",),
    "RShift": ("LShift",),
    "BitOr": ("BitAnd",),
    "BitAnd": ("BitOr",),
    "BitXor": ("BitOr",),
}
COMPARISON = {
    "Lt": ("LtE", "GtE"),
    "LtE": ("Lt", "Gt"),
    "Gt": ("GtE", "LtE"),
    "GtE": ("Gt", "Lt"),
    "Eq": ("NotEq",),
    "NotEq": ("Eq",),
    "Is": ("IsNot",),
    "IsNot": ("Is",),
}
_CHANGED_NODES = (  # of parso
    *("operator", "keyword", "number", "comparison", "factor", "not_test"),
    *("if_stmt", "while_stmt", "assert_stmt", "test"),
)
UNARY = ("UnaryOperator_Delete_USub", "UnaryOperator_Delete_Not", "UnaryOperator_Delete_Invert")
OPERATORS = (
    *(f"core/ReplaceBinaryOperator_{old}_{new}" for old, news in BINARY.items() for new in news),
    *(f"core/ReplaceComparisonOperator_{old}_{new}" for old, news in COMPARISON.items() for new in news),
    *(f"core/Replace{name}" for name in UNARY),
    "core/ReplaceTrueWithFalse",
    "core/ReplaceFalseWithTrue",
    "core/ReplaceAndWithOr",
    "core/ReplaceOrWithAnd",
    "core/AddNot",
    "core/NumberReplacer",
)


class Change(NamedTuple):
    """One operator or constant of one line."""

    module: str  # path from the root
    operator: str  # Cosmic Ray's name
    occurrence: int  # of the operator in the module
    start: tuple[int, int]  # line from 1, column from 0
    end: tuple[int, int]
    definition: str  # function or class, or empty
    line: str  # as it is, without the space around it
    column: int  # in `line`
    index: int  # of the changes that the operator knows here

    @property
    def name(self) -> str:
        """The same in each version of the module that has this line in this definition."""
        words = (self.module, self.definition, self.line, self.operator, str(self.column), str(self.index))
        return hashlib.sha256("\0".join(words).encode()).hexdigest()[:12]


def of_module(root: Path, module: str) -> list[Change]:
    """Finds all changes of a module that its behaviour could show."""
    from cosmic_ray.ast import ast_nodes, get_ast
    from cosmic_ray.ast.ast_query import ASTQuery
    from cosmic_ray.plugins import get_operator

    source = (root / module).read_text(encoding="utf-8")
    lines, skipped = source.splitlines(), unseen(source)
    nodes = [node for node in ast_nodes(get_ast(source)) if node.type in _CHANGED_NODES]
    found: dict[str, Change] = {}
    for name in OPERATORS:
        operator = get_operator(name)()
        places = (
            (node, start, end, index)
            for node in nodes
            for index, (start, end) in enumerate(operator.mutation_positions(node))
        )
        for occurrence, (node, start, end, index) in enumerate(places):
            if any(first <= start < last for first, last in skipped):
                continue
            line = lines[start[0] - 1]
            column = start[1] - (len(line) - len(line.lstrip()))
            definition = ASTQuery(node).get_definition_name() or ""
            change = Change(module, name, occurrence, start, end, definition, line.strip(), column, index)
            found.setdefault(change.name, change)
    return list(found.values())


def mutated(source: str, operator: str, occurrence: int) -> str:
    """Returns the module with the change made."""
    from cosmic_ray.mutating import mutate_code
    from cosmic_ray.plugins import get_operator

    code = mutate_code(source, get_operator(operator)(), occurrence)
    if code is None:
        raise ValueError(f"{operator} does not occur {occurrence + 1} times in this source")
    return str(code)


def line_of(root: Path, change: Change) -> str:
    """Returns what becomes of the change's line."""
    source = (root / change.module).read_text(encoding="utf-8")
    return mutated(source, change.operator, change.occurrence).splitlines()[change.start[0] - 1].strip()


def sample(changes: Sequence[Change], seed: int) -> list[Change]:
    """Puts changes in the order in which a sample takes them: places in an order drawn by lot, one change of each."""
    places: dict[tuple[str, tuple[int, int]], Change] = {}
    for change in changes:
        place = (change.module, change.start)
        if place not in places or lot(seed, change) < lot(seed, places[place]):
            places[place] = change
    return sorted(places.values(), key=lambda change: lot(seed, change))


def lot(seed: int, change: Change) -> str:
    """Returns a change's place in a sample."""
    return hashlib.sha256(f"{seed} {change.name}".encode()).hexdigest()


Span = tuple[tuple[int, int], tuple[int, int]]

_UNSEEN_FUNCTIONS = ("__repr__", "__str__")
_UNSEEN_CALLS = ("debug", "info", "warning", "error", "exception", "warn", "cast", "TypeVar", "ParamSpec")
_UNSEEN_KEYWORDS = ("strict", "repr", "daemon", "stacklevel")
_UNSEEN_NAMES = ("__slots__", "__all__", "__match_args__")


def unseen(source: str) -> list[Span]:
    """Finds the places where a change would show nothing: what people read (messages, logs, `repr`), annotations and
    what only a type checker runs, checks of the code itself (`assert`, `zip(strict=)`), how a class or a kernel is
    built (decorators, keywords of classes, `__slots__`), what depends on the version of something else, and how many
    seconds something is waited for."""
    lines = source.splitlines()
    return [_span(node, lines) for node in _unseen(ast.parse(source))]


def _unseen(tree: ast.AST) -> Iterator[ast.AST]:
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield from node.decorator_list
            arguments = (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs, node.args.vararg)
            yield from (each.annotation for each in arguments if each is not None and each.annotation is not None)
            if node.returns is not None:
                yield node.returns
            if node.name in _UNSEEN_FUNCTIONS:
                yield node
        elif isinstance(node, ast.ClassDef):
            yield from node.decorator_list
            yield from node.bases
            yield from node.keywords
        elif isinstance(node, ast.AnnAssign):
            yield node.annotation
            if _patience(node.target) and node.value is not None:
                yield node.value
        elif isinstance(node, ast.Assign):
            if any(_patience(target) or _named(target) in _UNSEEN_NAMES for target in node.targets):
                yield node.value
        elif (
            isinstance(node, ast.Raise | ast.Assert | ast.JoinedStr)
            or (isinstance(node, ast.Call) and _named(node.func) in _UNSEEN_CALLS)
            or (isinstance(node, ast.keyword) and node.arg in _UNSEEN_KEYWORDS)
        ):
            yield node
        elif isinstance(node, ast.If | ast.IfExp) and _of_surroundings(node.test):
            yield node.test
        elif isinstance(node, ast.If) and _named(node.test) == "TYPE_CHECKING":
            yield node


def _named(node: ast.AST) -> str:
    return node.id if isinstance(node, ast.Name) else node.attr if isinstance(node, ast.Attribute) else ""


def _patience(target: ast.AST) -> bool:
    return _named(target).endswith("_S")


def _of_surroundings(test: ast.AST) -> bool:
    return any("version" in _named(node) or _named(node) == "hasattr" for node in ast.walk(test))


def _span(node: Any, lines: Sequence[str]) -> Span:
    def place(line: int, column: int) -> tuple[int, int]:
        return line, len(lines[line - 1].encode()[:column].decode())  # ast counts bytes, parso characters

    return place(node.lineno, node.col_offset), place(node.end_lineno, node.end_col_offset)
