"""Make the predictors that come with tacit anew, by the commands that made them, and judge them.

    OMP_NUM_THREADS=1 python benchmarks/predictors.py [FOLDER]

The files go to FOLDER (by default build/predictors). What ships are src/tacit/predictors/mp2.pt and wnn.pt,
whose notes hold the commands; beside them a network twice as wide is judged. Nothing is learnt from `digits`,
nor from the network that is held out.
"""

from __future__ import annotations

import argparse
import os
import shlex
from pathlib import Path

from tacit.cli import app

COMMANDS = (
    "record",
    "train record.safetensors --gains 0.3 --out mp2.pt",
    "train record.safetensors --network wnn --out wnn.pt",
    "train record.safetensors --width 8 --gains 0.3 --out wide.pt",
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
    for command in COMMANDS:
        print(f"\n$ tacit predictor {command}", flush=True)
        app(["predictor", *shlex.split(command)], standalone_mode=False)


if __name__ == "__main__":
    main()
