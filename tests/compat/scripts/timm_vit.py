"""A loop as timm's train.py: a ViT under bfloat16 autocast, smoothed labels, clipped gradients, moving average."""

import hashlib

import timm
import timm.optim
import timm.scheduler
import torch
from timm.loss import LabelSmoothingCrossEntropy
from timm.utils import AverageMeter, ModelEmaV3, dispatch_clip_grad

torch.manual_seed(0)
BATCH, STEPS, CLASSES = 16, 3, 10
model = timm.create_model(
    "vit_tiny_patch16_224", pretrained=False, num_classes=CLASSES, img_size=128, patch_size=8, drop_path_rate=0.1
)
optimizer = timm.optim.create_optimizer_v2(model, opt="adamw", lr=1e-3, weight_decay=0.05)
average = ModelEmaV3(model, decay=0.9)
schedule = timm.scheduler.CosineLRScheduler(optimizer, t_initial=STEPS)
loss_function = LabelSmoothingCrossEntropy(0.1)
losses = AverageMeter()
model.train()
for step in range(STEPS):
    images, labels = torch.randn(BATCH, 3, 128, 128), torch.randint(CLASSES, (BATCH,))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = loss_function(model(images), labels)
    loss.backward()
    dispatch_clip_grad(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    average.update(model, step=step)
    losses.update(loss.item(), BATCH)
    schedule.step(step + 1)
digest = hashlib.sha256()
for p in (*model.parameters(), *average.parameters()):
    digest.update(p.detach().numpy())
print("weights", digest.hexdigest())
