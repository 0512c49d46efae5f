"""The flags of `fusionrun`: a parser made from the table of settings, the choices in its result, and their values.

Flags are spelled as Horovod's, may be abbreviated as long as they are unique, and end with the first word that is no
flag: from there on it is the command.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import fusion_rt
from fusion_rt.core.errors import SettingError
from fusion_rt.knobs import GROUPS, Knob
from fusion_rt.settings import KNOBS
from fusion_rt.units import SWITCH

EXAMPLE = "fusionrun -np 4 -H host1:2,host2:2 python train.py"
_RIVALS = (
    (("hosts", "hostfile", "host_discovery_script"), "each says where the workers run"),
    (("use_gloo", "use_mpi", "use_jsrun"), "each names a controller"),
)
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
        """Tells whether an effect is asked for that does not happen; one that happens anyway may be asked for."""
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
        """At most one sentence, on options without effect here.

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


class _Switch(argparse.Action):
    """Flags that switch something on, and flags that switch it off."""

    def __init__(self, option_strings: Sequence[str], dest: str, on: Sequence[str], help: str) -> None:
        super().__init__(option_strings, dest, nargs=0, help=help)
        self._on = on

    def __call__(
        self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, values: Any, option: str | None = None
    ) -> None:
        value = option in self._on
        if getattr(namespace, self.dest) not in (None, value):
            raise argparse.ArgumentError(self, "it is switched on and off; give one of them")
        setattr(namespace, self.dest, value)


class _Parser(argparse.ArgumentParser):
    """Leaves the flags of the command alone: argparse looks at them too, and finds some of them ambiguous."""

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        words = list(sys.argv[1:] if args is None else args)
        start = self._start_of_command(words)
        if start < len(words) and words[start] != "--":
            words.insert(start, "--")
        return super().parse_known_args(words, namespace)

    def _start_of_command(self, words: Sequence[str]) -> int:
        """Index of the first word that is neither a flag nor its value; or of `--`, or of a flag that is unknown."""
        index = 0
        while index < len(words) and words[index].startswith("-") and words[index] != "--":
            flag, equals, _ = words[index].partition("=")
            found = {id(action): action for name, action in self._option_string_actions.items() if name == flag} or {
                id(action): action for name, action in self._option_string_actions.items() if name.startswith(flag)
            }
            if len(found) != 1:
                return len(words)  # argparse's to complain about
            (action,) = found.values()
            index += 1
            if not equals:
                index += 1 if action.nargs is None else int(action.nargs)
        return index


def make_parser() -> argparse.ArgumentParser:
    """The parser of all flags."""
    parser = _Parser(
        prog="fusionrun",
        usage="fusionrun -np N [-H HOSTS | -hostfile FILE] [flags] COMMAND ...",
        description="Starts a training script on one host or on several, with one communication daemon per host.",
        epilog=f"Example: {EXAMPLE}",
    )
    parser.add_argument("-v", "--version", action="version", version=fusion_rt.__version__)
    for title in GROUPS:
        group = parser.add_argument_group(title)
        for knob in KNOBS:
            if knob.group == title and knob.flags:
                _add(group, knob)
    parser.add_argument(
        "command", nargs=argparse.REMAINDER, metavar="COMMAND ...", help="the training script and its arguments"
    )
    return parser


def choices_in(arguments: argparse.Namespace) -> dict[str, Choice]:
    """The choices in parsed arguments, by the names of their knobs.

    Raises:
        SettingError: a value cannot be used, or two flags exclude each other; the text names the flag.
    """
    chosen = {}
    for knob in KNOBS:
        given = getattr(arguments, knob.name, None)
        if given is not None:
            text, source = _text(knob, given)
            chosen[knob.name] = Choice.read(knob, text, source)
    for names, why in _RIVALS:
        sources = [chosen[name].source for name in names if name in chosen]
        if len(sources) > 1:
            raise SettingError(f"{' and '.join(sources)} cannot be given together: {why}")
    return chosen


def _add(group: argparse._ArgumentGroup, knob: Knob) -> None:
    facts = [knob.variable] if knob.variable else []
    if knob.default_text and not knob.idle:
        facts.append(f"default: {knob.default_text}")
    text = (f"{knob.help} ({'; '.join(facts)})" if facts else knob.help).replace("%", "%%")
    if knob.unit is SWITCH:
        group.add_argument(*knob.flags, *knob.off, action=_Switch, dest=knob.name, on=knob.flags, help=text)
        return
    how: Mapping[str, Any] = {"metavar": knob.metavar}
    if knob.many == "append":
        how = {"metavar": knob.metavar, "action": "append"}
    elif knob.many:
        how = {"metavar": tuple(knob.metavar.split()), "nargs": int(knob.many)}
    group.add_argument(*knob.flags, dest=knob.name, help=text, **how)


def _text(knob: Knob, given: str | bool | list[str]) -> tuple[str, str]:
    """The given value as text, and the flag that it belongs to."""
    if isinstance(given, bool):
        return str(int(given)), (knob.flags if given else knob.off)[0]
    if isinstance(given, list):
        return (",".join(given) if knob.many == "append" else " ".join(given)), knob.flags[0]
    return given, knob.flags[0]
