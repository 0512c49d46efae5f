"""Counts what makes a program hard to read, in the source of the product."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path

from tests.test_imports import modules

_LAYOUT = {tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}
_ODD_WORDS = re.compile(r"\b(what|nobody|somebody|anybody|who)\b", re.IGNORECASE)
_MANY_ARGUMENTS, _MANY_ATTRIBUTES = 8, 11
Function = ast.FunctionDef | ast.AsyncFunctionDef


def figures() -> dict[str, float]:
    """Returns the figures of the product's source, by names that say what is counted. Less is better in each."""
    paths = modules()
    sources = {name: path.read_text() for name, path in paths.items()}
    found: Counter[str] = Counter({"modules": len(sources)})
    importers: defaultdict[str, set[str]] = defaultdict(set)
    words = odd = 0
    classes: Counter[str] = Counter()
    for module, source in sources.items():
        tree = ast.parse(source)
        texts = list(docstrings(tree))
        found["lines of code"] += len(code_lines(source, texts))
        for text in texts:
            words += len(text.value.split())
            odd += len(_ODD_WORDS.findall(text.value))
        found.update(counted(tree))
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                classes[node.name] += 1
            for imported in _imported(node) & sources.keys():
                importers[imported].add(module)
    found["class names used more than once"] = sum(number > 1 for number in classes.values())
    found["modules with one importer"] = sum(
        len(importers[name]) == 1 for name, path in paths.items() if path.name != "__init__.py"
    )
    return {**found, "odd words in 1,000 of docstrings": round(1000 * odd / words, 1)}


def docstrings(tree: ast.Module) -> Iterator[ast.Constant]:
    """Yields the docstrings of a module, and of all that is in it."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | Function) and node.body:
            first = node.body[0]
            value = first.value if isinstance(first, ast.Expr) else None
            if isinstance(value, ast.Constant) and isinstance(value.value, str):
                yield value


def code_lines(source: str, texts: list[ast.Constant]) -> set[int]:
    """Returns the numbers of the lines that have code: neither blank ones, nor comments, nor docstrings."""
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type != tokenize.COMMENT and token.type not in _LAYOUT:
            lines.update(range(token.start[0], token.end[0] + 1))
    for text in texts:
        lines.difference_update(range(text.lineno, (text.end_lineno or text.lineno) + 1))
    return lines


def counted(tree: ast.Module) -> Counter[str]:
    """Returns the figures of a module that are sums over its parts; those that are 0 are left out."""
    found: Counter[str] = Counter()
    for node in ast.walk(tree):
        found.update(_of_node(node))
    return +found


def _of_node(node: ast.AST) -> Mapping[str, int]:
    if isinstance(node, ast.Lambda):
        return {"lambdas": 1}
    if isinstance(node, ast.ClassDef):
        return {"classes of more than 10 attributes": len(_attributes(node)) >= _MANY_ATTRIBUTES}
    if not isinstance(node, Function):
        return {}
    given = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
    of_callers = [argument for argument in given if argument.arg not in ("self", "cls")]
    callbacks = [a for a in of_callers if a.annotation and "Callable" in ast.unparse(a.annotation)]
    return {
        "functions of 8 arguments or more": len(of_callers) >= _MANY_ARGUMENTS,
        "callbacks to constructors": len(callbacks) if node.name == "__init__" else 0,
    }


def _attributes(node: ast.ClassDef) -> set[str]:
    """Returns the names that a class declares, or that its methods set on `self`."""
    found = {
        each.attr
        for each in ast.walk(node)
        if isinstance(each, ast.Attribute)
        and isinstance(each.ctx, ast.Store)
        and isinstance(each.value, ast.Name)
        and each.value.id == "self"
    }
    return found | {
        each.target.id for each in node.body if isinstance(each, ast.AnnAssign) and isinstance(each.target, ast.Name)
    }


def _imported(node: ast.AST) -> set[str]:
    """Returns the modules that a statement may import, by their whole names."""
    if isinstance(node, ast.Import):
        return {alias.name for alias in node.names}
    if isinstance(node, ast.ImportFrom) and node.module:
        return {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return set()


def lengths(path: Path) -> dict[int, int]:
    """Returns the last line of each function of a file, by its first one, where decorators count."""
    found: dict[int, int] = {}
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, Function | ast.Lambda):
            decorators = [] if isinstance(node, ast.Lambda) else node.decorator_list
            first = min([node.lineno, *(each.lineno for each in decorators)])
            found.setdefault(first, node.end_lineno or first)
    return found
