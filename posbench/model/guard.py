"""One thread at a time on a model, and numbers that are numbers: what every block and call passes through."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Concatenate, ParamSpec, TypeVar
from weakref import WeakKeyDictionary

from posbench.errors import UserError
from posbench.late import Tensor, inference_mode, nn, torch
from posbench.model import families
from posbench.model.hooks import attending

P = ParamSpec("P")
T = TypeVar("T")


class NotFinite(Exception):
    """A forward gave no numbers; :func:`guarded` says in which layer."""


@dataclass(eq=False)
class _Inside:
    """A block or a call that a thread is in, and what undoes it."""

    name: str
    thread: int
    changes: bool
    undo: ExitStack = field(default_factory=ExitStack)
    left: bool = False


_inside: WeakKeyDictionary[nn.Module, list[_Inside]] = WeakKeyDictionary()
_entering = threading.Lock()


@contextmanager
def alone(
    lm: Any, name: str, change: AbstractContextManager[Any] | None = None
) -> Iterator[None]:
    """Keep other threads out of a model for the duration of a block, and change it if asked.

    Blocks of one thread nest. One that is left before a block inside it is undone after that one.

    Raises:
        UserError: Another thread is inside a block or a call.
        RuntimeError: The block was left before one inside it.
    """
    entry = _Inside(name, threading.get_ident(), change is not None)
    with _entering:
        stack = _inside.setdefault(lm.model, [])
        if stack and stack[0].thread != entry.thread:
            hint = f"another thread is in {stack[0].name}: wait for it, or load a model for each thread"
            raise UserError("model", lm.name, "one block or call at a time", hint)
        stack.append(entry)
    try:
        if change is not None:
            entry.undo.enter_context(change)
        yield
    finally:
        entry.left = True
        behind = stack[-1].name
        crossed = stack[-1] is not entry
        while stack and stack[-1].left:
            # Undone before it is gone: then another thread may come in.
            try:
                stack[-1].undo.close()
            finally:
                stack.pop()
        if crossed:
            told = f"{name} was left before {behind}, which began inside it: leave the inner block first"
            raise RuntimeError(
                f"{told}; {lm.name} is itself again once all blocks are left"
            )


def finite(logits: Tensor, asked: Tensor | None = None) -> Tensor:
    """Logits [..., V] as they are; -infinity shuts a token.

    Raises:
        NotFinite: A row (of those ``asked`` for, [...]) holds NaN or infinity, or tells no tokens apart.
    """
    low, high = torch.aminmax(logits.detach(), dim=-1)
    for bad, told in (
        (~torch.isfinite(high), "its head gives NaN or infinity"),
        (
            low == high,
            "all logits of a token are equal, as hidden states too large for it make them",
        ),
    ):
        if bool((bad if asked is None else bad & asked).any()):
            raise NotFinite(told)
    return logits


def guarded(call: Callable[Concatenate[Any, P], T]) -> Callable[Concatenate[Any, P], T]:
    """Let a function of an LM run :func:`alone`, and name the layer where it raises :class:`NotFinite`.

    Raises:
        UserError: Another thread is inside, or the model gave no numbers; the layer comes from a second run.
    """

    @functools.wraps(call)
    def run(lm: Any, *args: P.args, **kwargs: P.kwargs) -> T:
        with alone(lm, call.__name__):
            try:
                return call(lm, *args, **kwargs)
            except NotFinite:
                pass
            # Only behind the handler are the tensors of the failed forward free.
            try:
                with _looking(lm):
                    call(lm, *args, **kwargs)
            except NotFinite as error:
                raise refusal(lm, str(error)) from error
            raise refusal(lm, "NaN or infinity came, and did not come a second time")

    return run


@contextmanager
def _looking(lm: Any) -> Iterator[None]:
    """Refuse the first layer whose output at the last token is not finite."""

    def look(where: str, hidden: Tensor) -> None:
        if not bool(torch.isfinite(hidden[:, -1]).all()):
            raise refusal(lm, f"{where} gives NaN or infinity")

    def before(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        look("its embedding", families.attention_input(args, kwargs))

    def behind(layer: int) -> Callable[..., None]:
        return lambda _, args, out: look(
            f"layer {layer}", out[0] if isinstance(out, tuple) else out
        )

    layers = families.blocks(lm.model)
    with ExitStack() as stack:
        stack.enter_context(
            layers[0].register_forward_pre_hook(before, with_kwargs=True)
        )
        for number, layer in enumerate(layers):
            stack.enter_context(layer.register_forward_hook(behind(number)))
        yield


@guarded
@inference_mode
def probe(lm: Any, ids: Sequence[int]) -> None:
    """Run one prompt and look at the queries, keys and values of every layer, too.

    A kernel may answer NaN with a number, so that the logits do not show it. Families whose attention does
    not run through the library's functions show their logits alone.

    Raises:
        UserError: Some is NaN or infinite; the message names the layer.
    """

    def look(module: Any, *states: Any, following: Any, **settings: Any) -> Any:
        if not all(bool(torch.isfinite(each).all()) for each in states[:3]):
            raise refusal(
                lm, f"the attention of layer {module.layer_idx} gets NaN or infinity"
            )
        return following(module, *states, **settings)

    listening = families.family_of(lm.model).interface
    with attending(lm.model, look) if listening else nullcontext():
        finite(
            lm.model(**lm.pad([ids]), use_cache=False, logits_to_keep=1).logits[:, -1]
        )


@guarded
def forward(lm: Any, **inputs: Tensor) -> None:
    """Run a batch for what hooks read of it; UserError where its last logits are no numbers."""
    finite(lm.model(**inputs, use_cache=False, logits_to_keep=1).logits)


def refusal(lm: Any, what: str) -> UserError:
    """What is no number in a model's dtype, and what to change."""
    dtype = str(lm.model.dtype).removeprefix("torch.")
    wider = {"float16": "bfloat16 or model.dtype=float32", "bfloat16": "float32"}.get(
        dtype
    )
    methods = [each.name for each in _inside.get(lm.model, []) if each.changes]
    milder = (
        f"give {' and '.join(methods)} milder values"
        if methods
        else "take milder values in the command"
    )
    hint = (
        f"set model.dtype={wider}, or {milder}"
        if wider
        else f"{milder}, or get the checkpoint again"
    )
    return UserError("model", lm.name, f"finite numbers; in {dtype} {what}", hint)


def check_parameters(model: nn.Module, name: str) -> None:
    """Raise UserError where a parameter holds NaN or infinity; what accelerate keeps elsewhere is not read.

    Compressed weights (8 bits and fewer) have no infinity.
    """
    kinds = torch.float64, torch.float32, torch.bfloat16, torch.float16
    for parameter, values in model.named_parameters():
        if values.is_meta or values.dtype not in kinds or not values.numel():
            continue
        # NaN passes through the extremes, which take no memory of their own (isfinite does).
        if not bool(torch.isfinite(torch.stack(torch.aminmax(values.detach()))).all()):
            allowed = f"finite weights; {parameter} of {name} holds NaN or infinity"
            raise UserError("model", name, allowed, "get the checkpoint again")
