"""Lightning's Trainer with one callback: the 1 % largest gradient entries travel, the rest is owed.

It learns to tell three spirals apart (needs Lightning). Two lines are tacit's, marked 1 and 2; all else is a
script of Lightning's own. On this machine:

    torchrun --nproc-per-node 2 examples/06_lightning.py

or on two emulated machines, or with an algorithm that averages replicas:

    tacit run --cluster 2x1@100mbit --algorithm topk:ratio=0.01 -- examples/06_lightning.py
    tacit run --cluster local:2 --algorithm diloco:sync_every=20,bits=4 -- examples/06_lightning.py
"""

import os
import tempfile

import lightning
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

import tacit
from tacit.integrations.lightning import Tacit  # <- 1

EPOCHS = 4
RANKS, NODE = int(os.environ["WORLD_SIZE"]), int(os.environ["LOCAL_WORLD_SIZE"])  # as torchrun says
os.environ.setdefault("TACIT_ALGORITHM", "topk:ratio=0.01")  # under plain torchrun


def spirals(count: int, seed: int) -> TensorDataset:
    """Points of the plane, and which of three spirals each lies on."""
    generator = torch.Generator().manual_seed(seed)
    arm = torch.randint(3, (count,), generator=generator)
    radius = torch.rand(count, generator=generator)
    angle = 5 * radius + arm * 2 * torch.pi / 3 + 0.1 * torch.randn(count, generator=generator)
    return TensorDataset(torch.stack((radius * angle.cos(), radius * angle.sin()), 1), arm)


class Classifier(lightning.LightningModule):
    """A network of three layers."""

    def __init__(self) -> None:
        super().__init__()
        self.network = nn.Sequential(
            nn.Linear(2, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 3)
        )
        self.right = 0.0

    def training_step(self, batch: tuple[Tensor, Tensor], _: int) -> Tensor:
        """The loss."""
        x, arm = batch
        return cross_entropy(self.network(x), arm)

    def validation_step(self, batch: tuple[Tensor, Tensor], _: int) -> None:
        """How many are right."""
        x, arm = batch
        self.right = (self.network(x).argmax(1) == arm).float().mean().item()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """As ever."""
        return torch.optim.Adam(self.parameters(), lr=5e-3)


def main() -> None:
    """Train, validating behind every epoch."""
    lightning.seed_everything(0, verbose=False)
    with tempfile.TemporaryDirectory() as folder:
        trainer = lightning.Trainer(
            accelerator="cpu",
            devices=NODE,
            num_nodes=RANKS // NODE,
            strategy="ddp",
            max_epochs=EPOCHS,
            gradient_clip_val=1.0,
            callbacks=[Tacit(tacit.from_env())],  # <- 2
            default_root_dir=folder,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        train, test = DataLoader(spirals(4096, 0), 32, shuffle=True), DataLoader(spirals(1000, 1), 1000)
        model = Classifier()
        trainer.fit(model, train, test)
    if trainer.is_global_zero:
        print(f"accuracy {model.right:.3f} after {trainer.global_step} steps")


if __name__ == "__main__":
    main()
