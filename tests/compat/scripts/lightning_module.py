"""Lightning's Trainer fits a module with a schedule, accumulated and clipped gradients, and validates each epoch."""

import hashlib

import lightning
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

WORDS, WIDTH, LENGTH = 1000, 192, 128


class Tagger(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(WORDS, WIDTH)
        layer = nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, dropout=0.1, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 6, enable_nested_tensor=False)
        self.head = nn.Linear(WIDTH, 20)

    def forward(self, words):
        return self.head(self.encoder(self.embedding(words)))

    def training_step(self, batch, _):
        words, tags = batch
        loss = F.cross_entropy(self(words).flatten(0, 1), tags.flatten())
        self.log("loss", loss)
        return loss

    def validation_step(self, batch, _):
        words, tags = batch
        self.log("accuracy", (self(words).argmax(-1) == tags).float().mean())

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-3)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1)]


lightning.seed_everything(0)
words = torch.randint(WORDS, (96, LENGTH))
data = TensorDataset(words, words % 20)
module = Tagger()
trainer = lightning.Trainer(
    max_epochs=1,
    accelerator="cpu",
    accumulate_grad_batches=2,
    gradient_clip_val=1.0,
    enable_progress_bar=False,
    enable_checkpointing=False,
    logger=False,
)
trainer.fit(module, DataLoader(data, batch_size=16, shuffle=True), DataLoader(data, batch_size=16))
digest = hashlib.sha256()
for p in module.parameters():
    digest.update(p.detach().numpy())
print("weights", digest.hexdigest())
