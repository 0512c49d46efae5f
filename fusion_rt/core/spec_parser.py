"""Choices written as text: `name`, or `name(argument=value, ...)`, in a setting, a flag or a signature.

Each choice is a frozen dataclass: its fields are the arguments, and those left out have their defaults. So codecs are
written, and training algorithms.
"""

from __future__ import annotations

import ast
import dataclasses
import difflib
import warnings
from collections.abc import Iterable
from typing import Any, TypeVar, get_type_hints

from fusion_rt.core.errors import FusionError
from fusion_rt.core.plugins import PluginError, Registry

MAX_TEXT = 200  # characters; the text may come from another process

_Chosen = TypeVar("_Chosen")


class SpecError(FusionError, ValueError):
    """A text names nothing that there is, or has arguments that cannot be used."""


def parse(text: str, known: Registry[_Chosen]) -> _Chosen:
    """Returns the choice that is written as `text`.

    Arguments are Python literals with their names: `topk(density=0.01, value="fp16")`. Those left out have defaults.

    Args:
        known: the dataclasses by name.

    Raises:
        SpecError: `text` is not written like this, or names something, or an argument, that does not exist (then the
            error has the nearest that does), or a value has the wrong type. Errors of the dataclass are raised as they
            are.
    """
    kind = known.kind
    name, arguments = _split(text, kind)
    try:
        chosen = known[name]
    except KeyError:
        raise SpecError(f"there is no {kind} {name!r}; did you mean {_nearest(name, known.names())!r}?") from None
    except PluginError as error:
        raise SpecError(str(error)) from error
    hints = get_type_hints(chosen)
    rows = dataclasses.fields(chosen)  # type: ignore[arg-type]  # all of them are dataclasses
    fields = {field.name: hints[field.name] for field in rows}
    for argument, value in arguments.items():
        if not fields:
            raise SpecError(f"the {kind} {name} has no arguments; write {name!r} instead of {text!r}")
        if argument not in fields:
            near = _nearest(argument, fields)
            raise SpecError(f"the {kind} {name} has no argument {argument!r}; did you mean {near!r}?")
        arguments[argument] = _typed(f"{argument} of the {kind} {name}", value, fields[argument])
    missing = [
        field.name
        for field in rows
        if field.name not in arguments
        and field.default is dataclasses.MISSING
        and field.default_factory is dataclasses.MISSING
    ]
    if missing:
        raise SpecError(f"the {kind} {name} needs {', '.join(missing)}; write {name}({missing[0]}=...)")
    try:
        return chosen(**arguments)
    except FusionError:
        raise
    except Exception as error:  # of another package
        raise SpecError(f"the {kind} {name} cannot be used like this: {type(error).__name__}: {error}") from error


def write(name: str, chosen: Any) -> str:
    """The canonical text of a choice: `parse` of it is equal to it, and equal choices have the same."""
    arguments = [
        f"{field.name}={getattr(chosen, field.name)!r}"
        for field in dataclasses.fields(chosen)
        if getattr(chosen, field.name) != field.default
    ]
    return f"{name}({', '.join(arguments)})" if arguments else name


def _split(text: str, kind: str) -> tuple[str, dict[str, Any]]:
    """The name, and the arguments as values of any type."""
    article = "an" if kind[0] in "aeiou" else "a"
    wrong = f"{article} {kind} is written as 'name' or 'name(argument=value, ...)', not as {text[:MAX_TEXT]!r}"
    if len(text) > MAX_TEXT:
        raise SpecError(wrong)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error", SyntaxWarning)  # what Python would understand somehow is a mistake here
            tree = ast.parse(text.strip(), mode="eval")
        match tree.body:
            case ast.Name(id=name):
                return name, {}
            case ast.Call(func=ast.Name(id=name), args=[], keywords=keywords):
                arguments = {str(keyword.arg): ast.literal_eval(keyword.value) for keyword in keywords}
                if len(arguments) == len(keywords):  # none is there twice
                    return name, arguments
            case ast.Call(func=ast.Name(id=name)):
                shown = text[:MAX_TEXT]
                wrong = f"each argument of {article} {kind} has its name, {name}(argument=value), unlike {shown!r}"
    except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError) as error:  # all that such text can raise
        raise SpecError(wrong) from error
    raise SpecError(wrong)


def _typed(what: str, value: Any, wanted: type) -> Any:
    if wanted is float and type(value) is int:
        return float(value)
    if type(value) is not wanted:
        raise SpecError(f"{what} is of type {wanted.__name__}, which {value!r} is not")
    return value


def _nearest(name: str, known: Iterable[str]) -> str:
    return difflib.get_close_matches(name, list(known), n=1, cutoff=0.0)[0]
