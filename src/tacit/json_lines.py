"""Files of JSON, one object a line: lines are written, read back and checked.

Records of runs (`lab.records`) and timelines are such lines.
Each says its kind and the version of its schema.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, ClassVar, Literal, NoReturn, Self, TypeVar, get_origin, get_type_hints

from tacit.errors import ConfigError, unknown

VERSION = 1
"""The schema's version; it grows when a reader of the old one would misread the new one."""

T = TypeVar("T")
L = TypeVar("L", bound="Line")

_LEAST = {
    **dict.fromkeys(("epochs", "batch_per_rank", "world_size", "cores"), 1),
    **dict.fromkeys(("seed", "parameters", "epoch", "step", "steps", "rank"), 0),
    **dict.fromkeys(("seconds", "seconds_to_target", "bytes_between_nodes", "mb_between_nodes"), 0),
    **dict.fromkeys(("consensus_distance", "consensus_relative"), 0),
}
"""The least value of numbers with this name, in any record."""
_SHARES = ("accuracy", "target")


@dataclass(frozen=True, kw_only=True)
class Line:
    """The base of all records: to JSON and back."""

    kind: ClassVar[str]
    algorithm: str
    version: int = VERSION

    def to_json(self) -> str:
        """This record as one line of JSON without its end; numbers that are not finite become null."""
        return json.dumps({"kind": self.kind, **_finite(asdict(self))}, allow_nan=False)

    @classmethod
    def from_json(cls, line: str) -> Self:
        """Read a record back.

        Raises:
            ConfigError: The line is broken, of another kind, or written by a newer version, or a field is not
                of its type.
        """
        return cls._from_mapping(parse_object(line))

    @classmethod
    def _from_mapping(cls, values: Mapping[str, Any]) -> Self:
        if values["kind"] != cls.kind:
            raise ConfigError(f"this is a record of kind {values['kind']!r}, not {cls.kind!r}")
        return build(cls, {name: value for name, value in values.items() if name != "kind"})


def read_lines(path: Path, parse: Callable[[str], L]) -> Iterator[L]:
    """Read a file line by line.

    Raises:
        ConfigError: The file cannot be read, or a line of it; the message names file and line.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read {path}: {error}") from error
    for number, line in enumerate(text.splitlines(), start=1):
        try:
            yield parse(line)
        except ConfigError as error:
            raise ConfigError(f"{path}, line {number}: {error}") from error


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is no number in JSON: write null")


def parse_object(line: str) -> dict[str, Any]:
    """The object in a line.

    Raises:
        ConfigError: it is no JSON object with a kind and a version, or of a newer version.
    """
    try:
        values = json.loads(line, parse_constant=_refuse)
    except json.JSONDecodeError as error:
        raise ConfigError(f"not a record: {error.msg} at character {error.pos} of {line[:60]!r}") from error
    except ValueError as error:
        raise ConfigError(f"not a record: {error}") from error
    except RecursionError as error:
        raise ConfigError(f"not a record, brackets within brackets without end: {line[:60]!r}") from error
    if not (
        isinstance(values, dict)
        and isinstance(values.get("kind"), str)
        and isinstance(values.get("version"), int)
    ):
        raise ConfigError(f"not a record, it has no kind and version: {line[:60]!r}")
    if values["version"] > VERSION:
        raise ConfigError(
            f"this record has version {values['version']}, and this tacit reads up to {VERSION}: update tacit"
        )
    return values


def build(cls: type[T], values: Mapping[str, Any]) -> T:
    """A dataclass from values of JSON, each checked against the type that the field declares.

    Raises:
        ConfigError: a field is unknown, missing, or not of its type or range.
    """
    names = [f.name for f in fields(cls)]  # type: ignore[arg-type]
    for name in values:
        if name not in names:
            raise unknown(f"field of {cls.__name__}", name, names)
    kinds = get_type_hints(cls)
    for name, value in values.items():
        if not is_of(value, kinds[name]):
            raise ConfigError(
                f"{name} is {value!r:.60} in this {cls.__name__}: write {_type_name(kinds[name])}"
            )
        if isinstance(value, int | float) and value < _LEAST.get(name, -math.inf):
            raise ConfigError(f"{name} is {value!r:.60} in this {cls.__name__}: write {_LEAST[name]} or more")
        if isinstance(value, int | float) and name in _SHARES and not 0 <= value <= 1:
            raise ConfigError(f"{name} is {value!r:.60} in this {cls.__name__}: write a number from 0 to 1")
    try:
        return cls(**values)
    except TypeError as error:
        raise ConfigError(f"this record lacks a field: {error}") from error


def is_of(value: Any, kind: Any) -> bool:
    """Whether a value read from JSON is of the type that a field declares; an int will do for a float."""
    if isinstance(kind, UnionType):
        return any(is_of(value, each) for each in kind.__args__)
    if get_origin(kind) is Literal:
        return value in kind.__args__
    if kind in (int, float):
        number = isinstance(value, int if kind is int else int | float) and not isinstance(value, bool)
        return number and abs(value) <= sys.float_info.max
    return isinstance(value, get_origin(kind) or kind)


def _type_name(kind: Any) -> str:
    """A field's type in words."""
    if isinstance(kind, UnionType):
        return " or ".join(_type_name(each) for each in kind.__args__)
    if get_origin(kind) is Literal:
        return " or ".join(map(repr, kind.__args__))
    return _TYPE_NAMES.get(get_origin(kind) or kind, "an object")


_TYPE_NAMES = {
    int: "a whole number",
    float: "a finite number",
    bool: "true or false",
    str: "a text",
    dict: "an object",
    list: "a list",
    NoneType: "null",
}


def _finite(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _finite(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(inner) for inner in value]
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    return value if value is None or isinstance(value, str | int) else str(value)
