"""The classes that a worker may name to a server: tacit's, and those of imported modules."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import is_dataclass
from types import MappingProxyType

from tacit import compressors, own_modules, prediction
from tacit.compressors.wrappers import Part
from tacit.contracts import Compressor, Matrix, PayloadSpec
from tacit.errors import ConfigError
from tacit.prediction.predictor import Predictor
from tacit.prediction.server_prediction import Pushed, ServerPrediction
from tacit.stores.encoding import name_of
from tacit.stores.messages import Hello, MessageSpec, RunSpec
from tacit.topologies.star import Asynchronous, DelayedNesterov, StaleSynchronous, Star, Synchronous

_PUBLIC = [getattr(module, name) for module in (compressors, prediction) for name in module.__all__]
_OURS = (
    *(RunSpec, MessageSpec, Hello),
    *(Star, Synchronous, Asynchronous, StaleSynchronous, DelayedNesterov),
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

    A class counts that a module defines or imports by name, and that is a dataclass. The modules that the
    environment names are imported, too (`own_modules`).

    Raises:
        ConfigError: a module cannot be imported, or one of `modules` has no such class.
    """
    allowed = dict(ALLOWED_TYPES)
    for name in modules:
        found = _classes(name)
        if not found:
            raise ConfigError(
                f"--import {name} has no compressor: give a module with a dataclass derived from Compressor"
            )
        allowed = found | allowed
    for name in own_modules.named():
        allowed = _classes(name) | allowed
    return MappingProxyType(allowed)


def _classes(module: str) -> dict[str, type]:
    return {
        name_of(each): each
        for each in vars(own_modules.load(module)).values()
        if isinstance(each, type) and issubclass(each, Compressor | Predictor) and is_dataclass(each)
    }
