"""Guard every block and call on a model: one thread at a time, and only finite numbers."""

from __future__ import annotations

import functools
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, Concatenate, ParamSpec, TypeVar
from weakref import WeakKeyDictionary

from posbench.errors import UserError
from posbench.late import Tensor, inference_mode, nn, torch
from posbench.model import families
from posbench.model.hooks import intercepting_attention

P = ParamSpec("P")
T = TypeVar("T")


class NotFinite(Exception):
    """A forward gave no numbers; :func:`guarded` says in which layer."""


@dataclass(eq=False)
class _Entry:
    """A block or a call that a thread is in.

    Attributes:
        name: Name of the method or of the function.
        thread: Identifier of the thread.
        changes: Whether it changes the model.
        undo: Undoes the change.
        was_left: Whether the block has been left; its change may still be in place if an inner block has not been left.
    """

    name: str
    thread: int
    changes: bool
    undo: ExitStack = field(default_factory=ExitStack)
    was_left: bool = False


_entries: WeakKeyDictionary[nn.Module, list[_Entry]] = WeakKeyDictionary()
"""By model, the blocks and calls that a thread is in, the outermost first."""
_entering = threading.Lock()
_spoiled: WeakKeyDictionary[nn.Module, str] = WeakKeyDictionary()
"""Models that a method has changed for good, and its name."""


@contextmanager
def exclusive(
    lm: Any, name: str, change: AbstractContextManager[Any] | None = None
) -> Iterator[None]:
    """Keep other threads out of a model for the duration of a block.

    Blocks of one thread nest. One that is left before a block inside it is undone after that one. Inside a block a
    model that was compiled runs as it was before.

    Args:
        lm: The model.
        name: Name of the block in messages.
        change: Changes the model for the duration of the block; None: nothing does.

    Raises:
        UserError: Another thread is inside a block or a call. Or the change does not restore the model.
        RuntimeError: The block was left before one inside it.
    """
    if culprit := _spoiled.get(lm.model):
        raise _not_restored(culprit, "earlier in this process, other numbers came")
    entry = _Entry(name, threading.get_ident(), change is not None)
    attached = {} if change is None else _attached(lm.model)
    with _entering:
        stack = _entries.setdefault(lm.model, [])
        if stack and stack[0].thread != entry.thread:
            hint = f"another thread is in {stack[0].name}: wait for it, or load a model for each thread"
            raise UserError("model", lm.name, "one block or call at a time", hint)
        stack.append(entry)
    try:
        if _is_compiled(lm.model):
            # A compiled forward does not look at hooks that came after its compilation.
            eager = torch.compiler.set_stance("force_eager")
            entry.undo.enter_context(eager)
        if change is not None:
            _enter(entry, change)
        yield
    finally:
        entry.was_left = True
        innermost = stack[-1]
        leaves_alone = len(stack) < 2 or not stack[-2].was_left
        while stack and stack[-1].was_left:
            # Undone before it is removed: then another thread may come in.
            try:
                stack[-1].undo.close()
            finally:
                stack.pop()
        if innermost is not entry:
            raise RuntimeError(
                f"{name} was left before {innermost.name}, which began inside it: leave the inner block first; "
                f"{lm.name} is itself again once all blocks are left"
            )
    if change is not None and leaves_alone:
        _refuse_leftovers(name, attached)


def _is_compiled(model: nn.Module) -> bool:
    """Whether a module of the model runs through ``torch.compile``."""
    # Without this module nothing has been compiled; to import it takes seconds.
    dynamo = sys.modules.get("torch._dynamo")
    return dynamo is not None and any(
        module._compiled_call_impl is not None
        or isinstance(module, dynamo.OptimizedModule)
        or hasattr(vars(module).get("forward"), "_torchdynamo_orig_callable")
        for module in model.modules()
    )


def _enter(entry: _Entry, change: AbstractContextManager[Any]) -> None:
    """Enter the block of a method; UserError if its generator never yields."""
    try:
        entry.undo.enter_context(change)
    except RuntimeError as error:
        if str(error) != "generator didn't yield":
            raise
        hint = f"correct changed() of {entry.name}"
        raise UserError(
            "method", entry.name, "a block that yields once", hint
        ) from error


def _attached(model: nn.Module) -> dict[nn.Module, tuple[Any, ...]]:
    """By module, the keys of hooks before and behind it, and its own forward, all of which a method has to restore."""
    return {
        module: (
            set(module._forward_pre_hooks),
            set(module._forward_hooks),
            vars(module).get("forward"),
        )
        for module in model.modules()
    }


def _refuse_leftovers(name: str, before: Mapping[nn.Module, Any]) -> None:
    """Remove what a method has left in a model, and refuse the method.

    Args:
        name: Name of the method.
        before: :func:`_attached` before its block.

    Raises:
        UserError: It has left something.
    """
    left: list[nn.Module] = []
    for module, (pre_hooks, hooks, forward) in before.items():
        for present, expected in (
            (module._forward_pre_hooks, pre_hooks),
            (module._forward_hooks, hooks),
        ):
            for key in set(present) - expected:
                # transformers adds hooks of its own at the first call that asks for hidden states, and keeps them.
                origin = str(getattr(present[key], "__module__", ""))
                if not origin.startswith("transformers."):
                    del present[key]
                    left.append(module)
        if vars(module).get("forward") is not forward:
            vars(module).pop("forward", None)
            if forward is not None:
                module.forward = forward
            left.append(module)
    if left:
        kinds = ", ".join(dict.fromkeys(type(module).__name__ for module in left))
        raise _not_restored(name, f"it left hooks or a forward in {kinds}")


def need_restored(lm: Any, name: str, before: Tensor, after: Tensor) -> None:
    """Refuse a method after whose block the model gives other logits than before; so does every later block.

    Args:
        lm: The model.
        name: Name of the method.
        before: Logits of a prompt before the block.
        after: Those of the same prompt after it.

    Raises:
        UserError: They differ by more than rounding.
    """
    tolerance = torch.finfo(lm.model.dtype).eps ** 0.5
    if torch.allclose(before, after, rtol=tolerance, atol=tolerance):
        return
    _spoiled[lm.model] = name
    raise _not_restored(name, "after its block the model gives other logits")


def _not_restored(name: str, found: str) -> UserError:
    """The error for a method that changes a model for good."""
    allowed = f"a method that leaves the model as it was; {found}"
    return UserError("method", name, allowed, f"undo everything in changed() of {name}")


def check_finite(logits: Tensor, counted: Tensor | None = None) -> Tensor:
    """Return logits unchanged after a check that they are finite; -infinity excludes a token.

    Args:
        logits: [..., V].
        counted: Whether a row counts, [...]; None: all do.

    Raises:
        NotFinite: A row holds NaN or infinity, or is equal for all tokens.
    """
    low, high = torch.aminmax(logits.detach(), dim=-1)
    rows_by_fault = {
        "its head gives NaN or infinity": ~torch.isfinite(high),
        "all logits of a token are equal, as hidden states too large for it make them": (
            # NaN compares unequal, so it is not counted here.
            low == high
        ),
    }
    for fault, rows in rows_by_fault.items():
        if counted is not None:
            rows = rows & counted
        if bool(rows.any()):
            raise NotFinite(fault)
    return logits


def guarded(call: Callable[Concatenate[Any, P], T]) -> Callable[Concatenate[Any, P], T]:
    """Wrap a method of LM so that it runs :func:`exclusive`, and an error names the layer that gave NaN or infinity.

    The call is repeated with a check of every layer only if it raised :class:`NotFinite`.
    """

    @functools.wraps(call)
    def run(lm: Any, *args: P.args, **kwargs: P.kwargs) -> T:
        with exclusive(lm, call.__name__):
            try:
                return call(lm, *args, **kwargs)
            except NotFinite:
                pass
            # Only behind the handler are the tensors of the failed forward free.
            try:
                with _checking_layers(lm):
                    call(lm, *args, **kwargs)
            except NotFinite as error:
                raise not_finite_error(lm, str(error)) from error
            raise not_finite_error(
                lm, "NaN or infinity came, and did not come a second time"
            )

    return run


@contextmanager
def _checking_layers(lm: Any) -> Iterator[None]:
    """Check inside a block the embedding and every layer's output at the last token; raise where one is not finite.

    Raises:
        UserError: Names the first layer that gives NaN or infinity.
    """

    def check(module_name: str, hidden: Tensor) -> None:
        if not bool(torch.isfinite(hidden[:, -1]).all()):
            raise not_finite_error(lm, f"{module_name} gives NaN or infinity")

    def check_embedding(
        _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        check("its embedding", families.attention_input(args, kwargs))

    def make_check(number: int) -> Callable[..., None]:
        def check_layer(_: nn.Module, args: tuple[Any, ...], output: Any) -> None:
            hidden = output[0] if isinstance(output, tuple) else output
            check(f"layer {number}", hidden)

        return check_layer

    layers = families.decoder_layers(lm.model)
    with ExitStack() as stack:
        stack.enter_context(
            layers[0].register_forward_pre_hook(check_embedding, with_kwargs=True)
        )
        for number, layer in enumerate(layers):
            stack.enter_context(layer.register_forward_hook(make_check(number)))
        yield


@guarded
@inference_mode
def probe(lm: Any, ids: Sequence[int]) -> Tensor:
    """Run one prompt, and check logits and every layer's queries, keys and values for NaN and infinity.

    A kernel may turn NaN into a number, so that the logits do not show it. Families whose attention does
    not run through the library's functions show their logits alone.

    Args:
        lm: The model.
        ids: Token ids of the prompt.

    Returns:
        Logits of the last token, [1, V].

    Raises:
        UserError: Some are NaN or infinite; the message names the layer.
    """

    def check(module: Any, *states: Any, following: Any, **settings: Any) -> Any:
        query_key_value = states[:3]
        if not all(bool(torch.isfinite(state).all()) for state in query_key_value):
            raise not_finite_error(
                lm, f"the attention of layer {module.layer_idx} gets NaN or infinity"
            )
        return following(module, *states, **settings)

    with ExitStack() as stack:
        if families.family_of(lm.model).interface:
            stack.enter_context(intercepting_attention(lm.model, check))
        output = lm.model(**lm.pad([ids]), use_cache=False, logits_to_keep=1)
        return check_finite(output.logits[:, -1])


@guarded
def forward(lm: Any, **inputs: Tensor) -> None:
    """Run a batch for its hooks alone; UserError if its last logits are not finite."""
    check_finite(lm.model(**inputs, use_cache=False, logits_to_keep=1).logits)


def not_finite_error(lm: Any, fault: str) -> UserError:
    """Return the error for a model with non-finite outputs; its hint names a wider dtype, or the methods applied.

    Args:
        lm: The model.
        fault: What is not finite, in words.
    """
    dtype = str(lm.model.dtype).removeprefix("torch.")
    methods = [entry.name for entry in _entries.get(lm.model, []) if entry.changes]
    hint = "set milder parameters of the method"
    if methods:
        hint = f"set milder parameters of {' and '.join(methods)}"
    wider_dtypes = {
        "float16": "bfloat16 or model.dtype=float32",
        "bfloat16": "float32",
    }
    if dtype in wider_dtypes:
        hint = f"set model.dtype={wider_dtypes[dtype]}, or {hint}"
    else:
        hint = f"{hint}, or get the checkpoint again"
    return UserError("model", lm.name, f"finite numbers; in {dtype} {fault}", hint)


def check_parameters(model: nn.Module, name: str) -> None:
    """Refuse a model with NaN or infinity in a parameter; parameters that accelerate offloads are not read.

    Compressed weights (8 bits and fewer) have no infinity.

    Args:
        model: The model.
        name: Its name, for the error.

    Raises:
        UserError: Names the parameter.
    """
    dtypes = torch.float64, torch.float32, torch.bfloat16, torch.float16
    for parameter, values in model.named_parameters():
        if values.is_meta or values.dtype not in dtypes or not values.numel():
            continue
        # NaN passes through the extremes, which take no memory of their own (isfinite does).
        if not bool(torch.isfinite(torch.stack(torch.aminmax(values.detach()))).all()):
            allowed = f"finite weights; {parameter} of {name} holds NaN or infinity"
            raise UserError("model", name, allowed, "get the checkpoint again")
