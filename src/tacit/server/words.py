"""What a worker may name to a server: the compressors, predictors and services that tacit makes public."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import is_dataclass
from types import MappingProxyType

from tacit import compressors, prediction
from tacit.compressors.wrappers import Part
from tacit.contracts import Matrix, PayloadSpec
from tacit.prediction.server_prediction import Pushed, ServerPrediction
from tacit.topologies.star import Asynchronous, StaleSynchronous, Star, Synchronous
from tacit.transports.messages import About, Declared, Hello
from tacit.transports.told import name_of

_PUBLIC = [getattr(module, name) for module in (compressors, prediction) for name in module.__all__]
_OURS = (
    *(About, Declared, Hello),
    *(Star, Synchronous, Asynchronous, StaleSynchronous),
    *(PayloadSpec, Matrix, Part, Pushed, ServerPrediction),
)
KNOWN: Mapping[str, type] = MappingProxyType(
    {name_of(each): each for each in (*_PUBLIC, *_OURS) if isinstance(each, type) and is_dataclass(each)}
)
"""By the names that `told.name_of` gives them."""
