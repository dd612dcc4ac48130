"""Tiny random models of every family, big enough in weight that scaling a channel moves the logits."""

import torch
from transformers import (
    GemmaConfig,
    GemmaForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
)

VOCABULARY, WIDTH, LAYERS = 97, 48, 4
SHAPE = dict(
    vocab_size=VOCABULARY, hidden_size=WIDTH, intermediate_size=64, num_hidden_layers=LAYERS, num_attention_heads=4,
    max_position_embeddings=4096, bos_token_id=None, eos_token_id=None, pad_token_id=0,
)  # fmt: skip

BUILDERS = {
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**SHAPE, num_key_value_heads=4)),
    "llama-gqa": lambda: LlamaForCausalLM(LlamaConfig(**SHAPE, num_key_value_heads=2)),
    "mistral": lambda: MistralForCausalLM(MistralConfig(**SHAPE, num_key_value_heads=2, sliding_window=None)),
    "mistral-window": lambda: MistralForCausalLM(MistralConfig(**SHAPE, num_key_value_heads=2, sliding_window=24)),
    "gemma": lambda: GemmaForCausalLM(GemmaConfig(**SHAPE, num_key_value_heads=1, head_dim=20)),
    "qwen2": lambda: Qwen2ForCausalLM(Qwen2Config(**SHAPE, num_key_value_heads=2)),
}


def build(name: str, *, dtype: torch.dtype = torch.float32, seed: int = 0) -> PreTrainedModel:
    """A random model with visible attention effects: weights of std 0.2, biases non-zero, uneven norm gains."""
    torch.manual_seed(seed)
    model = BUILDERS[name]()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 2:
                parameter.normal_(std=0.2)
            elif parameter.ndim == 1:
                parameter.add_(torch.randn_like(parameter) * 0.4)
    return model.to(dtype).eval()
