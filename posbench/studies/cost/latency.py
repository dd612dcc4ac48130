"""What the methods and the channel search cost: ratios measured side by side in one run, on random weights.

``make bench``, or ``python -m posbench.studies.cost.latency --help``.
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
import yaml
from omegaconf import OmegaConf
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
from posbench import paths
from posbench.errors import UserError
from posbench.files.atomic import write_text
from posbench.files.hardware import hardware
from posbench.files.markdown import markdown
from posbench.methods import Method, ScaleChannel, Unmodified
from posbench.model import families
from posbench.model.hooks import replaced
from posbench.model.lm import LM
from posbench.pipeline.config import target
from posbench.schema import build
from posbench.search import Candidate
from posbench.search.channel_run import candidate_losses

SHAPES: dict[str, Callable[[], PreTrainedModel]] = {
    "small": lambda: LlamaForCausalLM(
        LlamaConfig(
            hidden_size=512,
            intermediate_size=1408,
            num_hidden_layers=8,
            num_attention_heads=8,
            num_key_value_heads=8,
            vocab_size=4096,
            max_position_embeddings=32768,
        )
    ),
    "wide": lambda: LlamaForCausalLM(
        LlamaConfig(
            hidden_size=2048,
            intermediate_size=5632,
            num_hidden_layers=3,
            num_attention_heads=16,
            num_key_value_heads=16,
            vocab_size=4096,
            max_position_embeddings=32768,
        )
    ),
    "llama2_7b": lambda: LlamaForCausalLM(LlamaConfig(max_position_embeddings=16384)),
    "mistral7b": lambda: MistralForCausalLM(
        MistralConfig(sliding_window=None, max_position_embeddings=32768)
    ),
    "gemma_7b": lambda: GemmaForCausalLM(GemmaConfig(max_position_embeddings=16384)),
    "qwen2_5_7b": lambda: Qwen2ForCausalLM(
        Qwen2Config(
            hidden_size=3584,
            intermediate_size=18944,
            num_hidden_layers=28,
            num_attention_heads=28,
            num_key_value_heads=4,
            vocab_size=152064,
            max_position_embeddings=32768,
        )
    ),
    "mpt_7b": lambda: MptForCausalLM(
        MptConfig(d_model=4096, n_heads=32, n_layers=32, vocab_size=50432, max_seq_len=16384)
    ),
}
"""Random-weight models: ``small`` for a laptop; ``wide``, in which attention has less of the work, as at 7B;
and the published 7B shapes for a GPU (context windows widened for long prompts)."""

PAPERS = {
    "layer_scaling": "1.00 (LPES, Table 5)",
    "ms_poe": "1.45 (LPES, Table 5); 1.86 to 2.77 (Yu et al., Table 5)",
    "moice": "2.42 (LPES, Table 5)",
    "attention_buckets": "4.76 (LPES, Table 5: the row whose name is lost)",
    "scale_channel": "1.07 to 1.45 (Yu et al., Table 5)",
}
"""The papers' ratios to their own unmodified 7B model, from the printed times. LPES: Vicuna-7B, MDQA, H100;
Yu et al.: Llama-2-7B, multi-document questions and key-value pairs, A100; both with FlashAttention-2 and each
with its own programs."""


class Reprojection(ScaleChannel):
    """scale_channel the direct way, the yardstick: queries, keys and attention a second time in every chosen
    layer.

    The prompt runs in one pass; each chosen attention module runs once as it is and once on scaled queries
    and keys; the last row comes from the second run and its keys stay in the cache. Batches without padding
    only.
    """

    @contextmanager
    def applied(self, lm: LM) -> Iterator[LM]:
        """See :meth:`Method.applied`."""
        attentions = families.attention_modules(lm.model)
        with ExitStack() as stack:
            for index in self.layer_indices:
                attention = attentions[index]
                stack.enter_context(
                    replaced(attention, "forward", partial(self._twice, lm.model, index, attention.forward))
                )
            yield lm

    def _twice(
        self, model: PreTrainedModel, index: int, forward: Callable[..., Any], *args: Any, **kwargs: Any
    ) -> Any:
        name = "layer_past" if "layer_past" in kwargs else "past_key_values"
        cache, prompt = kwargs.pop(name), families.attention_input(args, kwargs).shape[1] > 1
        base = forward(*args, **{name: DynamicCache()}, **kwargs) if prompt else None
        with ExitStack() as stack:
            for handle in families.on_query_key_input(model, index, self.scale):
                stack.callback(handle.remove)
            scaled = forward(*args, **{name: cache}, **kwargs)
        if base is None:
            return scaled
        return (torch.cat([base[0][:, :-1], scaled[0][:, -1:]], dim=1), scaled[1])


def _channel(model: PreTrainedModel) -> dict[str, Any]:
    """scale_channel over half of the layers, the paper's share."""
    count = model.config.num_hidden_layers
    return {"channel": 3, "factor": 0.0, "layers": (round(count * 10 / 32), round(count * 25 / 32))}


def methods_of(model: PreTrainedModel) -> dict[str, Method]:
    """The unmodified model, scale_channel, and the direct way."""
    setting = _channel(model)
    return {
        "unmodified": Unmodified(),
        "scale_channel": ScaleChannel(**setting),
        "re-projection": Reprojection(**setting),
    }


def all_methods(lm: LM) -> dict[str, Method]:
    """Every method of ``conf/method`` that applies to a model, the unmodified one first.

    Parameters are the YAML's own; those that a checkpoint would give are stand-ins, which the cost does not
    depend on.
    """
    last = lm.layers - 1
    given: dict[str, dict[str, Any]] = {
        "scale_channel": _channel(lm.model),
        "layer_scaling": {"points": [[0, 1.2], [last / 3, 1.8], [last / 1.5, 1.4], [last, 1.6]]},
        "moice": {"weights": "uniform"},
    }
    found: dict[str, Method] = {"unmodified": Unmodified()}
    for file in sorted((paths.CONF / "method").glob("*.yaml")):
        # The YAML refers to the model's block, which is not there.
        raw = OmegaConf.create({"model": {}, "method": yaml.safe_load(file.read_text())})
        data: Any = OmegaConf.to_container(raw.method, resolve=True)
        cls, values = target(data | given.get(file.stem, {}), Method, "method")
        method = build(cls, {key: value for key, value in values.items() if key != "name"}, "method")
        try:
            method.check(lm)
        except UserError:
            continue
        if not isinstance(method, Unmodified):
            found[file.stem] = method
    return found


CLOCKS = {"wall": time.perf_counter, "processor": time.process_time}


def _seconds(work: Callable[[], Any], device: torch.device, clock: Callable[[], float]) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    start = clock()
    work()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return clock() - start


def side_by_side(
    works: dict[str, Callable[[], Any]],
    device: torch.device,
    repeats: int,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, list[float]]:
    """Seconds of each work, in turn A B C A B C ..., after one warm-up round, so that drift hits all
    alike."""
    times: dict[str, list[float]] = {name: [] for name in works}
    for round_ in range(repeats + 1):
        for name, work in works.items():
            spent = _seconds(work, device, clock)
            if round_:
                times[name].append(spent)
    return times


@torch.inference_mode()
def generation(
    lm: LM,
    methods: dict[str, Method],
    *,
    tokens: int,
    new_tokens: int,
    repeats: int,
    clock: Callable[[], float] = time.perf_counter,
) -> list[list[str]]:
    """Prefill and greedy decoding per method: rows of work, method, seconds (median), ratio to the unmodified
    model, paper's.

    Args:
        lm: The model.
        methods: By name; ``unmodified`` is one of them.
        tokens: Prompt tokens.
        new_tokens: Tokens generated; 1 measures the prefill.
        repeats: Measured rounds.
        clock: Gives the time in seconds.
    """
    ids = torch.randint(5, lm.model.config.vocab_size, (1, tokens), device=lm.device)

    def run(method: Method) -> None:
        with method.applied(lm):
            lm.model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=new_tokens,
                min_new_tokens=new_tokens,
                do_sample=False,
                pad_token_id=0,
            )

    times = side_by_side({name: partial(run, m) for name, m in methods.items()}, lm.device, repeats, clock)
    what = f"{tokens} + {new_tokens} tokens"
    return [
        [what, name, f"{median(spent):.3f}", ratios(spent, times["unmodified"]), PAPERS.get(name, "")]
        for name, spent in times.items()
    ]


@torch.inference_mode()
def search(
    lm: LM,
    *,
    tokens: int,
    candidates: int,
    answer: int,
    repeats: int,
    clock: Callable[[], float] = time.perf_counter,
) -> list[list[str]]:
    """One prefill for all candidates against one forward per candidate, losses compared bit by bit.

    Args:
        lm: The model.
        tokens: Prompt tokens.
        candidates: Candidates in the search.
        answer: Answer tokens whose loss is measured.
        repeats: Measured rounds.
        clock: Gives the time in seconds.

    Raises:
        RuntimeError: The two ways disagree.
    """
    width, count = lm.model.config.hidden_size, lm.layers
    layers = (round(count * 10 / 32), round(count * 25 / 32))
    tried = [Candidate(c, f, layers) for c in range(0, width, width // 10) for f in (0.5, 0.0, -0.5, -1.0)][
        :candidates
    ]
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

    times = side_by_side(
        {"one forward per candidate": apart, "one shared prefill": shared}, lm.device, repeats, clock
    )
    if not torch.equal(losses["shared"], losses["apart"]):
        raise RuntimeError(f"losses differ by up to {(losses['shared'] - losses['apart']).abs().max():.3g}")
    what = f"search, {len(tried)} candidates, {tokens} + {answer} tokens"
    base = times["one forward per candidate"]
    return [[what, name, f"{median(spent):.3f}", ratios(base, spent), ""] for name, spent in times.items()]


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
    parser.add_argument(
        "--methods-at",
        type=int,
        nargs="*",
        default=[2048],
        help="prompt lengths at which all methods run side by side",
    )
    parser.add_argument(
        "--prompts",
        type=int,
        nargs="*",
        default=[4096],
        help="prompt lengths of scale_channel and its direct way",
    )
    parser.add_argument(
        "--new-tokens", type=int, nargs="+", default=[1], help="generated tokens; 1 measures the prefill"
    )
    parser.add_argument(
        "--search-tokens", type=int, default=2048, help="prompt length of the search; 0 leaves it out"
    )
    parser.add_argument("--candidates", type=int, default=40)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int, default=None)
    parser.add_argument("--methods", nargs="+", help="these only, beside the unmodified model")
    parser.add_argument(
        "--clock", choices=CLOCKS, default="wall", help="processor: where a CPU is shared with other work"
    )
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
    every, direct = all_methods(lm), methods_of(model)
    unknown = set(options.methods or ()) - set(every)
    if unknown:
        parser.error(f"--methods {' '.join(sorted(unknown))}: take some of {', '.join(every)}")
    every = {
        name: m
        for name, m in every.items()
        if not options.methods or name in ("unmodified", *options.methods)
    }
    works = [(tokens, every) for tokens in options.methods_at] + [
        (tokens, direct) for tokens in options.prompts
    ]
    for tokens, methods in works:
        for new in options.new_tokens:
            rows += generation(
                lm,
                methods,
                tokens=tokens,
                new_tokens=new,
                repeats=options.repeats,
                clock=CLOCKS[options.clock],
            )
    if options.search_tokens:
        settings = {"tokens": options.search_tokens, "candidates": options.candidates, "answer": 4}
        rows += search(lm, **settings, repeats=max(1, options.repeats // 2), clock=CLOCKS[options.clock])
    title = f"{options.shape} shape, random weights, {options.dtype}, {device}, {options.repeats} rounds, {options.clock} time"
    note = (
        "ratio: to the unmodified model (generation, lower is better); speed-up over one forward per candidate (search). "
        "The papers' ratios are of other models, machines and programs."
    )
    publish(title, rows, note, options.out, header=[*HEADER, "papers' ratio"])


HEADER = ("work", "way", "seconds (median)", "ratio: median (min to max)")


def publish(
    title: str, rows: Sequence[Sequence[str]], note: str, out: Path | None, *, header: Sequence[str] = HEADER
) -> None:
    """Print measured rows with hardware and versions, and write them as Markdown where asked."""
    versions = (
        f"posbench {posbench.__version__}, torch {torch.__version__}, transformers {transformers.__version__}"
    )
    title = f"{title}; {hardware()}; {versions}"
    table = Table(*header, title=title, title_justify="left")
    for row in rows:
        table.add_row(*row)
    Console().print(table)
    Console().print(note)
    if out:
        out.parent.mkdir(parents=True, exist_ok=True)
        write_text(out, f"# {title}\n\n{markdown(list(header), rows)}\n\n{note}\n")


if __name__ == "__main__":
    main()
