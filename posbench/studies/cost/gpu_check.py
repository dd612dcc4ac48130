"""Whether a GPU computes the same as the CPU under every method, and the cost of methods there."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Annotated, ClassVar, Literal, NamedTuple, get_args

from annotated_types import Ge, Le

from posbench import paths
from posbench.errors import UserError
from posbench.files.atomic import Row
from posbench.files.sources import Source, checkpoint_source
from posbench.late import Figure, Tensor, pd, torch, transformers
from posbench.methods import Method
from posbench.model.lm import LM
from posbench.model.load import Dtype, Kernel, load, torch_device
from posbench.plots import base as plot
from posbench.plots.section import Drawn
from posbench.run.base import Run
from posbench.schema import MAX_COUNT, Count
from posbench.stats.findings import Finding
from posbench.stats.frames import display_name
from posbench.studies.base import Study, Tables
from posbench.studies.cost.latency import Latency
from posbench.studies.cost.precision import next_logits
from posbench.studies.cost.throughput import Throughput
from posbench.studies.cost.timing import (
    Shape,
    applicable_methods,
    random_model,
    with_environment,
)
from posbench.tasks import Example, KVRetrieval

TINY = "tiny"
Model = Literal[
    "tiny", "check_llama", "check_qwen3", "check_gemma2", "check_phi3", "check_mpt"
]
FLOAT32_TOLERANCE = 1e-4  # of the largest value
ROUNDING_FACTOR = 3.0  # 16 bits may differ by this times the CPU's own difference
BATCH_SIZE = 3
NEW_TOKENS = 3
REASON_CHARACTERS = 180
HALF_PRECISION: tuple[Dtype, ...] = ("bfloat16", "float16")
NOT_RUN = "not run"
FULL_BENCH = (
    "posbench study=latency study.shape=mistral7b study.dtype=bfloat16 study.methods_at=[10000] "
    "study.prompts=[10000] runtime=gpu"
)


class Setup(NamedTuple):
    """Where and how models run.

    Attributes:
        name: For readers.
        device: Device of the model, or of the first half of its layers.
        dtype: Of the weights.
        kernel: Attention kernel.
        second: Device of the second half of the layers; empty for the same.
        missing: Why it cannot run here; empty where it can.
    """

    name: str
    device: str = "cpu"
    dtype: Dtype = "float32"
    kernel: Kernel = "auto"
    second: str = ""
    missing: str = ""


CPU_SETUP = Setup("the CPU")


def setups(device: torch.device, gpus: int, flash: bool) -> list[Setup]:
    """List the setups to check.

    Without a GPU every setup that needs one is listed as missing, and the CPU is held against itself with
    another kernel or placement: that shows that the checks work, and nothing about CUDA.

    Args:
        device: Where the run computes.
        gpus: Number of GPUs that are visible.
        flash: Whether flash-attn is installed.
    """
    no_gpu = ""
    if device.type != "cuda":
        no_gpu = "runtime.device=cpu" if gpus else "no GPU on this machine"
    # A missing GPU is the first reason for everything else.
    no_flash = no_gpu
    if not no_gpu and not flash:
        no_flash = "flash-attn is not installed"
    no_second_gpu = no_gpu
    if not no_gpu and gpus <= 1:
        no_second_gpu = "one GPU only"

    cuda = partial(Setup, device="cuda" if no_gpu else str(device))
    plan = [cuda("CUDA, float32", missing=no_gpu)]
    for dtype in HALF_PRECISION:
        plan.append(cuda(f"CUDA, {dtype}", dtype=dtype, missing=no_gpu))
    plan.append(
        cuda(
            "CUDA, flash-attention, bfloat16",
            dtype="bfloat16",
            kernel="flash_attention_2",
            missing=no_flash,
        )
    )
    plan.append(
        Setup("layers on two GPUs", "cuda:0", second="cuda:1", missing=no_second_gpu)
    )
    if no_gpu:
        plan.append(Setup("CPU alone: eager", kernel="eager"))
        for dtype in HALF_PRECISION:
            name = f"CPU alone: eager, {dtype}"
            plan.append(Setup(name, dtype=dtype, kernel="eager"))
        plan.append(Setup("CPU alone: layers on disk", second="disk"))
    return plan


@dataclass(frozen=True, kw_only=True)
class GpuCheck(Study):
    """Logits, answer losses and replies of every method on small models, against the CPU in float32.

    A difference is relative to the CPU's largest value. In float32 the worst prompt's may be 1e-4, and
    one prompt may be answered otherwise (a tie). In 16 bits the median prompt's may be three times the
    CPU's own under any method: rounding may turn a choice, as of ms_poe's heads, in a few prompts.
    Then ``latency`` and ``throughput`` run: on a GPU at the size of a 7B model and 10,000 tokens.

    Attributes:
        models: Small models of several families.
        prompts: Number of prompts, of two lengths, so that batches are padded.
        bench: Whether times are measured, too.
        shape: Shape of the model that is timed; None for mistral7b in bfloat16 on a GPU, else small.
        tokens: Of its prompt; None for 10,000 on a GPU, else 128.
    """

    needs_model: ClassVar[bool] = False
    needs_task: ClassVar[bool] = False
    all_methods: ClassVar[bool] = True

    models: tuple[Model, ...] = get_args(Model)
    prompts: Annotated[int, Ge(4), Le(MAX_COUNT)] = 8
    bench: bool = True
    shape: Shape | None = None
    tokens: Count | None = None

    def files(self) -> tuple[Source, ...]:
        """See :meth:`Study.files`: the embedded model."""
        return (
            replace(checkpoint_source(f"{paths.EMBEDDED}{TINY}"), field="study.models"),
        )

    def measure(self, run: Run) -> dict[str, pd.DataFrame]:
        """Compare every method on each device, kernel and dtype with the CPU in float32, and run the cost studies.

        Returns:
            Table ``checks`` (a row per setup, model, method and quantity), and the cost studies' tables.
        """
        device = torch_device(run.runtime.device)
        has_flash = transformers.utils.is_flash_attn_2_available()
        plan = setups(device, torch.cuda.device_count(), has_flash)
        no_gpu = plan[0].missing
        if no_gpu:
            run.console.print(f"no GPU is checked: {no_gpu}")
        rows = []
        available = []
        for setup in plan:
            if setup.missing:
                rows.append(_row(setup, verdict=NOT_RUN, reason=setup.missing))
            else:
                available.append(setup)

        examples = self.asked()
        threads = torch.get_num_threads()
        torch.set_num_threads(1)  # models this small gain nothing from a second one
        with run.progress("models", len(self.models)) as advance:
            for name in self.models:
                rows += ModelCheck(name, run, examples).rows(available)
                advance(1)
        torch.set_num_threads(threads)

        tables: dict[str, pd.DataFrame] = {}
        if self.bench:
            setup = Setup("bench", str(device))
            for quantity, bench in self.benches(device).items():
                # A GPU too small, or replies that differ in a batch, is a result like the others.
                try:
                    tables |= bench.measure(run)
                    rows.append(_row(setup, quantity=quantity, verdict="passed"))
                except RuntimeError as error:
                    reason = _reason(error)
                    rows.append(
                        _row(setup, quantity=quantity, verdict="failed", reason=reason)
                    )
        return {"checks": with_environment(rows), **tables}

    def asked(self) -> list[Example]:
        """Return prompts of two lengths, in turn."""
        questions = -(-self.prompts // 2)
        long_examples = _kv_examples(9, questions)
        short_examples = _kv_examples(6, questions)
        examples: list[Example] = []
        for pair in zip(long_examples, short_examples, strict=True):
            examples += pair
        return examples[: self.prompts]

    def benches(self, device: torch.device) -> dict[str, Study]:
        """Return the studies of latency and throughput by name, at sizes that the device can run."""
        if device.type == "cuda":
            shape = self.shape or "mistral7b"
            tokens = self.tokens or 10_000
            latency = Latency(
                shape=shape, methods_at=(tokens,), prompts=(tokens,), dtype="bfloat16"
            )
            throughput = Throughput(
                shape=shape,
                dtype="bfloat16",
                works=("Table 1",),
                candidates=None,
                pairs=(),
                tokens=tokens,
            )
        else:
            latency = Latency(
                shape=self.shape or "small",
                methods_at=(self.tokens or 128,),
                prompts=(),
                search_tokens=0,
                repeats=1,
            )
            throughput = Throughput(
                pairs=(8,),
                examples=2,
                new_tokens=1,
                repeats=1,
                tokens=64,
                works=("Table 1",),
                candidates=None,
            )
        return {"latency": latency, "throughput": throughput}

    def figures(self, tables: Tables) -> Drawn:
        """Draw differences over their tolerances, and the figures of the cost studies."""
        figures: dict[str, tuple[Figure, str]] = {}
        if tables["checks"]["value"].notna().any():
            caption = "Largest difference of any model over its tolerance (2: or more); beyond 1 a check fails."
            figures["checks"] = (checks_figure(tables["checks"]), caption)
        figures |= Latency().figures(_present(tables, "generation", "search"))
        figures |= Throughput().figures(_present(tables, "throughput"))
        return figures

    def findings(self, tables: Tables) -> list[Finding]:
        """Judge for each setup whether all checks pass; one that did not run is not testable."""
        texts = ("model", "method", "quantity", "reason")
        checks = tables["checks"].astype(dict.fromkeys(texts, object))
        checks = checks.fillna(dict.fromkeys(texts, ""))
        return [
            _setup_finding(setup, rows).control()
            for setup, rows in checks.groupby("setup", sort=False)
        ]


def _present(tables: Tables, *names: str) -> dict[str, pd.DataFrame]:
    """The existing ones among some tables."""
    return {name: tables[name] for name in names if name in tables}


def _kv_examples(pairs: int, questions: int) -> list[Example]:
    """Return questions of key-value retrieval with ``pairs`` pairs, the gold pair in the middle."""
    task = KVRetrieval(
        records="words",
        prompt="compact",
        pairs=pairs,
        positions=(pairs // 2,),
        limit=questions,
    )
    return task.examples("evaluation")


def _setup_finding(setup: str, rows: pd.DataFrame) -> Finding:
    """Judge whether all checks of a setup pass.

    Args:
        setup: Name of the setup.
        rows: Its rows of ``checks``.
    """
    is_bench = setup == "bench"
    claim = f"{setup}: every method gives what the CPU gives in float32"
    if is_bench:
        claim = f"{setup}: runs to its end"
    statistic = "checks that failed"
    checks = rows[rows["verdict"] != NOT_RUN]
    if checks.empty:
        note = f"not run, so nothing is known: {rows['reason'].iloc[0]}"
        return Finding.untestable(claim, statistic, note)

    failed = checks[checks["verdict"] == "failed"]
    note = ""
    if len(failed):
        first = failed.iloc[0]
        parts = [first["model"], first["method"], first["quantity"]]
        check = ", ".join(str(part) for part in parts if part)
        note = f"the first: {check}: {first['reason'] or first['value']}"
    elif is_bench:
        note = f"a 7B model and 10,000 tokens on a GPU: {FULL_BENCH}"
    elif "alone" in setup:
        note = "the CPU against itself says nothing about a GPU"
    number = (len(failed), len(checks))
    return Finding.that(failed.empty, claim, statistic, number, note)


class Answers(NamedTuple):
    """A model's outputs for N prompts: logits of the next token, losses of the answers, greedy replies."""

    logits: Tensor  # [N, V], float64
    losses: Tensor  # [N], float64, nats per token
    replies: list[str]


class ModelCheck:
    """One small model: its outputs on the CPU, and every setup against them."""

    def __init__(self, name: str, run: Run, examples: Sequence[Example]) -> None:
        self.name = name
        self.examples = examples
        self.tiny = load(TINY, device="cpu")
        self.weights: Mapping[str, Tensor] = {}
        with torch.random.fork_rng():
            torch.manual_seed(0)
            base = self.model(CPU_SETUP)
        self.weights = base.model.state_dict()
        self.methods = applicable_methods(
            base, run.all_methods, lambda choice: choice.cls.example(base)
        )
        self.exact = {
            name: self.answers(base, method) for name, method in self.methods.items()
        }
        # The CPU's own differences in a type of 16 bits, by type, method and quantity.
        self.errors: dict[str, dict[str, dict[str, float]]] = {}

    def model(self, setup: Setup) -> LM:
        """Return the model on the device, with the kernel and the dtype of a setup.

        Random weights are drawn once, on the CPU, so that all setups have the same.
        """
        if self.name == TINY:
            device_map = self._device_map(setup) if setup.second else None
            return load(
                TINY,
                device=setup.device,
                device_map=device_map,
                dtype=setup.dtype,
                attention=setup.kernel,
            )
        device = torch.device(setup.device)
        lm = random_model(self.name, device, setup.dtype, self.tiny.tokenizer)
        if self.weights:
            lm.model.load_state_dict(self.weights)
        if setup.kernel != "auto":
            lm.model.set_attn_implementation(setup.kernel)
        return load(lm.model, tokenizer=self.tiny.tokenizer, name=self.name)

    def _device_map(self, setup: Setup) -> dict[str, str]:
        """Return the device of each of the embedded model's modules: half of the layers on the second device."""
        modules = ["lm_head", "model.embed_tokens", "model.rotary_emb", "model.norm"]
        device_map = dict.fromkeys(modules, setup.device)
        half = self.tiny.layers // 2
        for layer in range(2 * half):
            device = setup.device if layer < half else setup.second
            device_map[f"model.layers.{layer}"] = device
        return device_map

    def rows(self, plan: Sequence[Setup]) -> Iterator[Row]:
        """Yield a row of ``checks`` for each setup, method and quantity.

        A setup that cannot run this model has one row, with the reason.

        Args:
            plan: The setups: a dtype and an attention kernel each, on the first GPU or also the second one.
        """
        for setup in plan:
            # One model, the smallest, shows whether a second GPU works.
            if setup.second and self.name != TINY:
                continue
            # The study has to catch any GPU error; not every family has every kernel.
            try:
                lm = self.model(setup)
            except Exception as error:  # noqa: BLE001
                # The kernel that is chosen by default has to run.
                verdict = "failed" if setup.kernel == "auto" else NOT_RUN
                yield _row(
                    setup, model=self.name, verdict=verdict, reason=_reason(error)
                )
                continue
            for name in self.methods:
                yield from self._method_rows(setup, lm, name)

    def _method_rows(self, setup: Setup, lm: LM, name: str) -> Iterator[Row]:
        """Yield a row of ``checks`` for each quantity (logits, losses, replies) of a method in a setup.

        Args:
            setup: The setup.
            lm: The model in it.
            name: Name of the method.
        """
        row = partial(_row, setup, model=self.name, method=name)
        tolerances = self.tolerances(setup, name)
        if not tolerances:
            reason = f"the CPU itself gives no numbers in {setup.dtype}"
            yield row(verdict=NOT_RUN, reason=reason)
            return
        try:
            answers = self.answers(lm, self.methods[name])
            values = differences(answers, self.exact[name], setup.dtype)
        except Exception as error:  # noqa: BLE001
            yield row(verdict="failed", reason=_reason(error))
            return
        for quantity, tolerance in tolerances.items():
            value = values[quantity]
            verdict = "passed" if value <= tolerance else "failed"
            yield row(
                quantity=quantity, value=value, tolerance=tolerance, verdict=verdict
            )

    def tolerances(self, setup: Setup, name: str) -> dict[str, float]:
        """Return the largest difference allowed by quantity; empty where the CPU gives no numbers in that dtype.

        In half precision it follows from the rounding errors of the CPU in the same dtype.

        Args:
            setup: Dtype and kernel that are checked.
            name: Name of the method.

        Returns:
            By ``logits``, ``losses`` (nats), and in float32 ``replies`` (share of replies that differ).
        """
        dtype = setup.dtype
        if dtype not in HALF_PRECISION:
            return {
                "logits": FLOAT32_TOLERANCE,
                "losses": FLOAT32_TOLERANCE,
                "replies": 1 / len(self.examples),
            }
        if dtype not in self.errors:
            self.errors[dtype] = self.rounding_errors(dtype)
        errors = self.errors[dtype]
        if name not in errors:
            return {}
        smallest = torch.finfo(getattr(torch, dtype)).eps
        tolerances = {}
        for quantity in ("logits", "losses"):
            # Over all methods: a few prompts under one method give too few errors.
            largest = max(of_method[quantity] for of_method in errors.values())
            tolerances[quantity] = max(ROUNDING_FACTOR * largest, smallest)
        return tolerances

    def rounding_errors(self, dtype: Dtype) -> dict[str, dict[str, float]]:
        """Return by method and quantity how far the CPU in some dtype is from the CPU in float32.

        Methods that fail in that dtype are left out.
        """
        lm = self.model(CPU_SETUP._replace(dtype=dtype))
        errors = {}
        for name, method in self.methods.items():
            with suppress(UserError):
                answers = self.answers(lm, method)
                errors[name] = differences(answers, self.exact[name], dtype)
        return errors

    def answers(self, lm: LM, method: Method) -> Answers:
        """Return logits, losses of the right answers, and replies of a model for the examples under a method."""
        texts = [example.prompt for example in self.examples]
        gold = [example.answers[0] for example in self.examples]
        prompts = [
            lm.add_items(example.prompt, example.items) for example in self.examples
        ]
        logits = next_logits(lm, method, prompts, BATCH_SIZE)
        with method.applied(lm):
            losses = lm.answer_loss(texts, gold, batch_size=BATCH_SIZE).double()
            replies = lm.generate(
                texts, max_new_tokens=NEW_TOKENS, batch_size=BATCH_SIZE
            )
        return Answers(logits, losses, replies)


def differences(answers: Answers, exact: Answers, dtype: Dtype) -> dict[str, float]:
    """Compare answers with exact ones.

    Args:
        answers: Outputs of a setup.
        exact: Outputs of the CPU in float32.
        dtype: Weight type of the setup.

    Returns:
        Of ``logits`` and ``losses`` the largest difference over the largest exact value, of the worst prompt, or
        in 16 bits of the median one; of ``replies`` the share that differ.
    """
    pairs = list(zip(answers.replies, exact.replies, strict=True))
    return {
        "logits": _relative_difference(answers.logits, exact.logits, dtype),
        "losses": _relative_difference(answers.losses, exact.losses, dtype),
        "replies": sum(a != b for a, b in pairs) / len(pairs),
    }


def _relative_difference(values: Tensor, exact: Tensor, dtype: Dtype) -> float:
    """See :func:`differences`; values of N prompts, [N, ...]."""
    by_prompt = (values - exact).abs().reshape(len(exact), -1).amax(1)
    difference = by_prompt.median() if dtype in HALF_PRECISION else by_prompt.max()
    return (difference / exact.abs().max()).item()


def _row(
    setup: Setup,
    *,
    verdict: str,
    model: str = "",
    method: str = "",
    quantity: str = "",
    value: float = float("nan"),
    tolerance: float = float("nan"),
    reason: str = "",
) -> Row:
    """Return a row of ``checks``.

    Args:
        setup: Device, dtype and kernel.
        verdict: ``passed``, ``failed`` or not run.
        model: Name of the model.
        method: Name of the method.
        quantity: What is compared.
        value: The largest difference.
        tolerance: What it may be.
        reason: Why there is no value, or what failed.
    """
    devices = [setup.device, setup.second] if setup.second else [setup.device]
    return {
        "setup": setup.name,
        "device": ", ".join(devices),
        "dtype": setup.dtype,
        "kernel": setup.kernel,
        "model": model,
        "method": method,
        "quantity": quantity,
        "value": value,
        "tolerance": tolerance,
        "verdict": verdict,
        "reason": reason,
    }


def _reason(error: Exception) -> str:
    """The error, in a line."""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:REASON_CHARACTERS]}"


@plot.styled
def checks_figure(checks: pd.DataFrame) -> Figure:
    """Draw a panel for each quantity: by method and setup, the largest difference divided by its tolerance.

    Args:
        checks: Rows of method, setup, quantity, value (the difference; missing where a check did not run), tolerance.
    """
    rows = checks[checks["value"].notna()]
    rows = rows.assign(ratio=rows["value"] / rows["tolerance"])
    methods = list(rows["method"].unique())[::-1]
    setups = list(rows["setup"].unique())
    quantities = list(rows["quantity"].unique())
    figure, grid = plot.new_figure(
        plot.PAGE, 3.4, 1, len(quantities), squeeze=False, sharey=True
    )
    for axes, quantity in zip(grid.flat, quantities, strict=True):
        for index, setup in enumerate(setups):
            part = rows[(rows["quantity"] == quantity) & (rows["setup"] == setup)]
            worst = part.groupby("method")["ratio"].max()
            # Setups lie beside each other on the line of a method.
            offset = 0.16 * ((len(setups) - 1) / 2 - index)
            y = [methods.index(method) + offset for method in worst.index]
            style = plot.line_style(index) | {"linestyle": "", "label": setup}
            axes.plot(worst.clip(upper=2), y, **style)
        axes.set_yticks(
            range(len(methods)), [display_name(method) for method in methods]
        )
        axes.axvline(1, color=plot.GUIDE, linewidth=0.6, zorder=0)
        axes.set(title=quantity, xlabel="difference / tolerance", xlim=(-0.05, 2.1))
    plot.add_legend_below(figure)
    return figure
