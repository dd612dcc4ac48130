"""Tiny random models of every family, big enough in weight that scaling a channel moves the logits."""

from collections.abc import Callable

import torch
import transformers as hf
from torch import nn
from transformers import PreTrainedModel

VOCABULARY = 260
WIDTH = 48
LAYERS = 4
WINDOW = 24
SIZES = dict(
    vocab_size=VOCABULARY,
    hidden_size=WIDTH,
    num_hidden_layers=LAYERS,
    num_attention_heads=4,
)
SHAPE = SIZES | dict(
    intermediate_size=64,
    max_position_embeddings=4096,
    bos_token_id=None,
    eos_token_id=None,
    pad_token_id=0,
)
GROUPED = SHAPE | dict(num_key_value_heads=2)
LOCAL = dict(
    sliding_window=WINDOW,
    layer_types=["sliding_attention", "full_attention"] * (LAYERS // 2),
)
EXPERTS = dict(num_local_experts=4, num_experts_per_tok=2)
MPT = dict(
    d_model=WIDTH,
    n_heads=4,
    n_layers=LAYERS,
    expansion_ratio=2,
    max_seq_len=512,
    vocab_size=VOCABULARY,
)
FALCON = SIZES | dict(max_position_embeddings=512, bos_token_id=None, eos_token_id=None)
LONGROPE = dict(
    rope_type="longrope",
    rope_theta=10000.0,
    short_factor=[1.0, 1.3, 1.7, 2.0, 2.5, 3.0],
    long_factor=[2.0] * 6,
)
LLAMA3 = dict(
    rope_type="llama3", rope_theta=500000.0, factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0,
    original_max_position_embeddings=64,
)  # fmt: skip
YARN = dict(
    rope_type="yarn",
    rope_theta=10000.0,
    factor=4.0,
    original_max_position_embeddings=1024,
)


def _gemma3_with_vision() -> PreTrainedModel:
    vision = dict(
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=1,
        image_size=28,
        patch_size=14,
    )
    text = hf.Gemma3TextConfig(**GROUPED, head_dim=20, **LOCAL)
    config = hf.Gemma3Config(
        text_config=text,
        vision_config=vision,
        image_token_index=VOCABULARY - 1,
        mm_tokens_per_image=4,
    )
    return hf.Gemma3ForConditionalGeneration(config)


BUILDERS: dict[str, Callable[[], PreTrainedModel]] = {
    "llama": lambda: hf.LlamaForCausalLM(
        hf.LlamaConfig(**SHAPE, num_key_value_heads=4)
    ),
    "llama-gqa": lambda: hf.LlamaForCausalLM(hf.LlamaConfig(**GROUPED)),
    "llama-tied-llama3": lambda: hf.LlamaForCausalLM(
        hf.LlamaConfig(
            **GROUPED,
            tie_word_embeddings=True,
            attention_bias=True,
            rope_parameters=LLAMA3,
        )
    ),
    "mistral": lambda: hf.MistralForCausalLM(
        hf.MistralConfig(**GROUPED, sliding_window=None)
    ),
    "mistral-window": lambda: hf.MistralForCausalLM(
        hf.MistralConfig(**GROUPED, sliding_window=WINDOW)
    ),
    "mixtral": lambda: hf.MixtralForCausalLM(hf.MixtralConfig(**GROUPED, **EXPERTS)),
    "qwen2": lambda: hf.Qwen2ForCausalLM(hf.Qwen2Config(**GROUPED)),
    "qwen2-yarn": lambda: hf.Qwen2ForCausalLM(
        hf.Qwen2Config(**GROUPED, rope_parameters=YARN)
    ),
    "qwen3": lambda: hf.Qwen3ForCausalLM(hf.Qwen3Config(**GROUPED, head_dim=20)),
    "qwen3-moe": lambda: hf.Qwen3MoeForCausalLM(
        hf.Qwen3MoeConfig(
            **GROUPED,
            head_dim=20,
            num_experts=4,
            num_experts_per_tok=2,
            moe_intermediate_size=32,
        )
    ),
    "gemma": lambda: hf.GemmaForCausalLM(
        hf.GemmaConfig(**SHAPE, num_key_value_heads=1, head_dim=20)
    ),
    "gemma2": lambda: hf.Gemma2ForCausalLM(
        hf.Gemma2Config(
            **GROUPED,
            head_dim=20,
            **LOCAL,
            attn_logit_softcapping=2.0,
            query_pre_attn_scalar=12,
            attn_implementation="eager",
        )
    ),
    "gemma3": lambda: hf.Gemma3ForCausalLM(
        hf.Gemma3TextConfig(**GROUPED, head_dim=20, **LOCAL)
    ),
    "gemma3-vision": _gemma3_with_vision,
    "phi3": lambda: hf.Phi3ForCausalLM(hf.Phi3Config(**GROUPED, sliding_window=None)),
    "phi3-partial": lambda: hf.Phi3ForCausalLM(
        hf.Phi3Config(**GROUPED, partial_rotary_factor=0.5, sliding_window=WINDOW)
    ),
    "phi3-longrope": lambda: hf.Phi3ForCausalLM(
        hf.Phi3Config(
            **GROUPED, rope_parameters=LONGROPE, original_max_position_embeddings=16
        )
    ),
    "gpt_neox": lambda: hf.GPTNeoXForCausalLM(
        hf.GPTNeoXConfig(**SHAPE, rotary_pct=0.5)
    ),
    "mpt": lambda: hf.MptForCausalLM(hf.MptConfig(**MPT)),
    "mpt-clip": lambda: hf.MptForCausalLM(
        hf.MptConfig(**MPT, attn_config=dict(clip_qkv=1.0))
    ),
    "falcon": lambda: hf.FalconForCausalLM(
        hf.FalconConfig(**FALCON, new_decoder_architecture=True, num_kv_heads=2)
    ),
    "falcon-7b": lambda: hf.FalconForCausalLM(
        hf.FalconConfig(**FALCON, multi_query=True, parallel_attn=True)
    ),
    "falcon-alibi": lambda: hf.FalconForCausalLM(
        hf.FalconConfig(
            **FALCON, alibi=True, multi_query=False, parallel_attn=False, bias=True
        )
    ),
    "olmo2": lambda: hf.Olmo2ForCausalLM(hf.Olmo2Config(**GROUPED)),
    "smollm3": lambda: hf.SmolLM3ForCausalLM(
        hf.SmolLM3Config(**GROUPED, no_rope_layers=[1, 0, 1, 0])
    ),
    "smollm3-nope": lambda: hf.SmolLM3ForCausalLM(
        hf.SmolLM3Config(**GROUPED, no_rope_layers=[0] * LAYERS)
    ),
    "cohere2": lambda: hf.Cohere2ForCausalLM(
        hf.Cohere2Config(**GROUPED, **LOCAL, logit_scale=1.0)
    ),
}
CLOSED_FORM = ("llama", "llama-gqa", "mistral", "mistral-window", "gemma", "qwen2")
"""Models whose whole forward the tests write out by hand."""


def build(
    name: str, *, dtype: torch.dtype = torch.float32, seed: int = 0
) -> PreTrainedModel:
    """A random model with visible attention effects: weights of std 0.2, biases non-zero, uneven norm
    gains."""
    torch.manual_seed(seed)
    model = BUILDERS[name]()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 2:
                parameter.normal_(std=0.2)
            elif parameter.ndim == 1:
                parameter.add_(torch.randn_like(parameter) * 0.4)
    if dtype == torch.float64 and hasattr(model.config, "_experts_implementation"):
        # The fast kernel of the experts knows no float64.
        model.set_experts_implementation("eager")
    return model.to(dtype).eval()


def attentions(model: PreTrainedModel) -> list[nn.Module]:
    """Attention modules, found by what they are called and carry, not through the family table."""
    names = {"self_attn", "attention", "self_attention", "attn"}
    return [
        m
        for name, m in model.named_modules()
        if name.rsplit(".", 1)[-1] in names and hasattr(m, "layer_idx")
    ]
