"""The columns of the table of settings (`settings`): the properties of a knob, and the groups in which people see
it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from fusion_rt.core.errors import SettingError
from fusion_rt.units import TEXT, Unit

START, HOSTS, REACH, OUTPUT, ELASTIC, FUSION, STALLS, DAEMON, LOGGING, TIMELINE, AUTOTUNE, COMPATIBLE = GROUPS = (
    "start of a job",
    "hosts",
    "how hosts are reached",
    "output",
    "elastic jobs",
    "tensor fusion and compression",
    "stalls",
    "daemons and network",
    "logging",
    "timeline",
    "autotuning",
    "accepted for compatibility",
)


@dataclass(frozen=True)
class Knob:
    """One row of the table.

    Attributes:
        name: of the attribute of `Settings`, or of the launcher's option.
        group: under which heading it stands; one of `GROUPS`.
        help: its meaning.
        unit: the kind of its value.
        default: its value when none is given; None: there is none, or `absent` describes it.
        flags: its flags, the usual one first.
        off: flags that switch it off.
        variable: its environment variable; "": only the launcher uses it.
        inverse: the variable means the opposite of flag and YAML key.
        yaml: its key in the YAML file, with a dot behind each mapping's key.
        choices: all values there are.
        least, most: the smallest and the largest value allowed.
        bare: bytes or seconds that a number without a suffix counts after the flag and in YAML.
        bare_variable: the same in the variable.
        absent: the effect without a value, in words.
        placeholder: stands for the value in the help, if not the unit's name.
        many: how many values the flag takes, when not one: a number; or "append": the flag may be repeated.
        idle: why nothing comes of it, if so.
        shared: daemons compare it before the job starts: it decides their messages to each other, and when these leave.
    """

    name: str
    group: str
    help: str
    unit: Unit = TEXT
    default: Any = None
    flags: tuple[str, ...] = ()
    off: tuple[str, ...] = ()
    variable: str = ""
    inverse: bool = False
    yaml: str = ""
    choices: tuple[str, ...] = ()
    least: float | None = None
    most: float | None = None
    bare: float = 1.0
    bare_variable: float = 1.0
    absent: str = ""
    placeholder: str = ""
    many: str = ""
    idle: str = ""
    shared: bool = False

    def parse(self, text: str, source: str) -> Any:
        """The value in a text.

        Args:
            text: as it was written.
            source: where it stands: the variable's name, or anything else, which is then where `bare` applies.

        Raises:
            SettingError: it cannot be used; the sentence begins with the source.
        """
        in_variable = source == self.variable
        try:
            value = self.unit.parse(text, self.bare_variable if in_variable else self.bare)
        except SettingError as error:
            raise SettingError(f"{source}: {error}") from None
        if self.choices:
            known = {choice.lower(): choice for choice in self.choices}
            if value.lower() not in known:
                raise SettingError(f"{source}: {text!r} is not one of {', '.join(self.choices)}")
            value = known[value.lower()]
        if self.least is not None and value < self.least:
            raise SettingError(f"{source}: {text!r} is below the least value allowed, {self.least:g}")
        if self.most is not None and value > self.most:
            raise SettingError(f"{source}: {text!r} is above the largest value allowed, {self.most:g}")
        return not value if in_variable and self.inverse else value

    def write(self, value: Any) -> str:
        """A value as the variable has it."""
        return self.unit.write(not value if self.inverse else value, self.bare_variable)

    @property
    def default_text(self) -> str:
        """The value that applies when none is given, for people; empty when that goes without saying."""
        return self.absent or ("" if self.default in (None, "") else self.unit.show(self.default))

    @property
    def metavar(self) -> str:
        """The word that stands for the value in help texts."""
        return "|".join(self.choices) or self.placeholder or self.unit.name
