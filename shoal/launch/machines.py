"""Hosts that an engine lends: the seam between a run and the lab, Ray, or another engine.

    run_remote ── Machines.hosts(8)            which hosts, and how many workers each takes
               ── Machines.start(host, …)      one agent on each of them (launch/agent.py)
                        │ stdin    what to run, and the secret of the run
                        └ on_line  what the agent reports: output, progress, exits

An engine is a class with these two methods, and a line in `commands/engines.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Protocol


@dataclass(frozen=True)
class Machine:
    """One host that an engine lends."""

    name: str  # as shown in output and errors
    address: str  # by which the others reach it
    slots: int  # workers that it takes at most
    cores: int | None = None  # of which its workers get equal shares; None: all that it has


class MachineProcess(Protocol):
    """One process that was started on a host."""

    def wait(self) -> int:
        """Its exit status, as in Popen: -9 for SIGKILL; after its last line was handed over.

        One thread calls it. A host that is gone counts as -9.
        """
        ...

    def terminate(self) -> None:
        """SIGTERM, on which an agent ends its workers; nothing if it has exited."""
        ...

    def kill(self) -> None:
        """SIGKILL to it and to what it has started, at once."""
        ...


class Machines(Protocol):
    """A block: at its end every process that it started is gone, and what it made is removed."""

    @property
    def is_private(self) -> bool:
        """Whether no other user can read what its hosts send to each other."""
        ...

    def hosts(self, workers: int) -> Sequence[Machine]:
        """Hosts with slots for so many workers, in the order in which ranks are placed.

        BadInput where there are not enough.
        """
        ...

    def start(
        self,
        machine: Machine,
        command: Sequence[str],
        environ: Mapping[str, str],
        given: bytes,
        on_line: Callable[[str], None],
    ) -> MachineProcess:
        """Start a Python program: `command[0]` is the interpreter of this process.

        It reads `given` at its stdin, up to the end. No other user may read those bytes, so they
        do not go through arguments, variables or files that others can open. Every line of its
        stdout and stderr is handed to `on_line`, in order, without its newline, from one thread.
        `environ` are the variables of this process; another computer may have its own instead.
        """
        ...

    def __enter__(self) -> Machines: ...

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None: ...
