"""Load a predictor of any network from a file."""

from __future__ import annotations

from tacit.errors import ConfigError
from tacit.prediction.networks import weight_files
from tacit.prediction.networks.mp2 import MP2
from tacit.prediction.networks.wnn import WNN


def trained(path: str) -> MP2 | WNN:
    """The predictor whose weights are in `path`; the file is read and checked now.

    Raises:
        ConfigError: the file is missing, damaged, of another version, or for another network or other kinds.
    """
    network = weight_files.network_of(path)
    if network not in ("mp2", "wnn"):
        raise ConfigError(f"{path} is for the network {network!r}, and known are mp2 and wnn")
    predictor = MP2(path) if network == "mp2" else WNN(path)
    predictor.kinds()
    return predictor
