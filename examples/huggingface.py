"""A Hugging Face mixture of experts on moire: one more line, and its experts run on it."""

import moire
import torch
from transformers import AutoModelForCausalLM, MixtralConfig

moire.hf.register()  # the one line: makes experts_implementation="moire" available

# A trained model: AutoModelForCausalLM.from_pretrained(name, experts_implementation="moire")
config = MixtralConfig(vocab_size=256, hidden_size=64, num_attention_heads=8, intermediate_size=128)
config.num_hidden_layers = 2
model = AutoModelForCausalLM.from_config(config, experts_implementation="moire")

tokens = torch.randint(256, (2, 32))
loss = model(input_ids=tokens, labels=tokens).loss
loss.backward()
print(f"loss {loss.item():.3f}, experts run by {model.config._experts_implementation}")
