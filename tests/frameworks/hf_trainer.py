"""Transformers' Trainer on a small GPT-2 that is made from its configuration."""

import json
import tempfile

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments, set_seed


class Tokens(torch.utils.data.Dataset):
    def __len__(self):
        return 32

    def __getitem__(self, i):
        row = torch.arange(i, i + 16) % 64
        return {"input_ids": row, "labels": row}


set_seed(0)
model = GPT2LMHeadModel(GPT2Config(vocab_size=64, n_positions=32, n_embd=32, n_layer=2, n_head=2))
with tempfile.TemporaryDirectory() as folder:
    options = TrainingArguments(
        folder, max_steps=6, per_device_train_batch_size=4, use_cpu=True, report_to=[], save_strategy="no", seed=0,
        logging_steps=2, disable_tqdm=True, dataloader_num_workers=0,
    )  # fmt: skip
    trainer = Trainer(model=model, args=options, train_dataset=Tokens())
    trainer.train()
if trainer.is_world_process_zero():
    losses = [row["loss"] for row in trainer.state.log_history if "loss" in row]
    norm = float(sum(p.detach().double().square().sum() for p in model.parameters()))
    print("RESULT", json.dumps([options.world_size, losses, norm]))
