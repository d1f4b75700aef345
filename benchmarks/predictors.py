"""Make the predictors that come with tacit anew, by the commands that made them, and judge them.

    OMP_NUM_THREADS=1 python benchmarks/predictors.py [FOLDER]

The files go to FOLDER (by default build/predictors). mp2.pt and wnn.pt there are those that ship, in
src/tacit/predictors, to the bit, notes included: these hold the commands. Beside them a network twice as wide
is judged. Nothing is learnt from `digits`, nor from the network that is held out. About 15 minutes, one core.
"""

from __future__ import annotations

import argparse
import os
import shlex
from pathlib import Path

import torch

from tacit.prediction.networks import weight_files
from tacit_lab.cli.application import app

RECORD = "record"
TRAIN = {
    "mp2.pt": "train record.safetensors --out mp2.pt",
    "wnn.pt": "train record.safetensors --network wnn --out wnn.pt",
    "wide.pt": "train record.safetensors --width 8 --out wide.pt",
}
EVALUATE = (
    "evaluate --predictor mp2.pt --records record.safetensors --out digits.html",
    "evaluate --predictor wide.pt --candidates mp2 --records record.safetensors",
    "evaluate --predictor mp2.pt --recipe made-up --model alexnet --epochs 1 --out alexnet.html",
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("folder", nargs="?", type=Path, default=Path("build/predictors"))
    folder = parser.parse_args().folder
    folder.mkdir(parents=True, exist_ok=True)
    os.chdir(folder)
    _run(RECORD)
    for file, command in TRAIN.items():
        _run(command)
        _note(file, f"tacit predictor {RECORD}")
    for command in EVALUATE:
        _run(command)


def _run(command: str) -> None:
    print(f"\n$ tacit predictor {command}", flush=True)
    app(["predictor", *shlex.split(command)], standalone_mode=False)


def _note(file: str, first: str) -> None:
    """Put how the record was made before the file's own note."""
    content = torch.load(file, weights_only=True)
    weight_files.write(file, content["network"], content["kinds"], f"{first}\n{content['note']}")


if __name__ == "__main__":
    main()
