"""Step 0: a plain training loop, in one process."""

import torch

from parts import Model, loss_of, make_batch, say, say_memory

torch.manual_seed(0)
model = Model()
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)

for step in range(30):
    loss = loss_of(model, make_batch(step))
    loss.backward()
    optimizer.step()
    if step == 0:
        say_memory(model, optimizer)
    optimizer.zero_grad()
    if step % 10 == 9:
        say(f"step {step}: loss {loss.item():.2f}")
