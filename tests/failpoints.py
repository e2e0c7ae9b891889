"""Named points in servers and the coordinator at which tests kill or stop a process.

    SHOAL_TEST_FAILPOINTS=push.logged:kill@3       the process is killed the third time there
    SHOAL_TEST_FAILPOINTS=election.before:stop     ... stopped (SIGSTOP) the first time
    SHOAL_TEST_FAILPOINTS=splice:kill+             ... the first time after RUN_DIR/armed was made

A point is before or after a call of a function, which is wrapped. A server that is a fork of the
zygote is armed before it starts; `python -m tests.failpoints MODULE` is a new process that is.

    push.received, validated, deduplicated      a server has the metadata of a push; has checked
                                                it; has found that it does not know it yet
    push.logged, replicated, applied            ... has it in its log, has sent nothing yet; knows
                                                that all members have it; has applied it
    push.acknowledged                           ... has answered the worker, or its predecessor
    election.before, after                      a configuration is about to be written; is written
    splice                                      a tail has stopped committing, to add a member
    snapshot.begin                              a state is about to be copied
    snapshot.temporary, fsync, rename           a file: is written, is on the disk, has its name;
                                                a learner: has a part, has all, has installed it
    store.begin, partial, temporary, fsync, rename  the store of the coordinator: as a file above
"""

from __future__ import annotations

import functools
import inspect
import os
import re
import runpy
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

VARIABLE = "SHOAL_TEST_FAILPOINTS"
PROGRAMS = ("shoal.server.main", "shoal.server.coordinator.main")
_SPEC = re.compile(r"([a-z_]+(?:\.[a-z_]+)*):(kill|stop)(?:@([1-9][0-9]{0,8}))?(\+)?")
_SIGNALS = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP}
Act = Callable[[], None]
_replaced: list[tuple[Any, str, Any]] = []  # owner, name, function


def arm(spec: str) -> None:
    """From now on this process does what `spec` says."""
    match = _SPEC.fullmatch(spec)
    assert match is not None, f"{VARIABLE} has {spec!r}: use NAME:kill, NAME:stop, NAME:kill@3"
    name, action, passage, is_later = match.groups()
    gate = Path(os.environ["SHOAL_RUN_DIR"], "armed") if is_later else None
    at(name, _passages(_SIGNALS[action], int(passage or 1), gate))


def at(name: str, act: Act) -> None:
    """From now on this process does `act` at this point."""
    kind, _, point = name.partition(".")
    {
        "push": _at_push,
        "election": _at_election,
        "splice": _at_splice,
        "snapshot": _at_snapshot,
        "store": _at_store,
    }[kind](point, act)


@contextmanager
def doing(act: Act, name: str) -> Iterator[None]:
    """Inside the block this process does `act` at this point."""
    at(name, act)
    try:
        yield
    finally:
        while _replaced:
            setattr(*_replaced.pop())


def arm_program(args: Sequence[str]) -> None:
    """In a new process that is to be `python ARGS`: servers and the coordinator have points."""
    spec = os.environ.get(VARIABLE)
    if spec and len(args) > 1 and args[0] == "-m" and args[1] in PROGRAMS:
        arm(spec)


def _passages(number: signal.Signals, nth: int, gate: Path | None) -> Act:
    """Sends this process a signal the n-th time; not before the file `gate` is there."""
    left = nth

    def passed() -> None:
        nonlocal left
        if gate is None or gate.exists():
            left -= 1
            if left == 0:
                os.kill(os.getpid(), number)

    return passed


def _always(*_: object) -> bool:
    return True


def _before(owner: Any, name: str, act: Act, when: Callable[..., bool] = _always) -> None:
    """`act` before each call of a function whose arguments are so."""
    _before_with(owner, name, lambda *_: act(), when)


def _before_with(
    owner: Any, name: str, act: Callable[..., None], when: Callable[..., bool] = _always
) -> None:
    """The same, with the arguments."""
    function = getattr(owner, name)

    @functools.wraps(function)
    def around(*args: Any, **named: Any) -> Any:
        if when(*args):
            act(*args)
        return function(*args, **named)

    _put(owner, name, around)


def _after(owner: Any, name: str, act: Act, when: Callable[..., bool] = _always) -> None:
    """`act` after each call whose answer and arguments are so."""
    function = getattr(owner, name)

    @functools.wraps(function)
    def around(*args: Any, **named: Any) -> Any:
        answer = function(*args, **named)
        if when(answer, *args):
            act()
        return answer

    _put(owner, name, around)


def _put(owner: Any, name: str, function: Callable[..., Any]) -> None:
    _replaced.append((owner, name, getattr(owner, name)))
    setattr(owner, name, function)


def _called_in(function: Any) -> bool:
    """Whether the wrapped call stands in this function."""
    return sys._getframe(3).f_code is inspect.unwrap(function).__code__


def _is_push(operation: object) -> bool:
    from shoal.server.member.operations import Pushed

    return isinstance(operation, Pushed)


def _brings_push(message: Any) -> bool:
    """Whether a message between members has a push in it."""
    proposed = getattr(message, "op", None)
    return proposed is not None and _is_push(proposed.operation)


def _at_push(point: str, act: Act) -> None:
    """At the head, which a worker's commit comes to; and at other members."""
    from shoal.server.chain.node import ChainNode
    from shoal.server.member import operations
    from shoal.server.member.core import ChainCore, Waiters
    from shoal.server.model.shard import PushBuffer
    from shoal.server.process import peer, requests
    from shoal.server.protocol import FrameKind

    def of_third(_: object, __: object, third: Any, *___: object) -> bool:
        return _is_push(getattr(third, "operation", third))

    committing = SimpleNamespace(handler=peer.HANDLERS[FrameKind.COMMIT].handler)
    if point == "received":
        _before(committing, "handler", act)
        _after(operations, "decode_message", act, lambda found, _: _is_push(found[1]))
    elif point == "validated":
        _before(requests, "catch_up", act, lambda *_: _called_in(requests.commit))
        _after(operations, "read_payload", act, of_third)
    elif point == "deduplicated":
        _before(PushBuffer, "take_rows", act, lambda *_: _called_in(requests.commit))
        _before(operations, "read_payload", act, lambda _, operation, *__: _is_push(operation))
    elif point == "logged":
        _after(ChainNode, "propose", act, of_third)
        _after(ChainNode, "receive", act, lambda *given: _brings_push(given[3]))
    elif point == "replicated":
        pushes: set[int] = set()

        def note(_: object, position: int, proposed: Any) -> None:
            if _is_push(proposed.operation):
                pushes.add(position)

        _before_with(ChainCore, "_apply", note)
        _before(Waiters, "wake", act, lambda _, position: position in pushes)
    elif point == "applied":
        _after(ChainCore, "_outcome_of", act, of_third)
    else:
        assert point == "acknowledged"
        _after(committing, "handler", act)
        _after(ChainCore, "deliver", act, lambda *given: _brings_push(given[3]))
    registered = peer.HANDLERS[FrameKind.COMMIT]
    peer.HANDLERS[FrameKind.COMMIT] = registered._replace(handler=committing.handler)


def _at_election(point: str, act: Act) -> None:
    from shoal.server.coordinator import Coordinator
    from shoal.server.member.start import Keeper

    if point == "before":
        _before(Keeper, "_swap", act)
    else:
        assert point == "after"
        _after(Coordinator, "put_if", act, lambda *_: _called_in(Keeper._swap))


def _at_splice(point: str, act: Act) -> None:
    from shoal.server.chain.messages import ChangeConfig
    from shoal.server.member.core import ChainCore

    assert not point
    _before(ChainCore, "_carry_out", act, lambda _, effect: isinstance(effect, ChangeConfig))


def _at_snapshot(point: str, act: Act) -> None:
    """Of a chain's tail and its learner, and of a file of a checkpoint."""
    from shoal.runtime import checkpoint_folders as folders
    from shoal.server.member import core

    def is_file(*given: Any) -> bool:
        return given[-1].is_file() and _called_in(folders.ServerVersion.write)

    def is_folder(*given: Any) -> bool:
        return given[-1].is_dir() and _called_in(folders.ServerVersion.write)

    if point == "begin":
        _before(core, "snapshot_sender", act)
        _before(folders.ServerVersion, "write", act)
    elif point == "rename":
        _after(core.ChainCore, "receive_snapshot", act)
        _before(folders, "sync_path", act, is_folder)
    else:
        assert point in ("temporary", "fsync")
        _after(core, "read_snapshot", act)
        (_before if point == "temporary" else _after)(folders, "sync_path", act, is_file)


def _at_store(point: str, act: Act) -> None:
    from shoal.server.coordinator import store_file

    def write_half(path: Path, data: bytes) -> None:
        path.write_bytes(data[: len(data) // 2])
        act()

    if point == "begin":
        _before(store_file.StoreFile, "write", act)
    elif point == "partial":
        _before_with(store_file, "_write_durably", write_half)
    elif point == "rename":
        _before(store_file, "sync_path", act)
    else:
        assert point in ("temporary", "fsync")
        store_file.os = SimpleNamespace(**vars(os))  # type: ignore[attr-defined]
        (_before if point == "temporary" else _after)(store_file.os, "fsync", act)


if __name__ == "__main__":
    program = sys.argv.pop(1)
    arm_program(["-m", program])
    runpy.run_module(program, run_name="__main__", alter_sys=True)
