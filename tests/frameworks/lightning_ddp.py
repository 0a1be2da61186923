"""Lightning's Trainer with strategy="ddp"."""

import json
import os

import lightning as L
import torch
from torch.utils.data import DataLoader, TensorDataset


class Model(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 1))

    def training_step(self, batch, index):
        loss = self.layers(batch[0]).square().mean()
        self.log("loss", loss, sync_dist=True)
        return loss

    def validation_step(self, batch, index):
        self.log("val", self.layers(batch[0]).mean(), sync_dist=True)

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=0.01)


L.seed_everything(0)
data = TensorDataset(torch.randn(96, 8, generator=torch.Generator().manual_seed(1)))
model = Model()
trainer = L.Trainer(
    accelerator="cpu",
    devices=int(os.environ["LOCAL_WORLD_SIZE"]),
    strategy="ddp",
    max_epochs=3,
    logger=False,
    enable_checkpointing=False,
    enable_progress_bar=False,
)
trainer.fit(model, DataLoader(data, 8), DataLoader(data, 16))
if trainer.global_rank == 0:
    told = {name: float(value) for name, value in trainer.callback_metrics.items()}
    print("RESULT", json.dumps([trainer.world_size, told, [p.flatten().tolist() for p in model.parameters()]]))
