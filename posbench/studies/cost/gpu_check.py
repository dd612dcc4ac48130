"""Whether a GPU gives what the CPU gives, under every method, and what it costs there."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Annotated, Any, ClassVar, Literal, NamedTuple, get_args

from annotated_types import Ge, Le

from posbench import paths
from posbench.errors import UserError
from posbench.files.atomic import Row
from posbench.files.sources import Source, checkpoint
from posbench.late import Figure, Tensor, pd, torch, transformers
from posbench.methods import Method
from posbench.model.lm import LM
from posbench.model.load import Dtype, Kernel, load, torch_device
from posbench.plots import base as plot
from posbench.plots.section import Drawn
from posbench.run.base import Run
from posbench.schema import MOST, Count
from posbench.stats.findings import Finding
from posbench.stats.frames import shown
from posbench.studies.base import Study, Tables
from posbench.studies.cost.latency import Latency
from posbench.studies.cost.precision import next_logits
from posbench.studies.cost.throughput import Throughput
from posbench.studies.cost.timing import Shape, applicable, random_model, table
from posbench.tasks import Example, KVRetrieval

TINY = "tiny"
Model = Literal[
    "tiny", "check_llama", "check_qwen3", "check_gemma2", "check_phi3", "check_mpt"
]
EXACT = 1e-4  # of the largest value: what float32 may differ by
TIMES = 3.0  # the CPU's own difference in a type of 16 bits: what may be
BATCH = 3
NEW = 3
TEXT = 180
LOW: tuple[Dtype, ...] = ("bfloat16", "float16")
NOT_RUN = "not run"
FULL = (
    "posbench study=latency study.shape=mistral7b study.dtype=bfloat16 study.methods_at=[10000] "
    "study.prompts=[10000] runtime=gpu"
)


class Setup(NamedTuple):
    """Where and how models run; ``missing`` says why they cannot here."""

    name: str
    device: str = "cpu"
    dtype: Dtype = "float32"
    kernel: Kernel = "auto"
    second: str = ""  # device of the second half of the layers
    missing: str = ""


PLAIN = Setup("the CPU")


def setups(device: torch.device, gpus: int, flash: bool) -> list[Setup]:
    """What to check with so many GPUs visible, and with flash-attn installed or not.

    Without a GPU all that needs one is told as missing, and the CPU is held against itself with another
    kernel or placement: that shows that the checks work, and nothing about CUDA.
    """
    none = (
        ""
        if device.type == "cuda"
        else "no GPU on this machine"
        if not gpus
        else "runtime.device=cpu"
    )
    gpu = partial(Setup, device="cuda" if none else str(device))
    no_flash = none or ("" if flash else "flash-attn is not installed")
    alone = none or ("" if gpus > 1 else "one GPU only")
    found = [gpu("CUDA, float32", missing=none)]
    found += [gpu(f"CUDA, {dtype}", dtype=dtype, missing=none) for dtype in LOW]
    kernel: Kernel = "flash_attention_2"
    found += [
        gpu(
            "CUDA, flash-attention, bfloat16",
            dtype="bfloat16",
            kernel=kernel,
            missing=no_flash,
        )
    ]
    found += [Setup("layers on two GPUs", "cuda:0", second="cuda:1", missing=alone)]
    if none:
        found += [Setup("CPU alone: eager", kernel="eager")]
        found += [
            Setup(f"CPU alone: eager, {dtype}", "cpu", dtype, "eager") for dtype in LOW
        ]
        found += [Setup("CPU alone: layers on disk", second="disk")]
    return found


@dataclass(frozen=True, kw_only=True)
class GpuCheck(Study):
    """Logits, answer losses and replies of every method on small models, against the CPU in float32.

    A difference is relative to the CPU's largest value. In float32 that of the worst prompt may be 1e-4, and
    one prompt may be answered otherwise (a tie). In 16 bits that of the median prompt may be three times what
    the CPU's own is under any method: rounding may turn a choice, as of ms_poe's heads, in a few prompts.
    Then ``latency`` and ``throughput`` run: on a GPU at the size of a 7B model and 10,000 tokens.
    """

    needs_model: ClassVar[bool] = False
    needs_task: ClassVar[bool] = False
    all_methods: ClassVar[bool] = True

    models: tuple[Model, ...] = get_args(Model)
    prompts: Annotated[int, Ge(4), Le(MOST)] = (
        8  # of two lengths, so that batches are padded
    )
    bench: bool = True  # whether times are measured, too
    shape: Shape | None = (
        None  # of the model that is timed; None: mistral7b in bfloat16 on a GPU, else small
    )
    tokens: Count | None = None  # of its prompt; None: 10,000 on a GPU, else 128

    def files(self) -> tuple[Source, ...]:
        """See :meth:`Study.files`: the embedded model."""
        return (replace(checkpoint(f"{paths.EMBEDDED}{TINY}"), field="study.models"),)

    def measure(self, run: Run) -> dict[str, pd.DataFrame]:
        """Tables ``checks`` (a row per setup, model, method and quantity) and those of the bench."""
        device = torch_device(run.runtime.device)
        flash = transformers.utils.is_flash_attn_2_available()
        plan = setups(device, torch.cuda.device_count(), flash)
        rows = [
            _row(setup, verdict=NOT_RUN, reason=setup.missing)
            for setup in plan
            if setup.missing
        ]
        if plan[0].missing:
            run.console.print(f"no GPU is checked: {plan[0].missing}", soft_wrap=True)
        plan = [setup for setup in plan if not setup.missing]
        threads = torch.get_num_threads()
        torch.set_num_threads(1)  # models this small gain nothing from a second one
        with run.progress("models", len(self.models)) as advance:
            for name in self.models:
                rows += Checked(name, run, self.asked()).rows(plan)
                advance(1)
        torch.set_num_threads(threads)
        timed: dict[str, pd.DataFrame] = {}
        for what, bench in self.benches(device).items() if self.bench else ():
            front = partial(_row, Setup("bench", str(device)), quantity=what)
            # A GPU too small, or replies that differ in a batch: told beside what was measured.
            try:
                timed |= bench.measure(run)
                rows.append(front(verdict="passed"))
            except RuntimeError as error:
                rows.append(front(verdict="failed", reason=_reason(error)))
        return {"checks": table(rows), **timed}

    def asked(self) -> list[Example]:
        """Prompts of two lengths."""
        made: dict[str, Any] = {
            "records": "words",
            "prompt": "compact",
            "limit": -(-self.prompts // 2),
        }
        sizes = [
            KVRetrieval(pairs=n, positions=(n // 2,), **made).examples("evaluation")
            for n in (9, 6)
        ]
        return [example for both in zip(*sizes, strict=True) for example in both][
            : self.prompts
        ]

    def benches(self, device: torch.device) -> dict[str, Study]:
        """The studies of cost, at the size of the device."""
        gpu = device.type == "cuda"
        shape: Shape = self.shape or ("mistral7b" if gpu else "small")
        tokens = self.tokens or (10_000 if gpu else 128)
        at: dict[str, Any] = {"shape": shape, "methods_at": (tokens,)}
        if gpu:
            full = Latency(**at, prompts=(tokens,), dtype="bfloat16")
            works: dict[str, Any] = {
                "shape": shape,
                "dtype": "bfloat16",
                "works": ("Table 1",),
            }
            return {
                "latency": full,
                "throughput": Throughput(**works, pairs=(), tokens=tokens),
            }
        few = Throughput(
            pairs=(8,),
            examples=2,
            new_tokens=1,
            repeats=1,
            tokens=64,
            works=("Table 1",),
        )
        return {
            "latency": Latency(**at, prompts=(), search_tokens=0, repeats=1),
            "throughput": few,
        }

    def figures(self, tables: Tables) -> Drawn:
        """Differences over their tolerances, and the times."""
        words = "Largest difference of any model over its tolerance (2: or more); beyond 1 a check fails."
        found = dict[str, tuple[Figure, str]]()
        if tables["checks"]["value"].notna().any():
            found["checks"] = checks_figure(tables["checks"]), words
        for bench, names in (
            (Latency(), ("generation", "search")),
            (Throughput(), ("throughput",)),
        ):
            found.update(
                bench.figures({name: tables[name] for name in names if name in tables})
            )
        return found

    def findings(self, tables: Tables) -> list[Finding]:
        """Setup by setup: do all checks pass; what did not run is not testable."""
        found = []
        texts = ("model", "method", "quantity", "reason")
        checks = (
            tables["checks"]
            .astype(dict.fromkeys(texts, object))
            .fillna(dict.fromkeys(texts, ""))
        )
        for setup, rows in checks.groupby("setup", sort=False):
            ran = rows[rows["verdict"] != NOT_RUN]
            bad = rows[rows["verdict"] == "failed"]
            bench = setup == "bench"
            claim = (
                "runs to its end"
                if bench
                else "every method gives what the CPU gives in float32"
            )
            claim = f"{setup}: {claim}"
            statistic = "checks that failed"
            if not len(ran):
                note = f"not run, so nothing is known: {rows['reason'].iloc[0]}"
                found.append(Finding.untestable(claim, statistic, note).control())
                continue
            note = (
                "the CPU against itself says nothing about a GPU"
                if "alone" in setup
                else ""
            )
            note = f"a 7B model and 10,000 tokens on a GPU: {FULL}" if bench else note
            if len(bad):
                first = bad.iloc[0]
                where = ", ".join(
                    str(first[key])
                    for key in ("model", "method", "quantity")
                    if first[key]
                )
                note = f"the first: {where}: {first['reason'] or first['value']}"
            found.append(
                Finding.that(
                    not len(bad), claim, statistic, (len(bad), len(ran)), note
                ).control()
            )
        return found


class Checked:
    """One small model: what it gives on the CPU, and every setup against that."""

    def __init__(self, name: str, run: Run, asked: Sequence[Example]) -> None:
        self.name = name
        self.asked = asked
        self.tiny = load(TINY, device="cpu")
        self.weights: Mapping[str, Tensor] = {}
        with torch.random.fork_rng():
            torch.manual_seed(0)
            base = self.model(PLAIN)
        self.weights = base.model.state_dict()
        self.methods = applicable(
            base, run.all_methods, lambda choice: choice.cls.example(base)
        )
        self.exact = {
            name: self.answers(base, method) for name, method in self.methods.items()
        }
        self.errors: dict[str, dict[str, dict[str, float]]] = {}

    def model(self, setup: Setup) -> LM:
        """The model in a setup; random weights are drawn once, on the CPU."""
        how: dict[str, Any] = {"dtype": setup.dtype, "attention": setup.kernel}
        if self.name == TINY:
            half = self.tiny.layers // 2
            ends = ("embed_tokens", "rotary_emb", "norm")
            places = dict.fromkeys(
                ["lm_head", *(f"model.{end}" for end in ends)], setup.device
            )
            for i in range(2 * half):
                places[f"model.layers.{i}"] = setup.device if i < half else setup.second
            return load(
                TINY,
                device=setup.device,
                device_map=places if setup.second else None,
                **how,
            )
        lm = random_model(
            self.name, torch.device(setup.device), setup.dtype, self.tiny.tokenizer
        )
        if self.weights:
            lm.model.load_state_dict(self.weights)
        if setup.kernel != "auto":
            lm.model.set_attn_implementation(setup.kernel)
        return load(lm.model, tokenizer=self.tiny.tokenizer, name=self.name)

    def rows(self, plan: Sequence[Setup]) -> Iterator[Row]:
        """A row for each setup, method and quantity; one for a setup that this family does not have."""
        for setup in plan:
            if setup.second and self.name != TINY:
                continue
            # Whatever goes wrong on a GPU is what this study is to find; not every family has every kernel.
            try:
                lm = self.model(setup)
            except Exception as error:  # noqa: BLE001
                verdict = "failed" if setup.kernel == "auto" else NOT_RUN
                yield _row(
                    setup, model=self.name, verdict=verdict, reason=_reason(error)
                )
                continue
            for name, method in self.methods.items():
                front = partial(_row, setup, model=self.name, method=name)
                allowed = self.allowed(setup, name)
                if not allowed:
                    yield front(
                        verdict=NOT_RUN,
                        reason=f"the CPU itself gives no numbers in {setup.dtype}",
                    )
                    continue
                try:
                    found = differences(
                        self.answers(lm, method), self.exact[name], setup.dtype
                    )
                except Exception as error:  # noqa: BLE001
                    yield front(verdict="failed", reason=_reason(error))
                    continue
                for quantity, most in allowed.items():
                    verdict = "passed" if found[quantity] <= most else "failed"
                    yield front(
                        quantity=quantity,
                        value=found[quantity],
                        tolerance=most,
                        verdict=verdict,
                    )

    def allowed(self, setup: Setup, name: str) -> dict[str, float]:
        """The tolerance of each quantity; empty where the CPU gives no numbers in that type."""
        if setup.dtype not in LOW:
            return {"logits": EXACT, "losses": EXACT, "replies": 1 / len(self.asked)}
        if setup.dtype not in self.errors:
            self.errors[setup.dtype] = self.rounding(setup.dtype)
        own = self.errors[setup.dtype]
        least = torch.finfo(getattr(torch, setup.dtype)).eps
        # Of all methods: the errors of a few prompts under one of them are too few to go by.
        most = {
            k: max(each[k] for each in own.values())
            for k in ("logits", "losses")
            if name in own
        }
        return {quantity: max(TIMES * error, least) for quantity, error in most.items()}

    def rounding(self, dtype: Dtype) -> dict[str, dict[str, float]]:
        """By method, the CPU's own differences in a type; without those that give no numbers in it."""
        lm = self.model(PLAIN._replace(dtype=dtype))
        found = dict[str, dict[str, float]]()
        for name, method in self.methods.items():
            with suppress(UserError):
                found[name] = differences(
                    self.answers(lm, method), self.exact[name], dtype
                )
        return found

    def answers(self, lm: LM, method: Method) -> dict[str, Any]:
        """Logits of the first answer token [N, V], losses of the answers [N], and greedy replies."""
        prompts = [e.prompt for e in self.asked]
        answers = [e.answers[0] for e in self.asked]
        logits = next_logits(
            lm, method, [lm.encode(prompt).ids for prompt in prompts], BATCH
        )
        with method.applied(lm):
            losses = lm.answer_loss(prompts, answers, batch_size=BATCH).double()
            replies = lm.generate(prompts, max_new_tokens=NEW, batch_size=BATCH)
        return {"logits": logits, "losses": losses, "replies": replies}


def differences(
    found: Mapping[str, Any], exact: Mapping[str, Any], dtype: Dtype
) -> dict[str, float]:
    """Largest difference over the largest value, of the worst prompt, or in 16 bits of the median one; of
    replies, the share that differ."""
    out = {}
    for name in ("logits", "losses"):
        each = (found[name] - exact[name]).abs().reshape(len(exact[name]), -1).amax(1)
        out[name] = (
            (each.median() if dtype in LOW else each.max()) / exact[name].abs().max()
        ).item()
    pairs = zip(found["replies"], exact["replies"], strict=True)
    return {**out, "replies": sum(a != b for a, b in pairs) / len(exact["replies"])}


def _row(setup: Setup, *, verdict: str, **rest: Any) -> Row:
    """A row of ``checks``."""
    where = f"{setup.device}, {setup.second}" if setup.second else setup.device
    front = {
        "setup": setup.name,
        "device": where,
        "dtype": setup.dtype,
        "kernel": setup.kernel,
    }
    blank = {
        "model": "",
        "method": "",
        "quantity": "",
        "value": float("nan"),
        "tolerance": float("nan"),
    }
    return {**front, **blank, "verdict": verdict, "reason": "", **rest}


def _reason(error: Exception) -> str:
    """What went wrong, in a line."""
    return f"{type(error).__name__}: {' '.join(str(error).split())[:TEXT]}"


@plot.styled
def checks_figure(checks: pd.DataFrame) -> Figure:
    """A panel for each quantity: per method and setup the largest difference over its tolerance."""
    rows = checks[checks["value"].notna()].assign(
        over=checks["value"] / checks["tolerance"]
    )
    methods = list(rows["method"].unique())[::-1]
    names = list(rows["setup"].unique())
    quantities = list(rows["quantity"].unique())
    figure, grid = plot.new_figure(
        plot.PAGE, 3.4, 1, len(quantities), squeeze=False, sharey=True
    )
    for axes, quantity in zip(grid.flat, quantities, strict=True):
        for index, name in enumerate(names):
            part = rows[(rows["quantity"] == quantity) & (rows["setup"] == name)]
            worst = part.groupby("method")["over"].max()
            at = [
                methods.index(method) + 0.16 * ((len(names) - 1) / 2 - index)
                for method in worst.index
            ]
            axes.plot(
                worst.clip(upper=2),
                at,
                **plot.line_style(index) | {"linestyle": "", "label": name},
            )
        axes.set_yticks(range(len(methods)), [shown(method) for method in methods])
        axes.axvline(1, color=plot.GUIDE, linewidth=0.6, zorder=0)
        axes.set(title=quantity, xlabel="difference / tolerance", xlim=(-0.05, 2.1))
    plot.legend_below(figure)
    return figure
