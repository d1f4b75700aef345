"""Files of a predictor's weights, and what is refused of them."""

from __future__ import annotations

import io
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import Tensor

from tacit import described
from tacit.errors import ConfigError
from tacit.files import put

VERSION = 2
"""Of the format; another one is refused."""

Weights: TypeAlias = dict[str, dict[str, Tensor]]
"""kind -> the weights of that kind's network, by name."""


def write(path: str | Path, network: str, weights: Weights, note: str = "") -> None:
    """Write the weights of `network`; `note` says what they were trained on.

    Raises:
        ConfigError: the file cannot be written, or is no regular file.
    """
    whole = io.BytesIO()
    told = {"format": "tacit-predictor", "version": VERSION, "network": network}
    torch.save({**told, "note": note, "kinds": weights}, whole)
    put(Path(path), whole.getvalue())


def read(
    path: str | Path, network: str, shapes: Mapping[str, Sequence[int]], kinds: Sequence[str]
) -> Weights:
    """The weights in `path`, which must be for `network`.

    Args:
        shapes: name -> shape of each of a kind's weights; -1 for a width that is in the file.
        kinds: those that may be there; some may be missing.

    Raises:
        ConfigError: the file is missing, damaged, or of another version, network or kinds; the message says
            which.
    """
    content = _header(path)
    if content.get("network") != network:
        raise ConfigError(f"{path} is for the network {content.get('network')!r}, not {network!r}")
    weights = content.get("kinds")
    if not isinstance(weights, dict) or not weights:
        raise ConfigError(f"{path} holds weights for no kind of layer: train it anew")
    for kind, named in weights.items():
        if kind not in kinds:
            raise ConfigError(f"{path} is for layers of kind {kind!r}, and known are {', '.join(kinds)}")
        _check(path, kind, named, shapes)
    result: Weights = weights
    return result


def network_of(path: str | Path) -> str:
    """For which network the weights in `path` are.

    Raises:
        ConfigError: the file is missing, damaged, or of another version.
    """
    return str(_header(path).get("network"))


def note_of(path: str | Path) -> str:
    """What the weights in `path` were trained on, in the words of who wrote them.

    Raises:
        ConfigError: as `network_of`.
    """
    return str(_header(path).get("note", ""))


def _header(path: str | Path) -> dict[str, Any]:
    content = _opened(path)
    if not isinstance(content, dict) or content.get("format") != "tacit-predictor":
        raise ConfigError(f"{path} holds no predictor of tacit: write the path of one that tacit has trained")
    if content.get("version") != VERSION:
        raise ConfigError(
            f"{path} is of version {content.get('version')}, and this tacit reads version {VERSION}: train "
            "it anew by tacit predictor train, or use the tacit that wrote it"
        )
    return content


def _opened(path: str | Path) -> Any:
    if not os.path.isfile(path):  # also False if a name is too long
        raise ConfigError(f"there is no predictor file {path}: write the path of one, or leave it out")
    try:
        return described.load(Path(path))
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"{path} is damaged, or no predictor file ({error}): train it anew, or copy it again"
        ) from error


def _check(path: str | Path, kind: str, named: Any, shapes: Mapping[str, Sequence[int]]) -> None:
    if not isinstance(named, dict) or set(named) != set(shapes):
        raise ConfigError(f"{path} is damaged: of kind {kind!r} it should hold {', '.join(shapes)}")
    try:
        for name, shape in shapes.items():
            described.tensor(named[name], f"{kind}.{name}", shape, (torch.float32,))
    except ValueError as error:
        raise ConfigError(f"{path} is damaged: {error}") from error
