"""Every exception that Shoal raises. Messages are one sentence for the user of the job.

The command line prints the sentence. It exits with 2 for BadInput, a mistake in the input or in the
script, and with 1 for everything else.
"""

from __future__ import annotations

import re

_LOST_PEER = re.compile(  # in errors of Gloo, NCCL and the stores of torch.distributed
    r"(connection|socket) (was likely |was )?(closed|reset|refused|aborted)|broken pipe"
    r"|connection (timed out|timeout)|timed out waiting|got 0 bytes|application timeout"
    r"|remote process exited|ncclRemoteError|lost (a peer|rank \d+)",
    re.IGNORECASE,
)


class ShoalError(Exception):
    """The base class of all exceptions that Shoal raises."""


class BadInput(ShoalError):
    """The input of the user is wrong; nothing has been changed."""


class StrategyError(BadInput):
    """A strategy does not parse, or its terms, workers or devices do not fit together."""


class NotBuilt(BadInput):
    """A strategy or option is in the notation and has no runtime yet."""


class CheckpointError(BadInput):
    """A checkpoint is missing, damaged or of another model."""


class CheckFailed(ShoalError):
    """A check ran and failed: a verification, a proof."""


class RunOver(ShoalError):
    """A worker came when the others had finished: there is nothing left to do."""

    def __init__(self, rank: int):
        self.rank = rank
        super().__init__(f"worker {rank} came after the others had finished")


class PeerLost(ShoalError, RuntimeError):
    """Another rank exited, or did not respond, in the middle of an operation.

    Also a RuntimeError, as failures of torch.distributed are. `peer` is None where it is not
    known. `exit_status` of the peer, where it is known, is as in Popen: -9 for SIGKILL.
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


ALSO = (
    "also job.save, where rank 0 writes, job.load and job.evaluate: none of them is only for `if "
    "job.rank == 0`"
)


class Desync(BadInput, RuntimeError):
    """Two ranks called different operations where all ranks must call the same one."""

    def __init__(self, rank: int, call: str, peer: int, peer_call: str):
        self.rank = rank
        self.call = call
        self.peer = peer
        self.peer_call = peer_call
        called = f"rank {rank} called {call} while rank {peer} called {peer_call}"
        super().__init__(
            f"{called}: all ranks have to make the same calls in the same order, {ALSO}"
        )


def tells_of_lost_peer(text: str) -> bool:
    """Whether the message of another library means that a connection to a rank broke."""
    return _LOST_PEER.search(text) is not None


class WorkersFailed(ShoalError):
    """At least one worker failed; `rank` is the first one that did.

    `report` has its rank, its exit status and its traceback. `is_loss`: it was killed, or has
    lost its peers; no error of its own code.
    """

    def __init__(self, rank: int, exit_status: int, report: str, is_loss: bool = False):
        self.is_loss = is_loss
        self.rank = rank
        self.exit_status = exit_status
        self.report = report
        super().__init__(report)


class ServerFailed(ShoalError):
    """A server process exited while workers needed it; `is_loss`: it was killed."""

    def __init__(self, server: int, how: str, is_loss: bool = False):
        self.is_loss = is_loss
        self.server = server
        super().__init__(f"server {server} {how}")


class ShardLost(ServerFailed):
    """No server has the state of a shard any more; `server` is the last one that was lost."""

    def __init__(self, server: int, sentence: str):
        self.is_loss = True
        self.server = server
        ShoalError.__init__(self, sentence)


class StopTraining(BaseException):
    """Raised to end the training function after the requested steps; it is not an error."""
