"""The classes that a worker may name to a server: tacit's, and those of imported modules."""

from __future__ import annotations

import importlib
from collections.abc import Iterable, Mapping
from dataclasses import is_dataclass
from types import MappingProxyType

from tacit import compressors, prediction
from tacit.compressors.wrappers import Part
from tacit.contracts import Compressor, Matrix, PayloadSpec
from tacit.errors import ConfigError
from tacit.prediction.predictor import Predictor
from tacit.prediction.server_prediction import Pushed, ServerPrediction
from tacit.stores.encoding import name_of
from tacit.stores.messages import Hello, MessageSpec, RunSpec
from tacit.topologies.star import Asynchronous, StaleSynchronous, Star, Synchronous

_PUBLIC = [getattr(module, name) for module in (compressors, prediction) for name in module.__all__]
_OURS = (
    *(RunSpec, MessageSpec, Hello),
    *(Star, Synchronous, Asynchronous, StaleSynchronous),
    *(PayloadSpec, Matrix, Part, Pushed, ServerPrediction),
)
AllowedTypes = Mapping[str, type]
"""Classes by the names that `encoding.name_of` gives them."""
ALLOWED_TYPES: AllowedTypes = MappingProxyType(
    {name_of(each): each for each in (*_PUBLIC, *_OURS) if isinstance(each, type) and is_dataclass(each)}
)
"""tacit's own."""


def with_modules(modules: Iterable[str]) -> AllowedTypes:
    """tacit's classes, and the compressors and predictors of these modules, which are imported.

    A class counts that a module defines or imports by name, and that is a dataclass.

    Raises:
        ConfigError: a module cannot be imported, or has no such class.
    """
    allowed = dict(ALLOWED_TYPES)
    for name in modules:
        try:
            module = importlib.import_module(name)
        except Exception as error:
            raise ConfigError(
                f"--import {name} cannot be imported ({type(error).__name__}: {error}): give a module that "
                "Python finds from here, such as my_codecs for my_codecs.py in this folder"
            ) from error
        found = {
            name_of(each): each
            for each in vars(module).values()
            if isinstance(each, type) and issubclass(each, Compressor | Predictor) and is_dataclass(each)
        }
        if not found:
            raise ConfigError(
                f"--import {name} has no compressor: give a module with a dataclass derived from Compressor"
            )
        allowed |= {each: cls for each, cls in found.items() if each not in ALLOWED_TYPES}
    return MappingProxyType(allowed)
