"""The YAML file of `--config-file`: Horovod's keys, and this project's own beside them.

Unknown keys are told with the nearest known one, since a typing mistake would else go unnoticed.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any

from fusion_rt.core.errors import SettingError
from fusion_rt.knobs import Knob
from fusion_rt.runner.command.flags import Choice
from fusion_rt.settings import KNOBS
from fusion_rt.units import CODEC, SWITCH, TEXT

MAX_BYTES = 1024 * 1024  # of the file; a hundred lines are a long one
_MAX_MERGED = 1000  # keys of one mapping that come from others
_MAX_BITS = 64  # of a number
_MAX_KEY = 200  # characters that are looked at
_OF_SCALARS = (
    ArithmeticError,
    AttributeError,
    LookupError,
    TypeError,
)  # PyYAML's errors for `!!int ''` and its like
_BY_KEY = {knob.yaml: knob for knob in KNOBS if knob.yaml}
_SECTIONS = {key.rpartition(".")[0] for key in _BY_KEY} - {""}


def read(path: str) -> tuple[dict[str, Choice], list[str]]:
    """The choices in a file, by the names of their knobs, and a sentence for each key that is not known.

    Raises:
        SettingError: the file cannot be read, is no YAML, is too long, or has a value that cannot be used.
    """
    chosen, warnings = {}, []
    for key, value in _leaves(_load(path), path):
        knob = _BY_KEY.get(key)
        if knob is None:
            warnings.append(
                f"{path} has a key {key!r} that is not known and was left out; did you mean {_nearest(key)!r}?"
            )
        elif value is not None:
            source = f"{key} in {path}"
            chosen[knob.name] = Choice.read(knob, _text(knob, value, source), source)
    return chosen, warnings


def _nearest(key: str) -> str:
    """The known key most like it: of its section, if it stands in one that is known."""
    section, _, _ = key.rpartition(".")
    known = [*_BY_KEY, *sorted(_SECTIONS)]
    if section in _SECTIONS:
        known = [other for other in known if other.startswith(f"{section}.")]
    return difflib.get_close_matches(key, known, n=1, cutoff=0.0)[0]


def _load(path: str) -> Any:
    import yaml  # takes 30 ms, for which the many jobs without a file need not wait

    try:
        with open(path, "rb") as file:
            data = file.read(MAX_BYTES + 1)
    except OSError as error:
        raise SettingError(f"--config-file {path} cannot be read: {error.strerror}") from None
    if len(data) > MAX_BYTES:
        raise SettingError(f"--config-file {path} has more than {MAX_BYTES} bytes: it is no file of settings")
    try:
        return yaml.load(data, _loader())
    except (
        yaml.YAMLError,
        ValueError,
        RecursionError,
    ) as error:  # ValueError: a date that does not exist, and the like
        raise SettingError(f"--config-file {path} is no YAML: {' '.join(str(error).split())}") from None
    except _OF_SCALARS:
        raise SettingError(f"--config-file {path} is no YAML: a value is not what its tag says") from None


@cache
def _loader() -> Any:
    """YAML's safe loader, for which a list of mappings to merge (`<<: [*a, *a]`) may not grow without bound."""
    import yaml

    class Loader(yaml.SafeLoader):
        def flatten_mapping(self, node: Any) -> None:
            for key, value in node.value:
                if key.tag == "tag:yaml.org,2002:merge" and isinstance(value, yaml.SequenceNode):
                    mappings = [part for part in value.value if isinstance(part, yaml.MappingNode)]
                    for part in mappings:
                        self.flatten_mapping(part)
                    if sum(len(part.value) for part in mappings) > _MAX_MERGED:
                        raise yaml.YAMLError(f"mappings of more than {_MAX_MERGED} keys are merged")
            super().flatten_mapping(node)

    return Loader


def _leaves(document: Any, path: str) -> Iterator[tuple[str, Any]]:
    """The keys, with a dot behind each section's, and their values; an unknown section is a leaf."""
    if document is None:
        return  # an empty file
    if not isinstance(document, Mapping):
        raise SettingError(
            f"--config-file {path} has to be a mapping with keys such as 'params:', not {_kind(document)}"
        )
    for key, value in document.items():
        if _name(key) not in _SECTIONS:
            yield _name(key), value
        elif isinstance(value, Mapping):
            yield from ((f"{key}.{_name(inner)}", leaf) for inner, leaf in value.items())
        elif value is not None:
            raise SettingError(
                f"{key} in {path} has to be a mapping, such as '{_example(str(key))}', not {_kind(value)}"
            )


def _name(key: Any) -> str:
    """A key as text; a number may have more digits than Python writes."""
    return str(key)[:_MAX_KEY] if not isinstance(key, int) or key.bit_length() <= _MAX_BITS else _kind(key)


def _text(knob: Knob, value: Any, source: str) -> str:
    """A value as it would stand in a variable or after a flag."""
    if isinstance(value, bool) and knob.unit is SWITCH:
        return str(int(value))
    fits = isinstance(value, str) or (isinstance(value, int | float) and knob.unit not in (TEXT, CODEC))
    if isinstance(value, bool) or not fits or (isinstance(value, int) and value.bit_length() > _MAX_BITS):
        wanted = (
            "yes or no"
            if knob.unit is SWITCH
            else "text"
            if knob.unit in (TEXT, CODEC)
            else "a number, or text with a unit"
        )
        raise SettingError(f"{source} has to be {wanted}, not {_kind(value)}")
    return str(value)


def _kind(value: Any) -> str:
    if isinstance(value, int) and value.bit_length() > _MAX_BITS:
        return "a number of so many digits"
    names = {bool: "yes or no", int: "a number", float: "a number", str: "text", list: "a list", dict: "a mapping"}
    return names.get(type(value), f"a {type(value).__name__}")


def _example(section: str) -> str:
    inner = min((key for key in _BY_KEY if key.startswith(f"{section}.")), key=lambda key: bool(_BY_KEY[key].idle))
    return f"{section}: {{{inner.rpartition('.')[2]}: ...}}"
