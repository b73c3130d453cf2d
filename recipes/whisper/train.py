"""A small Whisper learns to name the tones in a sound: features of sound in, words out, the encoder's half frozen."""

import argparse
import time

import torch
from transformers import WhisperConfig, WhisperForConditionalGeneration

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--steps", type=int, default=7)
parser.add_argument("--out", default="whisper.pt", help="where the trained weights go")
parser.add_argument("--tiny", action="store_true", help="a few seconds, for a first look")
args = parser.parse_args()
num_layers, width, batch, frames, num_words = (4, 96, 16, 400, 32) if args.tiny else (4, 192, 8, 800, 64)
num_steps = 3 if args.tiny else args.steps
torch.manual_seed(0)

model = WhisperForConditionalGeneration(
    WhisperConfig(
        vocab_size=500, num_mel_bins=80, d_model=width, encoder_layers=num_layers, decoder_layers=num_layers,
        encoder_attention_heads=4, decoder_attention_heads=4, encoder_ffn_dim=4 * width, decoder_ffn_dim=4 * width,
        max_source_positions=frames // 2, max_target_positions=num_words, pad_token_id=0, bos_token_id=1,
        eos_token_id=2, decoder_start_token_id=1, begin_suppress_tokens=None, suppress_tokens=None,
    )
)  # fmt: skip
model.model.encoder.conv1.requires_grad_(False)
for layer in model.model.encoder.layers[: num_layers // 2]:
    layer.requires_grad_(False)
optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)
model.train()
for step in range(num_steps):
    begin = time.perf_counter()
    words = torch.randint(3, 83, (batch, num_words))
    tones = torch.nn.functional.one_hot(words - 3, 80).float().transpose(1, 2)
    sound = tones.repeat_interleave(frames // num_words + 1, 2)[:, :, :frames] + 0.1 * torch.randn(batch, 80, frames)
    loss = model(input_features=sound, labels=words).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    print(f"step {step}: loss {loss.item():.6f}, {time.perf_counter() - begin:.3f} s", flush=True)
torch.save(model.state_dict(), args.out)
