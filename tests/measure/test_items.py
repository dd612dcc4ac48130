"""Attention to items against full attention matrices."""

import numpy as np
import torch

from posbench.measure.items import attention_to_items
from posbench.tasks import KVRetrieval
from tests.rounding import assert_same, embedded_attention_noise


def test_attention_to_items_is_the_mean_over_each_items_tokens(tiny):
    task = KVRetrieval(
        prompt="compact", records="words", pairs=6, limit=2, positions=(0, 5)
    )
    examples = task.examples("evaluation")[:2]
    encoded = [tiny.encode(e.prompt) for e in examples]
    found, heads = (
        attention_to_items(tiny, encoded, examples, heads=h) for h in (False, True)
    )
    noise = embedded_attention_noise()
    assert_same(heads.mean(2), found, noise, "attention")
    with torch.no_grad():
        tiny.model.set_attn_implementation("eager")
        full = tiny.model(
            torch.tensor([e.ids for e in encoded]), output_attentions=True
        ).attentions
        tiny.model.set_attn_implementation("sdpa")
    for row, (code, example) in enumerate(zip(encoded, examples, strict=True)):
        for item, (start, end) in enumerate(example.items):
            tokens = [
                i for i, (a, b) in enumerate(code.offsets) if a < end and b > start
            ]
            text = example.prompt[start:end]
            assert text.startswith('"') and text.count('"') == 4 and tokens
            for layer, weights in enumerate(full):
                expected = np.mean(
                    [weights[row, :, -1, t].mean().item() for t in tokens]
                )
                assert_same(found[row, layer, item], expected, noise, "attention")
