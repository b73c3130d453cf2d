"""An adversarial pair: two models, each with an optimizer of its own."""

import torch

generator, critic = torch.nn.Linear(4, 4), torch.nn.Linear(4, 1)
optimizers = [torch.optim.Adam(model.parameters()) for model in (generator, critic)]
for _ in range(2):
    made = generator(torch.ones(3, 4))
    (critic(made.detach()).mean() - critic(torch.ones(3, 4)).mean()).backward()
    optimizers[1].step()
    critic(made).mean().neg().backward()
    optimizers[0].step()
    for optimizer in optimizers:
        optimizer.zero_grad()
