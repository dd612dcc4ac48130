"""What scale_channel and its search cost: ratios measured side by side in one run, on random weights.

``make bench``, or ``python -m posbench.studies.latency --help``.
"""

from __future__ import annotations

import argparse
import copy
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
import transformers
from rich.console import Console
from rich.table import Table
from torch import Tensor
from transformers import (
    DynamicCache,
    GemmaConfig,
    GemmaForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    MptConfig,
    MptForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
)

import posbench
from posbench import arch
from posbench.hooks import replaced
from posbench.lm import LM
from posbench.methods import Method, ScaleChannel, Unmodified
from posbench.record import write_text
from posbench.runner import hardware
from posbench.search import Candidate
from posbench.stages.search import candidate_losses
from posbench.tables import markdown

SHAPES: dict[str, Callable[[], PreTrainedModel]] = {
    "small": lambda: LlamaForCausalLM(
        LlamaConfig(
            hidden_size=512, intermediate_size=1408, num_hidden_layers=8, num_attention_heads=8, num_key_value_heads=8,
            vocab_size=4096, max_position_embeddings=32768,
        )
    ),
    "llama2_7b": lambda: LlamaForCausalLM(LlamaConfig(max_position_embeddings=16384)),
    "mistral7b": lambda: MistralForCausalLM(MistralConfig(sliding_window=None, max_position_embeddings=32768)),
    "gemma_7b": lambda: GemmaForCausalLM(GemmaConfig(max_position_embeddings=16384)),
    "qwen2_5_7b": lambda: Qwen2ForCausalLM(
        Qwen2Config(
            hidden_size=3584, intermediate_size=18944, num_hidden_layers=28, num_attention_heads=28, num_key_value_heads=4,
            vocab_size=152064, max_position_embeddings=32768,
        )
    ),
    "mpt_7b": lambda: MptForCausalLM(MptConfig(d_model=4096, n_heads=32, n_layers=32, vocab_size=50432, max_seq_len=16384)),
}  # fmt: skip
"""Random-weight models: ``small`` for a laptop, the published 7B shapes for a GPU (context windows widened for long prompts)."""


class Reprojection(ScaleChannel):
    """scale_channel the direct way, the yardstick: queries, keys and attention a second time in every chosen layer.

    The prompt runs in one pass; each chosen attention module runs once as it is and once on scaled queries and keys; the
    last row comes from the second run and its keys stay in the cache. Batches without padding only.
    """

    @contextmanager
    def applied(self, lm: LM) -> Iterator[LM]:
        """See :meth:`Method.applied`."""
        attentions = arch.attention_modules(lm.model)
        with ExitStack() as stack:
            for index in self.layer_indices:
                attention = attentions[index]
                stack.enter_context(replaced(attention, "forward", partial(self._twice, lm.model, index, attention.forward)))
            yield lm

    def _twice(self, model: PreTrainedModel, index: int, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        name = "layer_past" if "layer_past" in kwargs else "past_key_values"
        cache, prompt = kwargs.pop(name), arch.attention_input(args, kwargs).shape[1] > 1
        base = forward(*args, **{name: DynamicCache()}, **kwargs) if prompt else None
        with ExitStack() as stack:
            for handle in arch.on_query_key_input(model, index, self.scale):
                stack.callback(handle.remove)
            scaled = forward(*args, **{name: cache}, **kwargs)
        if base is None:
            return scaled
        return (torch.cat([base[0][:, :-1], scaled[0][:, -1:]], dim=1), scaled[1])


def methods_of(model: PreTrainedModel) -> dict[str, Method]:
    """The unmodified model, scale_channel over half of the layers (the paper's share), and the direct way."""
    count = model.config.num_hidden_layers
    setting: dict[str, Any] = {"channel": 3, "factor": 0.0, "layers": (round(count * 10 / 32), round(count * 25 / 32))}
    return {"unmodified": Unmodified(), "scale_channel": ScaleChannel(**setting), "re-projection": Reprojection(**setting)}


def _seconds(work: Callable[[], Any], device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    start = time.perf_counter()
    work()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - start


def side_by_side(works: dict[str, Callable[[], Any]], device: torch.device, repeats: int) -> dict[str, list[float]]:
    """Seconds of each work, in turn A B C A B C ..., after one warm-up round, so that drift hits all alike."""
    times: dict[str, list[float]] = {name: [] for name in works}
    for round_ in range(repeats + 1):
        for name, work in works.items():
            spent = _seconds(work, device)
            if round_:
                times[name].append(spent)
    return times


@torch.inference_mode()
def generation(lm: LM, *, tokens: int, new_tokens: int, repeats: int) -> list[list[str]]:
    """Prefill and greedy decoding per method: rows of method, seconds (median), and ratio to the unmodified model.

    Args:
        lm: The model.
        tokens: Prompt tokens.
        new_tokens: Tokens generated; 1 measures the prefill.
        repeats: Measured rounds.
    """
    ids = torch.randint(5, lm.model.config.vocab_size, (1, tokens), device=lm.device)

    def run(method: Method) -> None:
        with method.applied(lm):
            lm.model.generate(
                ids, attention_mask=torch.ones_like(ids), max_new_tokens=new_tokens, min_new_tokens=new_tokens, do_sample=False,
                pad_token_id=0,
            )  # fmt: skip

    times = side_by_side({name: partial(run, m) for name, m in methods_of(lm.model).items()}, lm.device, repeats)
    what = f"{tokens} + {new_tokens} tokens"
    return [[what, name, f"{median(spent):.3f}", ratios(spent, times["unmodified"])] for name, spent in times.items()]


@torch.inference_mode()
def search(lm: LM, *, tokens: int, candidates: int, answer: int, repeats: int) -> list[list[str]]:
    """One prefill for all candidates against one forward per candidate, losses compared bit by bit.

    Args:
        lm: The model.
        tokens: Prompt tokens.
        candidates: Candidates in the search.
        answer: Answer tokens whose loss is measured.
        repeats: Measured rounds.

    Raises:
        RuntimeError: The two ways disagree.
    """
    width, count = lm.model.config.hidden_size, lm.layers
    layers = (round(count * 10 / 32), round(count * 25 / 32))
    tried = [Candidate(c, f, layers) for c in range(0, width, width // 10) for f in (0.5, 0.0, -0.5, -1.0)][:candidates]
    prompt = torch.randint(5, lm.model.config.vocab_size, (tokens + answer,)).tolist()
    pair = (prompt[:tokens], prompt[tokens:])
    losses: dict[str, Tensor] = {}

    def shared() -> None:
        losses["shared"] = torch.tensor(candidate_losses(lm, [pair], tried)[1:, 0])

    def apart() -> None:
        found = []
        inputs, targets = lm.pad_with_answers([pair])
        for c in tried:
            with ScaleChannel(channel=c.channel, factor=c.factor, layers=c.layers, last=answer).applied(lm):
                found.append(lm.answer_nats(lm.model(**inputs, logits_to_keep=answer).logits, targets))
        losses["apart"] = torch.cat(found).double().cpu()

    times = side_by_side({"one forward per candidate": apart, "one shared prefill": shared}, lm.device, repeats)
    if not torch.equal(losses["shared"], losses["apart"]):
        raise RuntimeError(f"losses differ by up to {(losses['shared'] - losses['apart']).abs().max():.3g}")
    what = f"search, {len(tried)} candidates, {tokens} + {answer} tokens"
    base = times["one forward per candidate"]
    return [[what, name, f"{median(spent):.3f}", ratios(base, spent)] for name, spent in times.items()]


def ratios(numerator: list[float], denominator: list[float]) -> str:
    """Median, smallest and largest ratio of two lists of seconds, round by round."""
    pairs = sorted(a / b for a, b in zip(numerator, denominator, strict=True))
    return f"{median(pairs):.3f} ({pairs[0]:.3f} to {pairs[-1]:.3f})"


def main(argv: Sequence[str] | None = None) -> None:
    """Measure, print, and write the table where asked."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", choices=SHAPES, default="small")
    parser.add_argument("--dtype", choices=("float32", "bfloat16", "float16"), default="float32")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--prompts", type=int, nargs="+", default=[4096], help="prompt lengths in tokens")
    parser.add_argument("--new-tokens", type=int, nargs="+", default=[1], help="generated tokens; 1 measures the prefill")
    parser.add_argument("--search-tokens", type=int, default=2048, help="prompt length of the search; 0 leaves it out")
    parser.add_argument("--candidates", type=int, default=40)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int, default=None)
    parser.add_argument("--out", type=Path, help="write the table as Markdown")
    options = parser.parse_args(argv)
    if options.threads:
        torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    device = torch.device(options.device)
    with device:
        torch.set_default_dtype(getattr(torch, options.dtype))
        model = SHAPES[options.shape]().eval()
        torch.set_default_dtype(torch.float32)
    lm = posbench.load(model, name=options.shape)
    # Stopping early would compare different amounts of work.
    model.generation_config = copy.copy(model.generation_config)
    model.generation_config.eos_token_id = None
    # MPT's own default is to go without.
    model.generation_config.use_cache = True
    rows = []
    for tokens in options.prompts:
        for new in options.new_tokens:
            rows += generation(lm, tokens=tokens, new_tokens=new, repeats=options.repeats)
    if options.search_tokens:
        settings = {"tokens": options.search_tokens, "candidates": options.candidates, "answer": 4}
        rows += search(lm, **settings, repeats=max(1, options.repeats // 2))
    title = f"{options.shape} shape, random weights, {options.dtype}, {device}, {options.repeats} rounds"
    note = "ratio: to the unmodified model (generation, lower is better); speed-up over one forward per candidate (search)"
    publish(title, rows, note, options.out)


def publish(title: str, rows: Sequence[Sequence[str]], note: str, out: Path | None) -> None:
    """Print measured rows (work, way, seconds, ratio) with hardware and versions, and write them as Markdown where asked."""
    versions = f"posbench {posbench.__version__}, torch {torch.__version__}, transformers {transformers.__version__}"
    title = f"{title}; {hardware()}; {versions}"
    header = ["work", "way", "seconds (median)", "ratio: median (min to max)"]
    table = Table(*header, title=title, title_justify="left")
    for row in rows:
        table.add_row(*row)
    Console().print(table)
    Console().print(note)
    if out:
        out.parent.mkdir(parents=True, exist_ok=True)
        write_text(out, f"# {title}\n\n{markdown(header, rows)}\n\n{note}\n")


if __name__ == "__main__":
    main()
