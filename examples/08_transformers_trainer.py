"""DiLoCo with the Trainer of transformers: a small GPT-2 whose replicas meet every 10 steps, in 4 bits.

It learns to go on with the digits of fractions (needs transformers; nothing is downloaded). Two lines are
tacit's, marked 1 and 2. On this machine:

    torchrun --nproc-per-node 2 examples/08_transformers_trainer.py

or on two emulated machines:

    tacit run --cluster 2x1@100mbit --algorithm diloco -- examples/08_transformers_trainer.py
"""

import os
import tempfile

import torch
from torch import Tensor
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments, set_seed

import tacit
from tacit.integrations.transformers import Tacit  # <- 1

os.environ.setdefault("TACIT_ALGORITHM", "diloco:sync_every=10,bits=4")  # under plain torchrun


def fractions(count: int, seed: int) -> list[dict[str, Tensor]]:
    """The first 16 digits of a / b behind the point, for b below 30; each is both text and answer."""
    generator = torch.Generator().manual_seed(seed)
    below = torch.randint(2, 30, (count,), generator=generator)
    rest = torch.randint(1, 1 << 20, (count,), generator=generator) % below
    digits = []
    for _ in range(16):
        rest = 10 * rest
        digits.append(rest // below)
        rest = rest % below
    return [{"input_ids": each, "labels": each} for each in torch.stack(digits, 1)]


def main() -> None:
    """Train, and evaluate what the replicas have agreed on."""
    set_seed(0)  # replicas begin alike
    sizes = {"vocab_size": 10, "n_positions": 16, "n_embd": 48, "n_layer": 2, "n_head": 4}
    model = GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=0, eos_token_id=0, loss_type="ForCausalLM"))
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            output_dir=folder,
            use_cpu=True,
            max_steps=80,
            per_device_train_batch_size=32,
            learning_rate=5e-3,
            lr_scheduler_type="constant",
            ddp_find_unused_parameters=False,
            eval_strategy="steps",
            eval_steps=40,
            save_strategy="no",
            logging_strategy="no",
            disable_tqdm=True,
            report_to=[],
        )
        trainer = Trainer(model, arguments, train_dataset=fractions(8192, 0), eval_dataset=fractions(256, 1))
        trainer.add_callback(Tacit(tacit.from_env(), trainer))  # <- 2
        trainer.train()
        first, *_, last = [each["eval_loss"] for each in trainer.state.log_history if "eval_loss" in each]
    if trainer.is_world_process_zero():
        print(f"loss {first:.3f} after 40 steps, {last:.3f} after 80")


if __name__ == "__main__":
    main()
