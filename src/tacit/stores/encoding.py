"""Values that travel to a parameter server and back, as JSON that is read by declared types.

A frozen dataclass is written as its name and its fields. The reader gives the classes that may be named. One
is built by its constructor, which checks its arguments, and each field is read by its declared type. Nothing
else is imported, looked up or called, so the worst that a text can do is to be refused.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from functools import cache, partial
from typing import Any, get_type_hints

import torch

from tacit import described
from tacit.errors import ConfigError, PayloadError, TacitError

MOST_BYTES = 1 << 24
"""Of a text: room for the names and shapes of some 100,000 parameters."""


def write(value: Any) -> bytes:
    """Plain values, types of tensors, and frozen dataclasses of these, as a text.

    Raises:
        ConfigError: there is something else among them, or the text would be too long.
    """
    try:
        text = json.dumps(_plain(value), allow_nan=False).encode()
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{value!r:.200} cannot be sent to a parameter server: {error}") from error
    if len(text) > MOST_BYTES:
        raise ConfigError(
            f"{len(text)} bytes are more than a parameter server takes in a message ({MOST_BYTES}): give the "
            "model fewer parameters, or shorter names"
        )
    return text


def _plain(value: Any) -> Any:
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    if isinstance(value, Mapping):
        return {str(key): _plain(each) for key, each in value.items()}
    if isinstance(value, torch.dtype):
        return str(value).removeprefix("torch.")
    if is_dataclass(value) and not isinstance(value, type):
        given = {each.name: _plain(getattr(value, each.name)) for each in fields(value) if each.init}
        return {"is": name_of(type(value)), **given}
    raise ConfigError(
        "a parameter server can read only compressors and predictors that are dataclasses of plain values, "
        f"and {name_of(type(value))} is not: use one of tacit.compressors, or make it such a dataclass"
    )


def name_of(cls: type) -> str:
    """How a class is named in a text: one of tacit's without its module, which may change."""
    module = "tacit" if cls.__module__.startswith("tacit.") else cls.__module__
    return f"{module}.{cls.__qualname__}"


def read(text: bytes, as_type: Any, known: Mapping[str, type]) -> Any:
    """The value of a text, which must be of the declared type; `known`: the classes that it may name.

    Raises:
        PayloadError: it is no such text.
        ConfigError: it is one, and names an unknown class, or arguments that cannot be.
    """
    try:
        plain = json.loads(text, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        raise PayloadError(f"a text that is no JSON: {str(error)[:200]}") from error
    try:
        return described.read(plain, as_type, built=partial(_built, known))
    except TacitError:
        raise
    except ValueError as error:
        raise PayloadError(str(error)) from None


def _refuse_constant(name: str) -> float:
    raise ValueError(f"{name} is no finite number")


def _built(known: Mapping[str, type], plain: Any, wanted: Any, where: str) -> Any:
    if not isinstance(plain, dict) or not isinstance(plain.get("is"), str):
        raise PayloadError(f"{where} is {str(plain)!r:.60}, where {wanted.__name__} belongs")
    cls = known.get(plain["is"])
    if cls is None:
        raise ConfigError(
            "a parameter server can read only tacit's compressors and those of modules that it imports, "
            f"and {plain['is']:.100} is none of them: use one of tacit.compressors, or start the server with "
            "--import and the module that has the class"
        )
    if not issubclass(cls, wanted):
        raise PayloadError(f"{where} is a {cls.__name__}, where {wanted.__name__} belongs")
    declared = _declared(cls)
    given = {name: each for name, each in plain.items() if name != "is"}
    if given.keys() != declared.keys():
        raise PayloadError(f"{where} is a {cls.__name__} with {', '.join(given)!r:.200}: of another version?")
    values = {
        name: described.read(given[name], declared[name], f"{where}.{name}", partial(_built, known))
        for name in declared
    }
    try:
        return cls(**values)
    except TacitError:
        raise
    except Exception as error:
        raise ConfigError(f"{where} is no {cls.__name__}: {error}") from error


@cache
def _declared(cls: type) -> Mapping[str, Any]:
    hints = get_type_hints(cls)
    return {each.name: hints[each.name] for each in fields(cls) if each.init}
