"""Accelerate with one call behind `prepare`; a run that stops and goes on from `save_state` ends the same.

It fits a random teacher network (needs Accelerate). Two lines are tacit's, marked 1 and 2; the checkpoints of
Accelerate then hold what each rank still owes its peers, too. On this machine:

    torchrun --nproc-per-node 2 examples/07_accelerate.py

or on two emulated machines:

    tacit run --cluster 2x1@100mbit --algorithm dgc:ratio=0.01 -- examples/07_accelerate.py
"""

import os
import tempfile

import torch
from accelerate import Accelerator
from accelerate.utils import broadcast_object_list
from torch import nn
from torch.nn.functional import mse_loss

import tacit
from tacit.integrations.accelerate import attach  # <- 1

STOP, END, ACCUMULATION = 40, 100, 2
os.environ.setdefault("TACIT_ALGORITHM", "dgc:ratio=0.01")  # under plain torchrun


def network(hidden: int, seed: int) -> nn.Sequential:
    """A function of 32 numbers to 8."""
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(32, hidden), nn.Tanh(), nn.Linear(hidden, 8))


def train(first: int, stop: int, load: str | None = None, save: str | None = None) -> list[float]:
    """The losses of the steps `first` to `stop` - 1; the step and the rank decide the data."""
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=ACCUMULATION)
    teacher, student, losses = network(64, 1), network(256, 0), []
    optimizer = torch.optim.SGD(student.parameters(), lr=0.05, momentum=0.9)
    model, optimizer = accelerator.prepare(student, optimizer)
    with attach(accelerator, model, optimizer, tacit.from_env()):  # <- 2
        if load is not None:
            accelerator.load_state(load)
        for batch in range(ACCUMULATION * first, ACCUMULATION * stop):
            seed = 1000 * batch + accelerator.process_index
            x = torch.randn(64, 32, generator=torch.Generator().manual_seed(seed))
            with accelerator.accumulate(model):
                with torch.no_grad():
                    y = teacher(x)
                loss = mse_loss(model(x), y)
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
            losses.append(accelerator.gather(loss.detach()[None]).mean().item())
            if save is not None and batch + 1 == ACCUMULATION * STOP:
                accelerator.save_state(save)
    return losses


def main() -> None:
    """Train to the end, and once more from the stop."""
    accelerator = Accelerator(cpu=True)
    with tempfile.TemporaryDirectory() as own:
        folder: str = broadcast_object_list([own])[0]
        losses = train(0, END, save=folder)
        again = train(STOP, END, load=folder)
        accelerator.wait_for_everyone()
    accelerator.print(f"loss {losses[0]:.3f}, and {losses[-1]:.3f} after {END} steps")
    same = again == losses[ACCUMULATION * STOP :]
    accelerator.print(f"from the checkpoint on, the losses are {'the same' if same else 'NOT the same'}")
    accelerator.end_training()


if __name__ == "__main__":
    main()
