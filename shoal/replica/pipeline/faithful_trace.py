"""A trace that computes what a forward does, or a reason why there is none.

torch.fx runs the forward once, with stand-ins for its values. What it does not follow by itself is
noticed here: random numbers, contexts such as torch.no_grad, questions for types, attributes set.
"""

from __future__ import annotations

import builtins
import inspect
import random
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch
from torch import fx, nn
from torch.overrides import TorchFunctionMode

from shoal.errors import BadInput
from shoal.replica.microbatch_context import tracing
from shoal.replica.split.attributes import BufferValues

_ATTEMPTS = 3
_TYPES = (torch.Tensor, tuple, list, dict)  # what values of a forward may be
_RANDOM = {
    *("rand", "randn", "randint", "randperm", "rand_like", "randn_like", "randint_like"),
    *("bernoulli", "multinomial", "normal", "poisson"),
    *("uniform_", "normal_", "random_", "bernoulli_", "exponential_"),
}


class Untraceable(BadInput):
    """A forward that torch.fx cannot follow."""


class _Tracer(fx.Tracer):
    """Follows the calls of its own thread: torch.fx changes nn.Module for all of them."""

    def __init__(self, opened: set[str]):
        super().__init__()
        self._thread = threading.get_ident()
        self._opened = opened
        self._modes = _modes()

    def trace(self, root: Any, concrete_args: dict[str, Any] | None = None) -> fx.Graph:
        try:
            return super().trace(root, concrete_args)
        except SystemExit as end:  # of a forward that does not like what stands for its values
            raise ValueError(f"it calls sys.exit({end.code!r})") from end

    def call_module(
        self, m: nn.Module, forward: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        if threading.get_ident() != self._thread:
            return forward(*args, **kwargs)
        return super().call_module(m, forward, args, kwargs)

    def getattr(self, attr: str, attr_val: Any, parameter_proxy_cache: dict[str, Any]) -> Any:
        if threading.get_ident() != self._thread:
            return attr_val
        return super().getattr(attr, attr_val, parameter_proxy_cache)

    def create_node(self, *args: Any, **kwargs: Any) -> fx.Node:
        """A trace does not record contexts: all of its operations are computed in one."""
        if threading.get_ident() == self._thread and _modes() != self._modes:
            raise ValueError("it enters torch.no_grad, autocast or the like between its modules")
        return super().create_node(*args, **kwargs)

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return module_qualified_name not in self._opened


def traced(model: nn.Module, opened: set[str], given: tuple[str, ...]) -> fx.Graph:
    fixed = {p.name: p.default for p in arguments_of(model) if p.name not in given}
    try:
        with _nothing_kept(model):
            for _ in range(_ATTEMPTS - 1):  # another thread may have drawn Python's numbers
                with suppress(_DrewNumbers), tracing, _NothingRandom():
                    return _traced_for_any_type(model, opened, fixed or None)
            with tracing, _NothingRandom():
                return _traced_for_any_type(model, opened, fixed or None)
    except Exception as error:  # whatever a forward does with what torch.fx gives it
        reason = (str(error).strip() or type(error).__name__).splitlines()[0][:200]
        raise Untraceable(
            f"the forward of {type(model).__name__} cannot be split into stages, since it "
            f"depends on its input ({reason}): put that code into a module of its own, "
            "or make the model an nn.Sequential, or one with an nn.ModuleList of like blocks"
        ) from error


@contextmanager
def _nothing_kept(model: nn.Module) -> Iterator[None]:
    """What the forward keeps as attributes while it is traced are no values."""
    before = [(vars(module), dict(vars(module))) for module in model.modules()]
    buffers = BufferValues(model.named_buffers())
    try:
        yield
        for now, _ in before:
            for key, value in now.items():
                if isinstance(value, fx.Proxy):
                    raise ValueError(f"it sets {key}")
        for name in buffers.restore():
            raise ValueError(f"it changes {name}")
    finally:
        buffers.restore()
        for now, earlier in before:
            for key in [key for key, value in now.items() if isinstance(value, fx.Proxy)]:
                now.pop(key)
                if key in earlier:
                    now[key] = earlier[key]


class _DrewNumbers(Exception):
    def __init__(self) -> None:
        super().__init__("it draws random numbers outside of its modules")


def _traced_for_any_type(
    model: nn.Module, opened: set[str], fixed: dict[str, Any] | None
) -> fx.Graph:
    """Where the forward asks for types (`isinstance`), each answer has to give the same trace."""
    with _type_questions() as asked:
        graph = _Tracer(opened).trace(model, fixed)
    for answer in _TYPES if asked else ():
        with _type_questions(answer):
            other = _Tracer(opened).trace(model, fixed)
        if _operations(other) != _operations(graph):
            raise ValueError(f"it asks for the type of {asked[0]}")
    return graph


def _operations(graph: fx.Graph) -> list[str]:
    return [f"{n.op} {n.target} {n.args} {n.kwargs}" for n in graph.nodes]


class _NothingRandom(TorchFunctionMode):
    """Numbers that the forward draws while it is traced would be the same for all batches."""

    def __enter__(self) -> Any:
        self._state = random.getstate()
        self._numpy = _numpy_state()
        return super().__enter__()  # type: ignore[no-untyped-call]

    def __exit__(self, kind: Any, *rest: Any) -> None:
        super().__exit__(kind, *rest)  # type: ignore[no-untyped-call]
        if kind is None and (random.getstate(), _numpy_state()) != (self._state, self._numpy):
            raise _DrewNumbers

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if getattr(func, "__name__", "") in _RANDOM and not _has_proxy((args, kwargs)):
            raise _DrewNumbers
        return func(*args, **(kwargs or {}))


def _has_proxy(values: Any) -> bool:
    found: list[Any] = []
    fx.node.map_aggregate(values, lambda leaf: found.append(isinstance(leaf, fx.Proxy)))
    return any(found)


def _numpy_state() -> Any:
    numpy = sys.modules.get("numpy")
    return None if numpy is None else repr(numpy.random.get_state(legacy=False))


def _modes() -> tuple[Any, ...]:
    """What `with` statements of a forward change about the operations inside of them."""
    devices = ("cpu", "cuda")
    return (
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        *(torch.is_autocast_enabled(device) for device in devices),
        *(torch.get_autocast_dtype(device) for device in devices),
    )


@contextmanager
def _type_questions(answer: type | None = None) -> Iterator[list[str]]:
    """Answers `isinstance` about traced values, in this thread: each has the type `answer`.

    Yields the values whose types were asked for. torch.fx alone says that no value is a tensor, a
    tuple or a dict. What torch itself asks keeps that answer. Other threads are not concerned; the
    lock `tracing` is held.
    """
    asked: list[str] = []
    thread = threading.get_ident()
    original = builtins.isinstance

    def ask(value: Any, kinds: Any) -> bool:
        found = original(value, kinds)
        if found or type(value) is not fx.Proxy or threading.get_ident() != thread:
            return found
        # `torch.is_tensor` is a question of its caller; what else torch asks is its own affair
        if str(sys._getframe(1).f_globals.get("__name__", "")).startswith("torch."):
            return found
        asked.append(value.node.name)
        return answer is not None and issubclass(answer, kinds)

    builtins.isinstance = ask
    try:
        yield asked
    finally:
        builtins.isinstance = original


def arguments_of(model: nn.Module) -> list[inspect.Parameter]:
    arguments = inspect.signature(model.forward).parameters.values()
    return [p for p in arguments if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
