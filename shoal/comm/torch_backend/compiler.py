"""What torch.compile leaves as it is.

A backend's methods are called from frames that Dynamo has taken, such as DDP's forward. Traced,
they would fail: the group is an opaque object. Dynamo's own decorator would load all of Dynamo.
"""

from __future__ import annotations

from types import FunctionType
from typing import TypeVar

from torch._C._dynamo import eval_frame

Class = TypeVar("Class", bound=type)


def not_compiled(cls: Class) -> Class:
    """A class whose methods, and all that they call, run as they are under torch.compile."""
    skip = eval_frame._FrameAction.SKIP
    strategy = eval_frame._FrameExecStrategy(skip, skip)
    for method in vars(cls).values():
        if isinstance(method, FunctionType):
            eval_frame.set_code_exec_strategy(method.__code__, strategy)
    return cls
