"""A loop as diffusers' unconditional example: a UNet learns to find the noise, with Accelerate and an average."""

import hashlib

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from diffusers import DDPMScheduler, UNet2DModel
from diffusers.optimization import get_scheduler
from diffusers.training_utils import EMAModel
from torch.utils.data import DataLoader

torch.manual_seed(0)
BATCH, STEPS = 24, 3
accelerator = Accelerator(cpu=True, gradient_accumulation_steps=1)
model = UNet2DModel(
    sample_size=32,
    in_channels=3,
    out_channels=3,
    layers_per_block=2,
    block_out_channels=(32, 64, 64),
    down_block_types=("DownBlock2D", "AttnDownBlock2D", "DownBlock2D"),
    up_block_types=("UpBlock2D", "AttnUpBlock2D", "UpBlock2D"),
)
average = EMAModel(model.parameters(), decay=0.9, model_cls=UNet2DModel, model_config=model.config)
noises = DDPMScheduler(num_train_timesteps=100)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
schedule = get_scheduler("cosine", optimizer=optimizer, num_warmup_steps=1, num_training_steps=STEPS)
loader = DataLoader(torch.randn(BATCH * STEPS, 3, 32, 32), batch_size=BATCH)
model, optimizer, loader, schedule = accelerator.prepare(model, optimizer, loader, schedule)
for images in loader:
    noise = torch.randn_like(images)
    times = torch.randint(0, 100, (len(images),))
    noisy = noises.add_noise(images, noise, times)
    with accelerator.accumulate(model):
        loss = F.mse_loss(model(noisy, times).sample.float(), noise.float())
        accelerator.backward(loss)
        if accelerator.sync_gradients:
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    if accelerator.sync_gradients:
        average.step(model.parameters())
average.copy_to(model.parameters())
digest = hashlib.sha256()
for p in model.parameters():
    digest.update(p.detach().numpy())
print("weights", digest.hexdigest())
