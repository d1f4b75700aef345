"""The grammar of the text form: `algorithm:key=value,key=value`, by the types that a function declares."""

from __future__ import annotations

import re
import types
import typing
from collections.abc import Callable, Mapping
from inspect import Parameter, signature
from typing import Any, Literal

from tacit.errors import ConfigError, unknown
from tacit.strategy import AnyStrategy


def split_text(text: str) -> tuple[str, dict[str, str]]:
    """`"topk:ratio=0.01"` -> `("topk", {"ratio": "0.01"})`.

    Raises:
        ConfigError: the text is not of the form `algorithm:key=value,key=value`.
    """
    name, colon, rest = text.strip().partition(":")
    if spaced := re.fullmatch(r"([\w-]+)\s+(\w+\s*=.*)", text.strip()):
        raise ConfigError(f"{text!r} has a space for the colon: write {':'.join(spaced.groups())}")
    if re.search(r";\s*\w+\s*=", rest):
        raise ConfigError(f"{text!r} has a ;, and commas part parameters: write {text.replace(';', ',')}")
    pairs: dict[str, str] = {}
    for piece in rest.split(",") if colon else []:
        key, equals, value = (part.strip() for part in piece.partition("="))
        if not (key and equals and value):
            raise ConfigError(
                f"{piece!r} in {text!r} is not a parameter: write algorithm:key=value,key=value, "
                "such as topk:ratio=0.01"
            )
        if key in pairs:
            raise ConfigError(f"{key!r} stands twice in {text!r}: write it once")
        pairs[key] = value
    return name.strip(), pairs


def parameters(build: Callable[..., AnyStrategy]) -> dict[str, tuple[Any, Any]]:
    """The parameters of an algorithm: name -> (type, default; `Parameter.empty` where it must be given).

    Raises:
        ConfigError: one has no type, or one that no text can be read as.
    """
    hints = typing.get_type_hints(build)
    found = {name: (hints.get(name), p.default) for name, p in signature(build).parameters.items()}
    for name, (kind, _) in found.items():
        if not all(each in _READ or typing.get_origin(each) is Literal for each in alternatives(kind)):
            declared = "of no type" if kind is None else f"a {getattr(kind, '__name__', kind)}"
            raise ConfigError(
                f"the parameter {name!r} of {build.__module__}.{build.__name__} is {declared}, by which its "
                "text could be read: write int, float, bool, str or a Literal after it, or one | None"
            )
    return found


def typed(name: str, build: Callable[..., AnyStrategy], pairs: Mapping[str, str]) -> dict[str, Any]:
    """The values of `pairs` in the types that the algorithm declares.

    Raises:
        ConfigError: a parameter is unknown or missing, or its value is not of its type.
    """
    known = parameters(build)
    for key in pairs:
        if key not in known:
            raise (
                unknown(f"parameter of {name}", key, known)
                if known
                else ConfigError(f"{name} takes no parameters, and {key!r} was given: write {name} alone")
            )
    for key, (_, default) in known.items():
        if default is Parameter.empty and key not in pairs:
            raise ConfigError(f"{name} needs {key}: write {name}:{key}=...")
    return {key: _value(f"{name}:{key}", known[key][0], text) for key, text in pairs.items()}


def alternatives(kind: Any) -> tuple[Any, ...]:
    """The types of which a value may be; one where it is no union."""
    return typing.get_args(kind) if typing.get_origin(kind) in (types.UnionType, typing.Union) else (kind,)


def _value(where: str, kind: Any, text: str) -> Any:
    kinds = alternatives(kind)
    words = [word for k in kinds if typing.get_origin(k) is Literal for word in k.__args__]
    if text in words:
        return text
    if type(None) in kinds and text.lower() == "none":
        return None
    plain = [k for k in kinds if typing.get_origin(k) is not Literal and k is not type(None)]
    if not plain:
        raise unknown(f"value of {where}", text, [*words, *(["none"] if type(None) in kinds else [])])
    try:
        return _BOOLS[text.lower()] if plain[0] is bool else plain[0](text)
    except (ValueError, KeyError):
        hint = " or ".join([_EXAMPLES[plain[0]], *map(repr, words)])
        raise ConfigError(f"{where}={text} is not of type {plain[0].__name__}: {hint}") from None


_READ = (int, float, bool, str, type(None))
_BOOLS = {"true": True, "false": False, "yes": True, "no": False, "1": True, "0": False}
_EXAMPLES = {
    int: "write a whole number, such as 8",
    float: "write a number, such as 0.01",
    bool: "write true or false",
    str: "write a word",
}
