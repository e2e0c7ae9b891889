"""torch.compile of what a worker computes: its model, its stage, or one FSDP unit after another.

    job.step(compile=True)      inductor; or the name of a mode or of a backend of torch
    torch.compile(model)        the same: the model inside of it is trained, with its own names

Compiling happens at the first forward of a form, in the process that computes it. What a graph
cannot hold (messages between workers, `print`) runs between graphs, and `GraphBreaks` knows where.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from shoal.errors import BadInput
from shoal.runtime.wording import counted, nearest

Forward = Callable[..., Any]
MODES = ("default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs")


@dataclass(frozen=True)
class Compiler:
    """`compile` is torch.compile with its options."""

    compile: Callable[[Forward], Forward]
    uses_graphs: bool = False  # of CUDA, which want parameters at addresses that stay

    @classmethod
    def of(cls, choice: bool | str, exact: bool, device: torch.device) -> Compiler | None:
        """By `job.step(compile=…)`; `BadInput` for a name that torch does not know."""
        if choice is False:
            return None
        # bits follow from the shape, not from the shapes that came before; so do graphs of CUDA
        dynamic = False if exact or choice == "reduce-overhead" else None
        if choice is True or choice in MODES:
            from torch._inductor import list_mode_options

            mode = "default" if choice is True else str(choice)
            options = list_mode_options(mode, dynamic)
            if device.type == "cpu":  # its random numbers take 3 times as long as torch's
                options["fallback_random"] = True
            uses_graphs = mode in ("reduce-overhead", "max-autotune")
            return cls(partial(torch.compile, options=options, dynamic=dynamic), uses_graphs)
        known = torch._dynamo.list_backends(())
        if choice not in known:
            raise BadInput(
                f"compile is True, a mode or a backend of torch.compile, not {choice!r}: "
                + nearest(str(choice), [*MODES, *known])
            )
        return cls(partial(torch.compile, backend=choice, dynamic=dynamic))

    def __call__(self, forward: Forward) -> Forward:
        """`forward`, compiled when it is called."""
        graph_breaks()  # from now on
        _leave_out_messages()
        compiled = self.compile(forward if isinstance(forward, nn.Module) else _apart(forward))
        if not self.uses_graphs:
            return compiled

        def replay(*args: Any, **kwargs: Any) -> Any:
            # also where no backward came in between
            torch.compiler.cudagraph_mark_step_begin()  # type: ignore[no-untyped-call]
            return tree_map(_kept, compiled(*args, **kwargs))

        return replay

    @contextmanager
    def errors(self, model: nn.Module) -> Iterator[None]:
        """What fails inside, also when a backward is compiled, is one sentence."""
        from torch._dynamo.exc import TorchDynamoException

        try:
            yield
        except TorchDynamoException as error:
            raise BadInput(_reason(error, type(model).__name__)) from error


def _kept(output: Any) -> Any:
    """A loss, which is read after the next replay of a graph has written to its memory."""
    return output.clone() if isinstance(output, Tensor) and not output.dim() else output


@cache
def _leave_out_messages() -> None:
    """What is not about a model's tensors runs as it is, and ends a graph."""
    # torch 2.11 loses the sums over replicas in the backward that it traces, and says nothing
    of_old = ("replica.batchnorm",) if torch.__version__ < "2.12" else ()
    for name in (*_NOT_TRACED, *of_old):
        torch._dynamo.trace_rules.add(f"shoal.{name}")


_NOT_TRACED = ("comm", "transport", "runtime", "embedding", "observe", "train", "replica.fsdp")


def _apart(forward: Forward) -> Forward:
    """The same in a function with code of its own: torch limits what it compiles of one code."""

    def call(*args: Any, **kwargs: Any) -> Any:
        return forward(*args, **kwargs)

    call.__code__ = call.__code__.replace(co_name="forward")
    return call


def _reason(error: Exception, name: str) -> str:
    """One sentence about what torch.compile says in many lines."""
    cause: BaseException = getattr(error, "inner_exception", None) or error.__cause__ or error
    if "InvalidCxxCompiler" in f"{type(cause).__name__}: {error}":
        return (
            "compile needs a C++ compiler, and torch finds none on this host: install g++, name "
            'one by CXX=…, or take compile="aot_eager", which needs none, or leave compile out'
        )
    line = next((line.strip() for line in str(cause).splitlines() if line.strip()), "")
    return (
        f"torch.compile fails on {name} ({type(cause).__name__}: {line.rstrip('.')}): leave "
        "compile out; if it fails then, too, the error is in the model or in the batch"
    )


def uncompiled(model: nn.Module) -> tuple[nn.Module, Compiler | None]:
    """The model inside of torch.compile(model), with what compiles it; or the model itself.

    Modules in it that were compiled so stay in their places under their own names, and compiled:
    as after `module.compile()`.
    """
    compiler = None
    while is_optimized(model):
        _leave_out_messages()
        config: Any = model.get_compiler_config()  # type: ignore[operator]
        uses_graphs = bool(config and config.get("triton.cudagraphs"))
        compiler = Compiler(model.dynamo_ctx, uses_graphs)  # type: ignore[arg-type]
        model = model._orig_mod  # type: ignore[assignment]
    for parent in list(model.modules()):
        for name, child in parent._modules.items():
            if is_optimized(child):
                inner: Any = child._orig_mod  # type: ignore[union-attr]
                inner._compiled_call_impl = child.dynamo_ctx(inner._call_impl)  # type: ignore[union-attr,operator]
                parent._modules[name] = inner
    return model, compiler


def is_optimized(module: nn.Module | None) -> bool:
    """By the name of its class: where nothing is compiled the class is not loaded."""
    return type(module).__name__ == "OptimizedModule" and hasattr(module, "dynamo_ctx")


class GraphBreaks(logging.Filter):
    """The lines of source where a graph ended, each once.

    It hears what torch logs about them, and lets it be shown only to those who asked for it
    (TORCH_LOGS=graph_breaks).
    """

    def __init__(self) -> None:
        super().__init__()
        self.places: dict[str, None] = {}
        self._told = 0
        self._shows = False
        for module in ("symbolic_convert", "convert_frame"):
            log = logging.getLogger(f"torch._dynamo.{module}.__graph_breaks")
            self._shows |= log.isEnabledFor(logging.DEBUG)
            log.setLevel(logging.DEBUG)
            log.addFilter(self)

    def filter(self, record: logging.LogRecord) -> bool:
        found = _PLACE.findall(record.getMessage())
        if found:
            file, line = filter(None, found[-1])
            self.places["/".join(Path(file).parts[-2:]) + f":{line}"] = None
        return self._shows

    def news(self) -> str:
        """A sentence about those that were not told yet; empty where there are none."""
        places = list(self.places)[self._told :]
        self._told = len(self.places)
        if not places:
            return ""
        more = f" and {len(places) - _SHOWN} more" if len(places) > _SHOWN else ""
        return (
            f"compile: {counted(len(places), 'graph break')}, where Python runs between compiled "
            f"graphs: {', '.join(places[:_SHOWN])}{more} (TORCH_LOGS=graph_breaks says why)"
        )


_SHOWN = 4
_PLACE = re.compile(r"user code at (.+?):(\d+)|File \"(.+?)\", line (\d+)")


@cache
def graph_breaks() -> GraphBreaks:
    """Of this process."""
    return GraphBreaks()
