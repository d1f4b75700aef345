"""Files of recorded layers: safetensors, which hold numbers and text and run nothing when they are read."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from torch import Tensor

from tacit.errors import ConfigError, installing
from tacit.files import put
from tacit.prediction.predictor import KINDS
from tacit_lab.predictor_training.layers import Layer

VERSION = 3
SPLITS = ("train", "architecture", "data")
HEADER_TYPES = {
    "run": str,
    "split": str,
    "name": str,
    "kind": str,
    "shape": list,
    "depth": float,
    "phase": int,
}
"""What stands of a layer in the header, and of which type."""
COMMON = ("steps", "lr", "swings")
"""Tensors of one number a round; `changes` have one an element, too."""


def save(path: str | Path, layers: Sequence[Layer]) -> None:
    """Write a data set.

    Raises:
        ConfigError: safetensors is not installed, or the file cannot be written, or is no regular file.
    """
    _check_installed()
    from safetensors import torch as safetensors

    header = [{name: getattr(layer, name) for name in HEADER_TYPES} for layer in layers]
    # Copies, as the format refuses tensors that share memory.
    tensors = {
        f"{i}.{name}": getattr(layer, name).clone()
        for i, layer in enumerate(layers)
        for name in (*COMMON, "changes")
    }
    entry = {"format": "tacit-record", "version": str(VERSION), "layers": json.dumps(header)}
    put(Path(path), safetensors.save(tensors, entry))


def load(path: str | Path) -> list[Layer]:
    """Read a data set.

    Raises:
        ConfigError: it is missing, damaged, none of tacit's, or of another version.
    """
    _check_installed()
    from safetensors import SafetensorError, safe_open

    if not os.path.isfile(path):
        raise ConfigError(
            f"there is no record of trainings {path}: write the path of one, or make it by tacit predictor "
            "record"
        )
    try:
        with safe_open(path, framework="pt") as file:
            header = _header(path, file.metadata() or {})
            return [
                _layer(path, i, entry, {name: file.get_tensor(name) for name in names})
                for i, (entry, names) in enumerate(zip(header, _names(file.keys(), len(header)), strict=True))
            ]
    except SafetensorError as error:
        raise ConfigError(
            f"{path} cannot be read as a record of trainings: record it anew, or copy it again"
        ) from error


def _header(path: str | Path, metadata: dict[str, str]) -> list[dict[str, Any]]:
    if metadata.get("format") != "tacit-record":
        raise ConfigError(
            f"{path} holds no record of trainings: write the path of one that tacit predictor record wrote"
        )
    if metadata.get("version") != str(VERSION):
        raise ConfigError(
            f"{path} is of version {metadata.get('version')}, and this tacit reads version {VERSION}: record "
            "it anew"
        )
    try:
        header = json.loads(metadata["layers"])
    except (KeyError, ValueError) as error:
        raise _damaged(path, "its header names no layers") from error
    if not isinstance(header, list) or not header:
        raise _damaged(path, "its header names no layers")
    return header


def _names(keys: Iterable[str], count: int) -> list[list[str]]:
    """The tensors of each layer."""
    found: list[list[str]] = [[] for _ in range(count)]
    for key in keys:
        number = key.partition(".")[0]
        if number.isdecimal() and int(number) < count:
            found[int(number)].append(key)
    return found


def _layer(path: str | Path, i: int, entry: Any, tensors: dict[str, Tensor]) -> Layer:
    if not isinstance(entry, dict) or any(
        not isinstance(entry.get(k), kind) for k, kind in HEADER_TYPES.items()
    ):
        raise _damaged(path, f"layer {i} should have {', '.join(HEADER_TYPES)}")
    if entry["kind"] not in KINDS or entry["split"] not in SPLITS:
        raise _damaged(path, f"layer {i} is of kind {entry['kind']!r} and for {entry['split']!r}")
    named = {name.partition(".")[2]: tensor for name, tensor in tensors.items()}
    rounds = len(named.get("steps", ()))
    if {*named} != {*COMMON, "changes"} or any(
        len(each) != rounds or each.dim() != (2 if name == "changes" else 1) for name, each in named.items()
    ):
        raise _damaged(path, f"the tensors of layer {i} do not fit each other")
    if not all(bool(each.isfinite().all()) for each in named.values()):
        raise _damaged(path, f"layer {i} should hold finite numbers")
    fields: dict[str, Any] = {name: entry[name] for name in HEADER_TYPES} | named
    return Layer(**fields | {"shape": tuple(entry["shape"])})


def _damaged(path: str | Path, why: str) -> ConfigError:
    return ConfigError(f"{path} is damaged: {why}. Record it anew")


def _check_installed() -> None:
    if find_spec("safetensors") is None:
        raise ConfigError(f"records of trainings need safetensors: {installing('recipes')}")
