"""``posbench export`` and ``verify``: a fix as files that others load."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

from rich.console import Console

from posbench import paths, versions
from posbench.cli.options import flag, option
from posbench.cli.runs import split_outputs
from posbench.errors import UserError
from posbench.export import base, write
from posbench.export.write import CardFacts
from posbench.files import sources
from posbench.files.checksums import file_sha256
from posbench.files.digests import Content, read_contents
from posbench.files.parse import Object, read_yaml
from posbench.files.secrets import command_line
from posbench.late import torch
from posbench.methods.base import Method
from posbench.methods.choice import MethodChoice
from posbench.methods.prompt_change import PromptChange
from posbench.model.load import (
    loaded_dtype,
    published_dtype,
    read_checkpoint,
    torch_device,
)
from posbench.pipeline.compose import compose_one, compose_record
from posbench.pipeline.config import Config, check_config
from posbench.pipeline.fit import FitToModel
from posbench.pipeline.identity import fingerprint, need_same_contents
from posbench.pipeline.prepare import build_run, prepare, silence_transformers
from posbench.report.console import make_console
from posbench.report.folder import (
    RUN_AGAIN,
    applied_or_found,
    read_csv,
    read_json,
    with_constants,
)
from posbench.report.text import describe_window_share
from posbench.run.base import Run, load_placed
from posbench.run.folder import (
    EVALUATE_STAGE,
    FOUND_FILE,
    METHOD_FILE,
    PROVENANCE,
    find_run,
    open_undamaged,
)
from posbench.run.method import typed_in_place
from posbench.run.own_code import config_dir_chosen, import_from, make_importable
from posbench.search import deploy, held_back
from posbench.stats.frames import UNMODIFIED
from posbench.stats.verdict import CANNOT_DO, FIXED, Verdict, run_verdict

BEFORE_FOLDING = (
    "(before folding: of the method for the last token alone; the files scale all tokens, which that run did not "
    "evaluate)"
)


def export(args: list[str]) -> int:
    """Write a run's fix so that others can load it: a checkpoint, an adapter, or code.

    usage: posbench export RUN --to FORMAT --out DIR [--weights TYPE] [--exact] [--force] [--config-dir DIR]
           posbench export OVERRIDES --to FORMAT --out DIR [--weights TYPE] [--exact] [--config-dir DIR]

      RUN           a run, its folder or hash, with what its search found
      OVERRIDES     model=... method=..., as a run has them
      --to FORMAT   checkpoint    weights, or a config alone, for every engine
                    lora          an adapter for PEFT, vLLM and others
                    gguf          the whole model, for llama.cpp and what is built on it
                    gguf-lora     an adapter for these
                    transformers  weights with a file of code, for methods that do not fold
                    vllm-plugin   a package for vLLM (layer_scaling, position_interpolation)
      --out DIR     a new folder
      --weights     of gguf: float32, float16 or q8_0; float16 unless said where the published weights are in
                    half precision, else float32
      --exact       refuse what does not fold as it is
      --force       write the fix of a run whose model cannot do the task
      --config-dir  your own classes, where these are no longer in the folder that the run records

    What folds into weights scales the attention of all tokens. A method for the last token alone is written
    as that twin, and what it costs is measured on the calibration prompts, printed, and put on the model
    card. The files are loaded again and held against the method in process; beyond the tolerance nothing is
    left.

    example: posbench export 1a2b3c4d --to lora --out fix
    """
    outputs, remaining = split_outputs(args)
    to, remaining = option(remaining, "--to")
    out, remaining = option(remaining, "--out")
    weights, remaining = option(remaining, "--weights")
    exact, remaining = flag(remaining, "--exact")
    forced, remaining = flag(remaining, "--force")
    if to is None or out is None or not remaining:
        raise UserError(
            "export",
            " ".join(args),
            f"one run, --to FORMAT ({', '.join(base.FORMATS)}) and --out DIR",
            "posbench export --help",
        )
    form = base.find_format(to)
    _need_weight_type(form, weights)
    console = make_console()
    # What a link points to, which may lie on another disk.
    folder = Path(out).expanduser().resolve()
    if folder in (Path.cwd(), *Path.cwd().parents):
        allowed = "a folder inside this one: the folder is made anew"
        raise UserError("--out", out, allowed, "--out fix")
    write.check_destination(folder)
    origin = _origin(remaining, outputs)
    config, changes = _split_prompt_changes(origin.config)
    config = _with_published_weights(config, console)
    if not forced:
        _need_model_that_does_the_task(origin)
    silence_transformers()
    run = build_run(config, console)
    requested = _requested_method(run)
    # The twin for all tokens, where the format folds the method into weights.
    method = _method_to_write(form, run, requested, exact)
    is_twin = method != requested
    fix = replace(_fix(run, method), weights=weights or "")
    form.check(fix)
    price = origin.price
    if is_twin:
        price = write.folding_price(run, requested, method)
        if changes:
            price += f", without {' and '.join(changes)}"
    if price:
        console.print(price)
    verdict, gain = str(origin.verdict or ""), origin.gain
    if verdict and changes:
        verdict += f" (with {', '.join(changes)} as well)"
    if is_twin:
        verdict = f"{verdict} {BEFORE_FOLDING}" if verdict else ""
        gain = f"{gain} {BEFORE_FOLDING}" if gain else ""
    # With changes of the prompt, or as a twin, the run evaluated something else than the files hold.
    is_evaluated = not changes and not is_twin
    is_fixed = origin.verdict is not None and origin.verdict.name == FIXED
    # For the record: verify compares with these weights.
    contents = read_contents([config.model.checkpoint])
    own_folder = config.config_dir or config_dir_chosen()
    facts = CardFacts(
        command=command_line(["export", *args, *_config_dir_flag()]),
        config_dir=str(own_folder or ""),
        raw=_raw_to_record(config, fix),
        source=origin.source or run.method.origin().get("source", ""),
        verdict=verdict,
        is_fix=is_fixed and is_evaluated,
        prompts=origin.prompts,
        caution=method.caution(run.lm, run.lm.context_window),
        gain=gain,
        price=price,
        effects=_side_effects(outputs, run, contents, requested, method),
        base=[content.fact for content in contents],
        versions=_versions("torch", "transformers", form.package),
        weights=fix.weights,
        prompt_changes=list(changes.values()),
    )
    prompts = write.comparison_prompts(run)
    comparison = write.write(form, fix, facts, prompts, folder)
    console.print(comparison.words)
    if facts.prompts:
        console.print(facts.prompts)
    if facts.caution:
        console.print(f"long prompts: {facts.caution}")
    console.print(f"{folder}: how to load it stands in {folder / write.CARD}")
    if form.name == "checkpoint" and not any(folder.glob("*.safetensors")):
        console.print(
            "no weights are written, as they stay the same: copy config.json over that of the model"
        )
    for name, recipe in changes.items():
        line = f"files hold no prompts, so make {name} where you make yours:"
        console.print(f"{line}\n{recipe}")
    return 0


def verify(args: list[str]) -> int:
    """Load what `posbench export` wrote and hold it against the method in process again.

    usage: posbench verify DIR [--config-dir DIR]

    The files must be those that were written, and the model that they belong to must be on this machine. The
    exit status is 2 where they differ from the method by more than the tolerance.

    example: posbench verify fix
    """
    folder = Path(args[0]).expanduser() if len(args) == 1 else Path()
    record = write.read_record(folder)
    if record is None:
        allowed = f"a folder that posbench export wrote (with {write.RECORD_FILE})"
        raise UserError(
            "DIR", " ".join(args), allowed, "posbench export RUN --to FORMAT --out DIR"
        )
    for name, digest in record.files.items():
        file = folder / name
        if not file.is_file() or file_sha256(file) != digest:
            hint = f"export it again: {record.command}"
            raise UserError(
                "DIR", str(file), "the file as posbench export wrote it", hint
            )
    form = base.find_format(record.format)
    folders = import_from(record.config_dir or None, record.raw, str(folder))
    config = _config_of_record(record.raw, folders)
    with _recorded_model():
        _need_same_base(record, config)
    silence_transformers()
    run = build_run(config, make_console())
    _need_weight_type(form, record.weights or None)
    fix = replace(_fix(run, run.method.build()), weights=record.weights)
    comparison = base.measure(form, fix, folder, write.comparison_prompts(run))
    write.check_agreement(comparison, form, fix)
    print(comparison.words)
    return 0


def _need_weight_type(form: base.Format, weights: str | None) -> None:
    """Refuse a type of weights that a format does not write."""
    if weights is not None and weights not in form.weight_types:
        allowed = ", ".join(form.weight_types) or f"nothing with --to {form.name}"
        raise UserError("--weights", weights, allowed, "leave out --weights")


@contextmanager
def _recorded_model() -> Iterator[None]:
    """Name a next step that works where the model of a record is gone: the commands on records take no overrides."""
    try:
        yield
    except UserError as error:
        if error.field != "model.path":
            raise
        hint = f"put it back there, or make a new run or export with {error.hint}"
        raise UserError(error.field, error.value, error.allowed, hint) from error


def _need_same_base(record: write.Record, config: Config) -> None:
    """Refuse to verify an export with other weights than those it was made from.

    Args:
        record: The export's record.
        config: The config, with the model on this machine.

    Raises:
        UserError: The weights differ, or the record does not name them.
    """
    checkpoint = config.model.checkpoint
    files = [entry for entry in record.base if entry.get("field") == checkpoint.field]
    if not all("name" in entry for entry in files) or not files:
        allowed = f"entries with field {checkpoint.field} and a name, one for each file of the model"
        hint = f"export it again: {record.command}"
        raise UserError(f"{write.RECORD_FILE}: base", record.base, allowed, hint)
    need_same_contents([checkpoint], {"files": files})


@dataclass(frozen=True)
class Origin:
    """Where a fix comes from.

    Attributes:
        config: The config of its model, task and method.
        verdict: Its run's verdict on the position bias; None without a run, or where it measured none.
        prompts: How long its prompts were, in words; empty where that is not known.
        gain: Gain on prompts held back from a search, in words.
        price: Cost of folding, in words, as a search measured it.
        source: Where the method's constants come from.
    """

    config: Config
    verdict: Verdict | None = None
    prompts: str = ""
    gain: str = ""
    price: str = ""
    source: str = ""


def _versions(*packages: str) -> dict[str, str]:
    """Versions of posbench and of packages, an empty name being none."""
    numbers = {name: version(name) for name in packages if name}
    return {"posbench": versions.__version__, **numbers}


def _origin(arguments: list[str], outputs: Path) -> Origin:
    """The fix that overrides describe, or that a run in a folder of outputs found."""
    if "=" in arguments[0]:
        return Origin(_config_of_overrides(arguments))
    if len(arguments) > 1:
        allowed = "one run alone, or overrides alone"
        hint = f"leave out {' '.join(arguments[1:])}"
        raise UserError("export", " ".join(arguments), allowed, hint)
    return _origin_of_run(find_run(arguments[0], outputs))


def _config_dir_flag() -> list[str]:
    """The flag --config-dir as it was typed; empty without one."""
    folder = config_dir_chosen()
    return ["--config-dir", str(folder)] if folder else []


def _config_of_overrides(overrides: list[str]) -> Config:
    """Return the config that overrides name, fitted to the model's window, without search and study.

    Raises:
        UserError: An override belongs to a search, a study, the stages or an experiment.
    """
    for key in overrides:
        group = key.split("=")[0].split(".")[0]
        if group in ("search", "stages", "study", "experiment"):
            hint = "run that first, then posbench export RUN"
            raise UserError(
                "export", key, "keys of model, method, task and runtime", hint
            )
    composed = compose_one(*overrides, *_config_dir_flag(), "stages=[evaluate]")
    return prepare(composed, download=False, asks_calibration=True).config


def _origin_of_run(folder: Path) -> Origin:
    """Return the config of a run with the constants that it applied, and what it knows of them.

    Returns:
        The config, and the run's verdict, lengths of prompts, gain, price of folding and source of constants, as far as
        they were recorded.

    Raises:
        UserError: The run is damaged, or its checkpoint has changed since.
    """
    run = open_undamaged(folder)
    folders = make_importable(run)
    raw = run.config("task", "model", "method")
    if raw["model"].get("base_url"):
        allowed = "a run of a model in this process: this one asked a server, which keeps its weights"
        hint = "posbench export model=DIR method=... --to FORMAT --out DIR"
        raise UserError("RUN", folder.name, allowed, hint)
    found_by_method: dict[str, Any] = {}
    if (folder / FOUND_FILE).is_file():
        found_by_method = read_yaml(
            folder / FOUND_FILE, dict[str, Object], hint=RUN_AGAIN
        )
    applied = read_json(folder / METHOD_FILE)
    is_searched = applied is not None or run.stage("search").get("done")
    if "search" in raw.get("stages", ()) and not is_searched:
        # The constants of its config are those that the search was to replace.
        allowed = "a run whose search has ended"
        raise UserError("RUN", folder.name, allowed, f"finish it: {run.command}")
    constants = applied_or_found(raw["method"], applied, found_by_method)
    config = _config_of_record(
        {**raw, "method": with_constants(raw["method"], constants)}, folders
    )
    with _recorded_model():
        need_same_contents([config.model.checkpoint], run.facts(PROVENANCE))
        checkpoint = read_checkpoint(config.model)
    # A run without a search asked no calibration prompts.
    fit = FitToModel(config, checkpoint, asks_calibration=True)
    fit.fit_task()
    config = fit.config
    search_result: dict[str, Any] = next(iter(found_by_method.values()), {})
    verdict = run_verdict(read_csv(folder / "metrics.csv"))
    prompts = describe_window_share(run.stage(EVALUATE_STAGE))
    if prompts:
        prompts += " Longer ones were not measured: repeat the measurement at the length of yours."
    source = str(search_result.get("source", ""))
    typed = typed_in_place(constants)
    if typed:
        # Gain and price belong to the searched constants, not to the typed ones.
        return Origin(config, verdict, prompts, source=f"{source}; {typed}")
    gain = (
        held_back.summary_line(search_result["held_back"])
        if "held_back" in search_result
        else ""
    )
    price = (
        deploy.summary_sentences(search_result["deploy"])
        if "deploy" in search_result
        else ""
    )
    return Origin(config, verdict, prompts, gain, price, source)


def _need_model_that_does_the_task(origin: Origin) -> None:
    """Refuse to export constants if their run shows that the model cannot do the task, so that nothing shows a fix.

    Raises:
        UserError: The run's verdict says so.
    """
    verdict = origin.verdict
    if verdict is None or verdict.name != CANNOT_DO:
        return
    if origin.config.choice.name != UNMODIFIED:
        allowed = "a run whose model does the task"
        hint = "make the task easier, or add --force to write the files all the same"
        raise UserError("RUN", f"verdict {verdict}", allowed, hint)


def _config_of_record(raw: Mapping[str, Any], folders: Sequence[Path]) -> Config:
    """The config of a run that recorded only the groups which took part in it.

    Args:
        raw: These groups.
        folders: The config folders.
    """
    missing = [group for group in ("model", "method", "task") if group not in raw]
    if missing:
        allowed = f"a config with {', '.join(missing)}"
        hint = "repeat the command that wrote it"
        raise UserError("recorded config", list(raw), allowed, hint)
    groups = {k: v for k, v in raw.items() if k not in ("experiment", "study")}
    return check_config(compose_record({**groups, "stages": ["evaluate"]}, folders))


def _with_published_weights(config: Config, console: Console) -> Config:
    """Return the config with a type of weights that holds the published ones, so that none is written rounded."""
    facts = read_checkpoint(config.model).facts
    if getattr(facts, "quantization_config", None) is not None:
        return config
    published = published_dtype(facts)
    device = torch_device(config.runtime.device)
    chosen = loaded_dtype(config.model, facts, device)
    both = torch.promote_types(getattr(torch, chosen), getattr(torch, published))
    dtype = str(both).removeprefix("torch.")
    if dtype == chosen:
        return config
    console.print(
        f"the published weights are {published}: written from {dtype}, as {chosen} rounds them"
    )
    raw = {**config.raw, "model": {**config.raw["model"], "dtype": dtype}}
    model = replace(config.model, dtype=dtype)  # type: ignore[arg-type]
    return replace(config, raw=raw, model=model)


def _split_prompt_changes(config: Config) -> tuple[Config, dict[str, str]]:
    """Take the methods that change the prompt alone out of a list that also changes the model.

    Returns:
        The config with the others, and the recipe of each that was taken out, by its name.
    """
    recipes: dict[str, str] = {}
    nodes: dict[str, Mapping[str, Any]] = {}
    for name, part in config.choice.parts.items():
        if issubclass(part.cls, PromptChange):
            change = part.build()
            assert isinstance(change, PromptChange)
            recipes[name] = change.recipe or f"posbench method={name} shows it"
        else:
            nodes[name] = config.raw["method"]["parts"][name]
    if not nodes or not recipes:
        return config, {}
    node = {**config.raw["method"], "name": "-".join(nodes), "parts": nodes}
    if len(nodes) == 1:
        ((name, only),) = nodes.items()
        node = {"name": name, **only}
    raw = {**config.raw, "method": node}
    return replace(config, raw=raw, choice=MethodChoice.of(node)), recipes


def _raw_to_record(config: Config, fix: base.Fix) -> dict[str, Any]:
    """Return the config for the record of an export: with the constants that are written, and absolute paths.

    Args:
        config: The config of the export.
        fix: The method with its constants, and the model that it is written for.
    """
    method = with_constants(config.raw["method"], asdict(fix.method))
    raw = {**config.raw, "method": method}
    source = config.model.checkpoint
    is_embedded = config.model.path.startswith(paths.EMBEDDED)
    # A path is relative to the folder in which the command was typed.
    if source.kind == "path" and not is_embedded:
        raw["model"] = {**raw["model"], "path": fix.files}
    elif source.kind == "gguf":
        raw["model"] = {
            **raw["model"],
            "path": str(sources.gguf_file(source).resolve()),
        }
    return raw


def _requested_method(run: Run) -> Method:
    """Return the method of a run, which files can hold.

    Raises:
        UserError: It changes the prompt, does not fit the model, or changes nothing within the model's window.
    """
    method = run.method.build()
    name = run.method.choice.name
    if method.rewrites:
        allowed = "a method that changes the model alone: this one changes the prompt, and files hold no prompts"
        hint = "rewrite the prompts where you ask them; rewritten_prompt in predictions.jsonl shows them"
        raise UserError("method", name, allowed, hint)
    method.check(run.lm)
    if method.unchanged_length(run.lm) >= run.lm.context_window:
        allowed = "one that changes what the model reads within its window"
        hint = "use the model as it is: there is nothing to write"
        raise UserError("method", name, allowed, hint)
    return method


def _method_to_write(
    form: base.Format, run: Run, requested: Method, exact: bool
) -> Method:
    """Return the method to write: the requested one, or its twin for all tokens where the format folds only that.

    Args:
        form: The format.
        run: The run, whose model the method changes.
        requested: The method.
        exact: Whether the twin is forbidden.

    Raises:
        UserError: ``exact`` forbids the twin, which the format could hold.
    """
    if not form.folds or requested.folded(run.lm) is not None:
        return requested
    twin = requested.twin()
    if exact and twin.folded(run.lm) is not None:
        allowed = (
            "a format that keeps the method unchanged; "
            f"{form.name} scales the attention of all tokens"
        )
        raise UserError(
            "--exact", form.name, allowed, "set --to transformers, or leave out --exact"
        )
    return twin


def _side_effects(
    outputs: Path,
    run: Run,
    contents: Sequence[Content],
    requested: Method,
    written: Method,
) -> list[list[str]]:
    """Return what the same method does to other tasks, from runs in the outputs.

    Args:
        outputs: Folder of runs.
        run: Model, task and method.
        contents: The files of the model.
        requested: The method that was asked for.
        written: The method that the files hold, the same or its twin.

    Returns:
        Rows of task, difference in points, and n, see :func:`posbench.export.write.side_effects`.
    """
    weights = fingerprint(contents)
    name = run.method.choice.name

    def effects(method: Method) -> list[list[str]]:
        constants = {"name": name, **asdict(method)}
        return write.side_effects(outputs, weights, run.task.name, constants)

    rows = effects(written)
    if written != requested:
        for task, points, n in effects(requested):
            rows.append([f"{task} (before folding)", points, n])
    return rows


def _fix(run: Run, method: Method) -> base.Fix:
    """Return a method on the model of a run, with what the files of an export need: base, dtype, how to load it again.

    Raises:
        UserError: The model runs without the rotary embedding that its config has.
    """
    config = run.model
    if config.rope == "none":
        allowed = "checkpoint: other engines would apply the rotary embedding that this setting removes"
        raise UserError(
            "model.rope",
            config.rope,
            allowed,
            "export a model whose own config has no rotary embedding",
        )
    files = str(Path(sources.local(config.checkpoint)).resolve())
    is_on_hub = config.checkpoint.kind == "model"
    return base.Fix(
        lm=run.lm,
        method=method,
        base=config.path if is_on_hub else files,
        load=partial(load_placed, config, run.runtime),
        dtype=published_dtype(read_checkpoint(config).facts),
        files=files,
        revision=config.revision if is_on_hub else None,
    )
