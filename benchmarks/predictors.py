"""Train MP²'s predictor on one task, judge it on another, and write the weights that tacit ships.

    OMP_NUM_THREADS=1 python benchmarks/predictors.py [--width 4] [--out src/tacit/predictors/mp2.pt]

It learns from small networks on made-up images: noise around ten prototypes. Judged is it by the network and
the data of the recipe `digits`, of which it has seen nothing. Takes about two minutes on one thread.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from tacit.recipes.forecasting import evaluate, table, train
from tacit.recipes.record import Layer, record, save
from torch import Tensor, nn

from tacit.predictors import MP2, Exponential, Linear, Predictor, Stale, files
from tacit.recipes.digits import Digits

BATCH = 64
LOSS = nn.CrossEntropyLoss()


def images(seed: int, count: int = 2048) -> tuple[Tensor, Tensor]:
    """Ten smooth prototypes of 8 x 8 pixels, with noise as large as they are."""
    generator = torch.Generator().manual_seed(seed)
    coarse = torch.randn(10, 1, 3, 3, generator=generator)
    prototypes = nn.functional.interpolate(coarse, size=(8, 8), mode="bilinear")
    targets = torch.randint(10, (count,), generator=generator)
    noise = torch.randn(count, 1, 8, 8, generator=generator)
    return prototypes[targets] + noise, targets


def batches(seed: int, steps: int) -> Iterator[tuple[Tensor, Tensor]]:
    inputs, targets = images(seed)
    generator = torch.Generator().manual_seed(seed + 1)
    for _ in range(steps):
        pick = torch.randint(len(targets), (BATCH,), generator=generator)
        yield inputs[pick], targets[pick]


def mlp() -> nn.Module:
    return nn.Sequential(
        nn.Flatten(), nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 96), nn.ReLU(), nn.Linear(96, 10)
    )


def convolutional() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        nn.Conv2d(16, 32, 5, padding=2),
        nn.ReLU(),
        nn.MaxPool2d(4),
        nn.Flatten(),
        nn.Linear(128, 10),
    )


def learned_from(steps: int) -> list[Layer]:
    """Two networks, three learning rates each."""
    layers: list[Layer] = []
    for seed, (build, lr) in enumerate((b, lr) for b in (mlp, convolutional) for lr in (0.01, 0.03, 0.1)):
        torch.manual_seed(seed)
        model = build()
        sgd = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)
        run = f"{build.__name__}, lr {lr}"
        layers += record(run, model, sgd, batches(seed * 10, steps), loss=LOSS, elements=128, seed=seed)
    return layers


def judged_by(epochs: int) -> list[Layer]:
    """`digits`, as four ranks train it."""
    recipe = Digits()
    model = recipe.model(7)
    stream = (
        (torch.cat([x for x, _ in ranks]), torch.cat([y for _, y in ranks]))
        for epoch in range(epochs)
        for ranks in zip(*(recipe.train_batches(epoch, rank, 4, 7) for rank in range(4)), strict=True)
    )
    return record("digits", model, recipe.optimizer(model), stream, loss=LOSS, elements=128)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--width", type=int, default=4)
    parser.add_argument("--loss", default="l1")
    parser.add_argument("--rounds", type=int, default=120, help="recorded steps of each training")
    parser.add_argument("--steps", type=int, default=500, help="of training the predictor")
    parser.add_argument("--records", type=Path, help="where to keep what was recorded")
    parser.add_argument("--out", default="mp2.pt")
    args = parser.parse_args()
    start = time.perf_counter()
    layers = learned_from(args.rounds)
    if args.records:
        save(args.records, layers)
    print(f"recorded {len(layers)} layers, {time.perf_counter() - start:.0f} s", flush=True)
    weights = train(layers, width=args.width, loss=args.loss, steps=args.steps)
    note = f"benchmarks/predictors.py --width {args.width} --loss {args.loss} --rounds {args.rounds} "
    files.write(args.out, "mp2", weights, note + f"--steps {args.steps}")
    print(f"trained, {time.perf_counter() - start:.0f} s", flush=True)
    predictors: dict[str, Predictor] = {
        "no change": Stale(),
        "linear": Linear(),
        "exponential": Exponential(),
        "mp2": MP2(args.out),
    }
    print("\nOn the trainings learned from:\n" + table(evaluate(predictors, layers)))
    print("\nOn digits, not seen before:\n" + table(evaluate(predictors, judged_by(3))))
    print(f"\n{time.perf_counter() - start:.0f} s")


if __name__ == "__main__":
    main()
