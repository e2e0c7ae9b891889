"""Shoal trains one PyTorch model on many devices; the strategy is a value that you swap.

Names are loaded on first use, so that the command line starts without loading torch.
"""

from __future__ import annotations

import importlib
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from shoal.comm.group import Op as Op
    from shoal.commands.planning import predict as predict
    from shoal.commands.planning import rank_strategies as rank_strategies
    from shoal.errors import BadInput as BadInput
    from shoal.errors import ShoalError as ShoalError
    from shoal.server.embedding.module import Embedding as Embedding
    from shoal.strategy.strategy import Strategy as Strategy
    from shoal.strategy.strategy import parse as parse
    from shoal.strategy.terms import *  # noqa: F403
    from shoal.train.callbacks import Callback as Callback
    from shoal.train.data import Batch as Batch
    from shoal.train.job import Job as Job
    from shoal.train.map_reduce import map_reduce as map_reduce
    from shoal.train.step.step import Step as Step
    from shoal.worker.run import run as run

__version__ = "0.2.0"

_HOME = {
    "Batch": "train.data",
    "Callback": "train.callbacks",
    "Embedding": "server.embedding.module",
    "BadInput": "errors",
    "ShoalError": "errors",
    "Job": "train.job",
    "Op": "comm.group",
    "map_reduce": "train.map_reduce",
    "predict": "commands.planning",
    "rank_strategies": "commands.planning",
    "run": "worker.run",
    "Step": "train.step.step",
    "Strategy": "strategy.strategy",
    "parse": "strategy.strategy",
}


def __getattr__(name: str) -> Any:
    home = _HOME.get(name) or ("strategy.terms" if name in _terms() else None)
    if home is None:
        raise AttributeError(f"module 'shoal' has no attribute {name!r}")
    value = getattr(importlib.import_module(f"shoal.{home}"), name)
    globals()[name] = value
    _register_where_torch_is()  # if it has just been loaded
    return value


def __dir__() -> list[str]:
    return sorted([*_HOME, *_terms(), "__version__"])


def _terms() -> list[str]:
    """The terms of strategies, which are public names."""
    return list(importlib.import_module("shoal.strategy.terms").TERMS)


def register_backend() -> None:
    """Make `torch.distributed.init_process_group("shoal")` known; harmless when it is already.

    Importing shoal does it when torch is loaded; an installed Shoal is also found by torch itself.
    """
    from shoal.comm.torch_backend import register

    register()


def _register_where_torch_is() -> None:
    if hasattr(sys.modules.get("torch.distributed"), "Backend"):
        register_backend()


def _seed_where_launched() -> None:
    """In a worker of `shoal run`: before the script draws anything."""
    from shoal.runtime.launched_worker import seed_launched_worker

    seed_launched_worker()


_register_where_torch_is()
_seed_where_launched()
