"""Values that one test goes through by itself.

`pytest.mark.parametrize` makes a case of each value. That is right where a case has a name that a person looks for,
and costs seconds: an algorithm, a codec, a job. A range of seeds, a table of sentences or a grid of sizes is one case,
because a row of it says nothing by itself, and collecting and reporting thousands of them costs more than they do.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable
from typing import Any

import pytest
from _pytest.mark.structures import ParameterSet

Test = Callable[..., None]


def for_each(names: str | tuple[str, ...], values: Iterable[object]) -> Callable[[Test], Test]:
    """Makes a test that takes these arguments one that goes through all values; a failure prints those that failed.

    Args:
        names: of one argument or several, written as for `pytest.mark.parametrize`.
        values: one for each run of the test; with several names, a sequence of as many.

    Values for which the test skips are left out; if it skips for all of them, it is skipped.
    """
    arguments = [name.strip() for name in names.split(",")] if isinstance(names, str) else list(names)
    rows = [ParameterSet.extract_from(value, force_tuple=len(arguments) == 1).values for value in values]  # type: ignore[arg-type]

    def over_all(test: Test) -> Test:
        signature = inspect.signature(test)

        @functools.wraps(test)
        def one_case(*fixed: Any, **given: Any) -> None:
            skipped = []
            for row in rows:
                chosen = dict(zip(arguments, row, strict=True))
                try:
                    test(*fixed, **given, **chosen)
                except pytest.skip.Exception as skip:
                    skipped.append(skip)
                except BaseException:
                    print("with", ", ".join(f"{name}={value!r}" for name, value in chosen.items()))
                    raise
            if skipped and len(skipped) == len(rows):
                raise skipped[0]

        left = [it for name, it in signature.parameters.items() if name not in arguments]
        one_case.__signature__ = signature.replace(parameters=left)  # type: ignore[attr-defined]
        return one_case

    return over_all
