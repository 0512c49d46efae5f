"""The values of options that somebody chose, by flag or in the YAML file, and what follows from them."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from fusion_rt.knobs import Knob
from fusion_rt.settings import KNOBS

_BY_NAME = {knob.name: knob for knob in KNOBS}


@dataclass(frozen=True)
class Choice:
    """A value, and where it stands: the flag, or the YAML key and its file."""

    knob: Knob
    value: Any
    source: str

    @classmethod
    def read(cls, knob: Knob, text: str, source: str) -> Choice:
        """The choice in a text. Raises `SettingError`; the sentence begins with the source."""
        return cls(knob, knob.parse(text, source), source)

    @property
    def does_nothing(self) -> bool:
        """Tells whether something is asked for that does not happen; what happens anyway may be asked for."""
        return bool(self.knob.idle) and self.value is not False and self.value != self.knob.default


class Choices:
    """The choices that hold, by the knobs' names."""

    def __init__(self, chosen: Mapping[str, Choice]) -> None:
        self._chosen = chosen

    def __getitem__(self, name: str) -> Any:
        """The value of a knob: chosen, or its default (None if it has none)."""
        choice = self._chosen.get(name)
        return _BY_NAME[name].default if choice is None else choice.value

    def variables(self) -> dict[bytes, bytes]:
        """The environment variables that stand for the choices."""
        return {
            os.fsencode(choice.knob.variable): os.fsencode(choice.knob.write(choice.value))
            for choice in self._chosen.values()
            if choice.knob.variable
        }

    def warnings(self, environ: Mapping[str, str]) -> list[str]:
        """At most one sentence, on what has no effect here.

        Args:
            environ: variables of it that Horovod would act on are named, too.
        """
        idle = {choice.knob: choice.source for choice in self._chosen.values() if choice.does_nothing}
        for knob in KNOBS:
            is_set = environ.get(knob.variable, "") not in ("", "0")
            if is_set and knob.idle and knob.name not in self._chosen and knob.variable.startswith("HOROVOD_"):
                idle[knob] = knob.variable
        return [f"accepted as in horovodrun, but without effect here: {_by_reason(idle)}"] if idle else []


def _by_reason(sources: Mapping[Knob, str]) -> str:
    """`--a, --b (why); --c (why)`."""
    reasons: dict[str, list[str]] = {}
    for knob, source in sources.items():
        reasons.setdefault(knob.idle, []).append(source)
    return "; ".join(f"{', '.join(names)} ({reason})" for reason, names in reasons.items())
