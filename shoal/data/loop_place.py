"""Where in a script a loop over batches stands: its call, and the turn of the loops around it.

    def train(job):                                  site "train 1": the first job.batches of train
        for epoch in range(start, 10):               counters (epoch,)
            for batch in job.batches(data, 32):

A script that continues says by this whether its first loop is the first one of the run that saved,
or the one that was interrupted.
"""

from __future__ import annotations

import dis
import sys
from types import CodeType, FrameType
from typing import Any, NamedTuple

_NO_LOOP = "JUMP_BACKWARD_NO_INTERRUPT"  # of `yield from` and `await`
_HANDLERS = "PUSH_EXC_INFO"  # behind it are handlers of exceptions, which jump back


class Place(NamedTuple):
    """`counters` are the variables of the `for` loops around it, the outermost first.

    None is a loop whose turns cannot be told apart: `while`, or no integer.
    """

    site: str
    counters: tuple[int | None, ...] = ()

    @property
    def turns(self) -> tuple[int, ...] | None:
        """The counters, where each loop around it has one."""
        known = tuple(value for value in self.counters if value is not None)
        return known if len(known) == len(self.counters) else None


def calling_frame() -> FrameType | None:
    """The innermost one outside of Shoal."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and _is_ours(frame):
        frame = frame.f_back
    return frame


def place_of_caller(outermost: CodeType | None) -> Place:
    """The place of the call that has led here, in Shoal's caller or in the function `outermost`."""
    frame, inner = calling_frame(), None
    callee = "batches"
    site, counters = list[str](), list[int | None]()
    while frame is not None and not _is_ours(frame) and (inner is None or inner is not outermost):
        code = [i for i in dis.get_instructions(frame.f_code) if i.offset <= frame.f_lasti]
        site.insert(0, f"{frame.f_code.co_name} {sum(i.argval == callee for i in code)}")
        counters[:0] = _turns(frame)
        inner = frame.f_code
        callee = inner.co_name
        frame = frame.f_back
    return Place("/".join(site), tuple(counters))


def _is_ours(frame: FrameType) -> bool:
    name = frame.f_globals.get("__name__", "")
    return name.startswith("shoal.") and not name.startswith("shoal.examples.")


def _turns(frame: FrameType) -> list[int | None]:
    """The variables of the loops of a function around its present call."""
    code, at = list(dis.get_instructions(frame.f_code)), frame.f_lasti
    ends = [i for i, instruction in enumerate(code) if instruction.opname == _HANDLERS]
    code = code[: ends[0]] if ends else code
    found = dict[int, int | None]()
    fors = {i.offset for i in code if i.opname == "FOR_ITER"}
    for k, instruction in enumerate(code):
        start, target = instruction.offset, instruction.argval
        if start in fors and start < at < target:  # at the start another item is asked for
            found[start] = _value(frame, code[k + 1 : k + 4])
        is_jump = instruction.opcode in (*dis.hasjrel, *dis.hasjabs) and target <= at <= start
        if is_jump and target not in fors and instruction.opname != _NO_LOOP:
            found[target] = None
    return [found[start] for start in sorted(found)]


def _value(frame: FrameType, code: list[dis.Instruction]) -> int | None:
    """The variable that the first instruction of a loop stores to."""
    names = next((i.argval for i in code if i.opname.startswith("STORE_")), None)
    name: Any = names[0] if isinstance(names, tuple) else names
    value: Any = frame.f_locals.get(name, frame.f_globals.get(name))
    return value if type(value) is int else None
