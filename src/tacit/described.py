"""Reads what files and checkpoints hold, checked against a description: types, ranges and checksums.

A description is a type: of plain values (a float is finite), `torch.dtype`, `Tensor` (dense, real, finite),
tuples, lists and mappings of these, a `TypedDict`, or a dataclass, each of whose fields is read by its own;
`Any` is taken as it is. `Annotated` adds what a type does not say: `Between` a range, `JSON` that it stands
in a text. Nothing is computed or allocated by a value before all of it was read.
"""

from __future__ import annotations

import json
import math
import sys
import types
import zipfile
import zlib
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import MISSING, asdict, dataclass, fields, is_dataclass
from functools import cache
from pathlib import Path
from typing import (
    Annotated,
    Any,
    ClassVar,
    Literal,
    NotRequired,
    Self,
    TypeAlias,
    TypeVar,
    Union,
    get_args,
    get_origin,
    get_type_hints,
    is_typeddict,
)

import torch
from torch import Tensor

from tacit.errors import ConfigError, TacitError
from tacit.files import put

T = TypeVar("T")
Built: TypeAlias = Callable[[Any, Any, str], Any]
"""(value, class, where) -> the object of that class that the value describes; `where` names its position, for
errors.
"""
JSON = "JSON"
"""In an `Annotated`: the value is a JSON text, which holds a value of the type."""
FLOATS = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
_FORM = 1
"""Of the texts of `Saved`."""
_TYPES = (*FLOATS, torch.uint8, torch.int8, torch.int32, torch.int64)
REAL = (*_TYPES, torch.bool, torch.int16)
_DTYPES = {str(each).removeprefix("torch."): each for each in _TYPES}


@dataclass(frozen=True)
class Between:
    """A range of numbers, with both ends."""

    least: float = -math.inf
    most: float = math.inf


Whole: TypeAlias = Annotated[int, Between(0, 1 << 53)]
"""A count."""
Positive: TypeAlias = Annotated[int, Between(1, 1 << 53)]
Duration: TypeAlias = Annotated[float, Between(0)]
"""Seconds, or another amount."""


def read(value: Any, kind: Any, where: str = "it", built: Built | None = None) -> Any:
    """The value, which must be as `kind` describes it: lists for tuples will do, and an int for a float.

    Args:
        where: what it is, for errors.
        built: makes the values of all other types; without it, dataclasses are read field by field.

    Raises:
        ValueError: it is not; says where, what is there, and what belongs there.
    """
    origin, inner = get_origin(kind), get_args(kind)
    if kind is Any:
        return value
    if origin is Annotated:
        return _annotated(value, inner, where, built)
    if origin in (Union, types.UnionType):
        return _one_of(value, inner, where, built)
    if origin is Literal:
        if any(value == each and type(value) is type(each) for each in inner):
            return value
    elif origin in (tuple, list):
        if isinstance(value, list | tuple):
            return origin(_items(value, inner if origin is tuple else (*inner, ...), where, built))
    elif isinstance(origin, type) and issubclass(origin, Mapping):
        if isinstance(value, Mapping):
            return {
                _key(name, inner[0], where): read(each, inner[1], f"{where}.{name!s:.40}", built)
                for name, each in value.items()
            }
    elif kind is torch.dtype:
        if isinstance(value, str) and value in _DTYPES:
            return _DTYPES[value]
    elif kind is float:
        if type(value) in (int, float) and abs(value) <= sys.float_info.max:
            return value
    elif kind in (bool, int, str, bytes, type(None)):
        if type(value) is kind:
            return value
    elif kind is Tensor:
        return tensor(value, where)
    elif built is not None:
        return built(value, kind, where)
    elif isinstance(value, Mapping):
        return _by_fields(value, kind, where)
    raise ValueError(f"{where} is {str(value)!r:.60}, where {_name(kind)} belongs")


def _annotated(value: Any, inner: tuple[Any, ...], where: str, built: Built | None) -> Any:
    kind, *more = inner
    if JSON in more:
        try:
            value = json.loads(read(value, str, where))
        except RecursionError as error:
            raise ValueError(f"{where} has brackets within brackets without end") from error
    found = read(value, kind, where, built)
    for each in more:
        if isinstance(each, Between) and not each.least <= found <= each.most:
            end = f" to {each.most:g}" if each.most < math.inf else " or more"
            raise ValueError(f"{where} is {found!r:.60}, where {each.least:g}{end} belongs")
    return found


def _one_of(value: Any, choices: tuple[Any, ...], where: str, built: Built | None) -> Any:
    if value is None and type(None) in choices:
        return None
    errors: list[Exception] = []
    for each in choices:
        try:
            return read(value, each, where, built)
        except (ValueError, TacitError) as error:
            errors.append(error)
    raise next((each for each in errors if isinstance(each, ConfigError)), errors[0])


def _items(values: Sequence[Any], inner: tuple[Any, ...], where: str, built: Built | None) -> tuple[Any, ...]:
    if inner[-1:] == (...,):
        inner = inner[:1] * len(values)
    if len(values) != len(inner):
        raise ValueError(f"{where} has {len(values)} items, where {len(inner)} belong")
    return tuple(
        read(each, kind, f"{where}[{i}]", built)
        for i, (each, kind) in enumerate(zip(values, inner, strict=True))
    )


def _key(name: Any, kind: Any, where: str) -> Any:
    if kind is not int and type(name) is kind:
        return name
    if kind is int and (type(name) is int or _is_number(name)):
        return int(name)
    raise ValueError(f"{where} has the key {str(name)!r:.60}, where {_name(kind)} belongs")


def _is_number(name: Any) -> bool:
    return isinstance(name, str) and name.isascii() and name.isdigit() and len(name) < 19


def _by_fields(value: Mapping[str, Any], kind: Any, where: str) -> Any:
    declared, needed = _declared(kind)
    strange = [name for name in value if name not in declared]
    if strange or not needed <= value.keys():
        says = f"has {str(strange[0])!r:.60}" if strange else f"lacks {min(needed - value.keys())!r}"
        raise ValueError(f"{where} {says}: it should have {', '.join(declared)}")
    return kind(**{name: read(each, declared[name], f"{where}.{name}") for name, each in value.items()})


@cache
def _declared(kind: Any) -> tuple[Mapping[str, Any], frozenset[str]]:
    """The fields of a dataclass or a `TypedDict`, and those that must be there."""
    hints = get_type_hints(kind, include_extras=True)
    if is_typeddict(kind):
        free = {name: get_args(each)[0] for name, each in hints.items() if get_origin(each) is NotRequired}
        return {**hints, **free}, frozenset(hints.keys() - free.keys())
    assert is_dataclass(kind), kind
    declared = [each for each in fields(kind) if each.init]
    needed = [each.name for each in declared if each.default is each.default_factory is MISSING]
    return {each.name: hints[each.name] for each in declared}, frozenset(needed)


def _name(kind: Any) -> str:
    return getattr(kind, "__name__", None) or str(kind)


# ---- tensors ------------------------------------------------------------------------------------------


def tensor(
    value: Any,
    where: str,
    shape: Sequence[int] | None = None,
    dtypes: Collection[torch.dtype] = REAL,
    finite: bool = True,
) -> Tensor:
    """The value, which must be a dense tensor.

    Args:
        where: what it is, for errors.
        shape: its dimensions, -1 for any; None: whatever they are.
        dtypes: of which types it may be.
        finite: whether NaN and infinity are refused.

    Raises:
        ValueError: it is not; says what it is.
    """
    if not isinstance(value, Tensor) or value.layout is not torch.strided or value.is_meta:
        raise ValueError(f"{where} is {str(value)!r:.60}, where a tensor belongs")
    if value.dtype not in dtypes:
        raise ValueError(f"{where} is of {value.dtype}, where {' or '.join(map(str, dtypes))} belongs")
    if shape is not None and (
        value.dim() != len(shape)
        or any(want not in (-1, have) for want, have in zip(shape, value.shape, strict=True))
    ):
        raise ValueError(f"{where} has the shape {(*value.shape,)}, where {(*shape,)} belongs")
    if finite and value.is_floating_point() and not bool(value.isfinite().all()):
        raise ValueError(f"{where} holds NaN or infinity, where finite numbers belong")
    return value


def checksum(x: Tensor) -> int:
    """The CRC-32 of its entries, as bytes in their order."""
    return zlib.crc32(x.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data)


# ---- files --------------------------------------------------------------------------------------------


def load(path: Path) -> Any:
    """What torch.save has written; `torch.load` does not look at the checksums of its records, and this does.

    Raises:
        OSError: it cannot be read.
        ValueError: it is damaged, cut short, or no such file.
    """
    try:
        with zipfile.ZipFile(path) as records:
            damaged = records.testzip()
        if damaged is not None:
            raise ValueError(f"the checksum of its record {damaged} is wrong")
        return torch.load(path, map_location="cpu", weights_only=True)
    except OSError:
        raise
    except Exception as error:  # both raise whatever the damage leads to
        raise ValueError(f"it is damaged, or cut short: {error}") from error


class Saved:
    """A dataclass of plain values that is kept in files: a line of JSON, with its form and its checksum.

    Attributes:
        what: what it is, for errors; `made_by`: the command that writes such a file.
    """

    what: ClassVar[str]
    made_by: ClassVar[str]

    def check(self) -> None:
        """Look at what the types of the fields do not say.

        Raises:
            ValueError: it cannot be.
        """

    def to_json(self) -> str:
        """As text; `from_json` reads it."""
        values = asdict(self)  # type: ignore[call-overload]
        return json.dumps({"form": _FORM, **values, "checksum": _sum(values)}) + "\n"

    @classmethod
    def from_json(cls, text: str, origin: str = "the text") -> Self:
        """Read what `to_json` wrote, or that without a checksum.

        Args:
            origin: where the text is from, for the error.

        Raises:
            ConfigError: it is no such text.
        """
        try:
            found = _of_text(text, cls)
            found.check()
        except ValueError as error:
            raise ConfigError(
                f"{origin} holds no {cls.what} ({error}): give a file that {cls.made_by} --out has written"
            ) from None
        return found

    def save(self, path: Path) -> None:
        """Write it to a file, which is replaced as a whole."""
        put(path, self.to_json())

    @classmethod
    def load(cls, path: Path) -> Self:
        """Read a file that `save` wrote.

        Raises:
            ConfigError: there is none, or it is another.
        """
        try:
            text = path.read_text()
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(
                f"cannot read {path} ({error}): give a file that {cls.made_by} --out has written"
            ) from None
        return cls.from_json(text, str(path))


def _of_text(text: str, kind: type[T]) -> T:
    try:
        values = json.loads(text)
    except RecursionError as error:
        raise ValueError("it has brackets within brackets without end") from error
    if not isinstance(values, dict) or "form" not in values:
        raise ValueError("it has no form")
    if values.pop("form") != _FORM:
        raise ValueError("its form is that of another version of tacit")
    told = values.pop("checksum", None)
    found: T = read(values, kind)
    if told not in (None, _sum(values)):  # as they stand there: an earlier version had fewer fields
        raise ValueError("its checksum is that of another content; where you have changed it, remove that")
    return found


def _sum(values: Mapping[str, Any]) -> int:
    return zlib.crc32(json.dumps(values).encode())
