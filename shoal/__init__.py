"""Shoal trains one PyTorch model on many devices; the strategy is a value that you swap.

Names are loaded on first use, so that the command line starts without loading torch.
"""

from __future__ import annotations

import importlib
import sys
import warnings
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from shoal.data import Batch as Batch
    from shoal.embedding import Embedding as Embedding
    from shoal.errors import BadInput as BadInput
    from shoal.errors import ShoalError as ShoalError
    from shoal.items import map_reduce as map_reduce
    from shoal.job import Job as Job
    from shoal.run import run as run
    from shoal.step import Step as Step
    from shoal.strategy import Strategy as Strategy
    from shoal.strategy import ddp as ddp
    from shoal.strategy import gossip as gossip
    from shoal.strategy import hogwild as hogwild
    from shoal.strategy import localsgd as localsgd
    from shoal.strategy import mapreduce as mapreduce
    from shoal.strategy import parse as parse
    from shoal.strategy import pp as pp
    from shoal.strategy import ps as ps
    from shoal.strategy import single as single
    from shoal.strategy import tp as tp
    from shoal.strategy import zero as zero

__version__ = "0.1.0"

_HOME = {
    "Batch": "data",
    "Embedding": "embedding",
    "BadInput": "errors",
    "ShoalError": "errors",
    "Job": "job",
    "map_reduce": "items",
    "run": "run",
    "Step": "step",
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
        "strategy",
    ),
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'shoal' has no attribute {name!r}")
    value = getattr(importlib.import_module(f"shoal.{_HOME[name]}"), name)
    # `shoal.run` is a module as well as a function: keep the function under the name
    globals()[name] = value
    _register_where_torch_is()  # if it has just been loaded
    return value


def __dir__() -> list[str]:
    return sorted([*_HOME, "__version__"])


def register_backend() -> None:
    """Make `torch.distributed.init_process_group("shoal")` known; harmless when it is already.

    Importing shoal does it when torch is loaded; an installed Shoal is also found by torch itself.
    """
    from shoal.group.registration import register

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
