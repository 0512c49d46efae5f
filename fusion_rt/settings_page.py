"""Writes docs/settings.md from the table in `fusion_rt.settings`: `python -m fusion_rt.settings_page`."""

from __future__ import annotations

import re
from pathlib import Path

from fusion_rt.knobs import COMPATIBLE, GROUPS, Knob
from fusion_rt.settings import KNOBS
from fusion_rt.units import BYTES, LIMIT, MIB, SECONDS, SWITCH

PAGE = Path(__file__).resolve().parents[1] / "docs" / "settings.md"
_HEAD = """\
# Settings

<!-- Written by `python -m fusion_rt.settings_page`; change fusion_rt/settings.py instead. -->

This page lists every flag of `fusionrun`, environment variable and YAML key (`--config-file`). A value is found in this
order: flag, YAML file, environment variable, default. Flags may be abbreviated as long as they are unique (`--slots`).
They end with the first word that is no flag. A value that starts with a dash needs the equals sign
(`--mpi-args="-x A"`).

Sizes and durations take suffixes everywhere (`64MiB`, `500kB`, `1ms`, `2min`). The row gives the unit of a bare number,
which is Horovod's. Switches are 1 or 0 in variables, true or false in YAML.

A YAML key with a dot is a key within a mapping:

```yaml
params:
  fusion_threshold_mb: 32
stall_check:
  shutdown_time_seconds: 5min
```
"""
_COMPATIBLE = """\
Command lines for `horovodrun` work as they are. One warning names all of these settings that were used. If Horovod
reads a variable, it is set for the workers.
"""


def page() -> str:
    """The whole page, in Markdown."""
    return "\n".join([_HEAD, *(_section(title) for title in GROUPS)])


def _section(title: str) -> str:
    head = [f"## {title[0].upper()}{title[1:]}", ""]
    if title == COMPATIBLE:
        head += [_COMPATIBLE]
    head += ["| flag, variable, YAML key | default | meaning |", "| --- | --- | --- |"]
    rows = [_row(knob) for knob in KNOBS if knob.group == title]
    return "\n".join([*head, *rows, ""])


def _row(knob: Knob) -> str:
    value = "" if knob.unit is SWITCH else f" {knob.metavar}"
    names = [*(f"{flag}{value}" for flag in (*knob.flags, *knob.off)), *filter(None, (knob.variable, knob.yaml))]
    default = "" if knob.idle else knob.default_text
    cells = ("<br>".join(f"`{name}`" for name in names), default, " ".join(_meaning(knob)))
    return f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"


def _meaning(knob: Knob) -> list[str]:
    text = re.sub(r"\bdocs/([\w/-]+\.md)", r"[\1](\1)", knob.help)
    sentences = [text if text.endswith(".") else f"{text}."]
    if knob.unit in (BYTES, SECONDS, LIMIT):
        sentences.append(f"A bare number is {_bare(knob)}.")
    if knob.inverse:
        sentences.append("The variable means the opposite.")
    if knob.idle:
        sentences.append(f"No effect: {knob.idle}.")
    return sentences


def _bare(knob: Knob) -> str:
    """The unit of a number without a suffix, in the flag and the YAML file, and in the variable."""
    names = {MIB: "MiB", 1.0: "bytes" if knob.unit is BYTES else "seconds", 1e-3: "milliseconds"}
    outside, inside = names[knob.bare], names[knob.bare_variable]
    if outside == inside or not knob.flags:
        return f"in {inside}"
    return f"in {outside}, but in {inside} in the variable"


def main() -> None:
    """Writes the page of this checkout."""
    PAGE.write_text(page(), encoding="utf-8")


if __name__ == "__main__":
    main()
