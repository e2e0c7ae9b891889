"""What Shoal raises. Every message is one sentence for the person who runs the job.

`BadInput` is a mistake that can be told before or without training: the command line prints
its sentence and exits with 2. Everything else that fails exits with 1.
"""

from __future__ import annotations

import re

_LOST_PEER = re.compile(  # as Gloo, NCCL and the stores of torch.distributed say it
    r"(connection|socket) (was likely |was )?(closed|reset|refused|aborted)|broken pipe"
    r"|connection (timed out|timeout)|timed out waiting|got 0 bytes|application timeout"
    r"|remote process exited|ncclRemoteError|lost (a peer|rank \d+)",
    re.IGNORECASE,
)


class ShoalError(Exception):
    """The base of all errors that Shoal raises on purpose."""


class BadInput(ShoalError):
    """What was asked for cannot be done; nothing has been changed."""


class StrategyError(BadInput):
    """A strategy that does not parse, or a combination that makes no sense."""


class NotBuilt(BadInput):
    """A strategy or option that is named in the notation but has no runtime yet."""


class CheckpointError(BadInput):
    """A checkpoint that is missing, damaged or of another model."""


class CheckFailed(ShoalError):
    """A check ran and its answer is no: a verification, a proof."""


class PeerLost(ShoalError, RuntimeError):
    """Another rank went away or fell silent in the middle of an operation.

    A RuntimeError too, as torch.distributed's own failures are. `exit_status` is the peer's, where
    it is known: that of Popen.returncode, so -9 for SIGKILL.
    """

    def __init__(
        self,
        rank: int,
        peer: int | None,
        doing: str,
        after_s: float | None = None,
        exit_status: int | None = None,
    ):
        self.rank = rank
        self.peer = peer
        self.doing = doing
        self.after_s = after_s
        self.exit_status = exit_status
        who = "a peer" if peer is None else f"rank {peer}"
        when = "" if after_s is None else f" after {after_s:g} s"
        super().__init__(
            f"rank {rank} lost {who}{when} in {doing}: see that rank's output for the cause"
        )


class Desync(ShoalError, RuntimeError):
    """Two ranks called different operations where all must call the same."""

    def __init__(self, rank: int, call: str, peer: int, peer_call: str):
        self.rank = rank
        self.call = call
        self.peer = peer
        self.peer_call = peer_call
        super().__init__(
            f"rank {rank} called {call} while rank {peer} called {peer_call}: all ranks of a group "
            "must call the same operations in the same order"
        )


def tells_of_lost_peer(text: str) -> bool:
    """Whether the message of a foreign error means that a connection to another rank broke."""
    return _LOST_PEER.search(text) is not None


class WorkersFailed(ShoalError):
    """At least one worker process ended badly; `rank` is the first one that did.

    `report` names it and tells how it ended.
    """

    def __init__(self, rank: int, exit_status: int, report: str):
        self.rank = rank
        self.exit_status = exit_status
        self.report = report
        super().__init__(report)


class ServerFailed(ShoalError):
    """A server process ended while workers needed it."""

    def __init__(self, server: int, how: str):
        self.server = server
        super().__init__(f"server {server} {how}")
