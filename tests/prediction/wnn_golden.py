"""Read the WNN authors' published weights (github.com/jjh6297/WNN, CNN/NWNN_*_13.h5), which have no licence.

    python tests/prediction/wnn_golden.py FOLDER OUT.pt      (needs h5py)

Then `TACIT_WNN=OUT.pt pytest tests/prediction/test_wnn.py` holds our network to their numbers.
"""

import re
import sys
from pathlib import Path
from typing import Any

import torch

from tacit.prediction.networks import weight_files

PARTS = ("wide", "z", "a", "b", "c", "narrow")
FILES = {"convolution": "NWNN_Conv_13.h5", "linear": "NWNN_FC_13.h5", "vector": "NWNN_Bias_13.h5"}


def layers(path: Path) -> list[dict[str, Any]]:
    """Keras's Dense layers in the order in which they were made."""
    import h5py  # type: ignore[import-not-found]

    found: dict[int, dict[str, Any]] = {}

    def visit(name: str, node: Any) -> None:
        match = re.search(r"dense(?:_(\d+))?/(kernel|bias):0$", name)
        if match:
            found.setdefault(int(match[1] or 0), {})[match[2]] = torch.from_numpy(node[()])

    with h5py.File(path) as file:
        file.get("model_weights", file).visititems(visit)
    return [found[i] for i in sorted(found)]


def named(path: Path) -> dict[str, torch.Tensor]:
    """Our names for them; torch has kernels transposed."""
    names = [f"{stream}.{part}" for stream in ("values", "steps") for part in PARTS] + ["last"]
    weights: dict[str, torch.Tensor] = {}
    for name, layer in zip(names, layers(path), strict=True):
        weights |= {f"{name}.weight": layer["kernel"].t().contiguous(), f"{name}.bias": layer["bias"]}
    return weights


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    weights = {kind: named(folder / name) for kind, name in FILES.items()}
    weight_files.write(sys.argv[2], "wnn", weights, "the authors'")
