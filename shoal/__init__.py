"""Shoal trains one PyTorch model on many devices; the strategy is a value that you swap.

Names are loaded on first use, so that the command line starts without loading torch.
"""

from __future__ import annotations

import importlib
import sys
import warnings
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from shoal.data.sampling import Batch as Batch
    from shoal.embedding.module import Embedding as Embedding
    from shoal.errors import BadInput as BadInput
    from shoal.errors import ShoalError as ShoalError
    from shoal.launch.run import run as run
    from shoal.strategy.strategy import Strategy as Strategy
    from shoal.strategy.strategy import ddp as ddp
    from shoal.strategy.strategy import gossip as gossip
    from shoal.strategy.strategy import hogwild as hogwild
    from shoal.strategy.strategy import localsgd as localsgd
    from shoal.strategy.strategy import mapreduce as mapreduce
    from shoal.strategy.strategy import parse as parse
    from shoal.strategy.strategy import pp as pp
    from shoal.strategy.strategy import ps as ps
    from shoal.strategy.strategy import single as single
    from shoal.strategy.strategy import tp as tp
    from shoal.strategy.strategy import zero as zero
    from shoal.train.job import Job as Job
    from shoal.train.map_reduce import map_reduce as map_reduce
    from shoal.train.step import Step as Step

__version__ = "0.1.0"

_HOME = {
    "Batch": "data.sampling",
    "Embedding": "embedding.module",
    "BadInput": "errors",
    "ShoalError": "errors",
    "Job": "train.job",
    "map_reduce": "train.map_reduce",
    "run": "launch.run",
    "Step": "train.step",
    **dict.fromkeys(
        (
            "Strategy",
            "parse",
            "single",
            "ddp",
            "zero",
            "ps",
            "gossip",
            "hogwild",
            "mapreduce",
            "localsgd",
            "tp",
            "pp",
        ),
        "strategy.strategy",
    ),
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'shoal' has no attribute {name!r}")
    value = getattr(importlib.import_module(f"shoal.{_HOME[name]}"), name)
    globals()[name] = value
    _register_where_torch_is()  # if it has just been loaded
    return value


def __dir__() -> list[str]:
    return sorted([*_HOME, "__version__"])


def register_backend() -> None:
    """Make `torch.distributed.init_process_group("shoal")` known; harmless when it is already.

    Importing shoal does it when torch is loaded; an installed Shoal is also found by torch itself.
    """
    from shoal.comm.torch_backend.register import register

    register()


def _register_with_torch() -> None:
    """The entry point "torch.backends", which `import torch` calls: it must never fail."""
    try:
        register_backend()
    except Exception as error:
        warnings.warn(f'torch.distributed has no backend "shoal": {error}', stacklevel=2)


def _register_where_torch_is() -> None:
    if hasattr(sys.modules.get("torch.distributed"), "Backend"):
        register_backend()


_register_where_torch_is()
