"""When workers, servers and hosts of a rehearsal are lost: at a step, at a moment, or by chance.

--kill 2@50, server:1@50        when a worker begins step 50, as in a run (`runtime/faults.py`)
--kill 2@90s, host:0@5min       at a moment of virtual time
--mtbf 8h                       the hosts, by chance: a Poisson process of the seed
--events FILE                   [[event]] tables: at = "90s", what = "kill", who = "host:0"
"""

from __future__ import annotations

import math
import random
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal, NamedTuple

import msgspec

from shoal.cluster.toml_file import tables_of
from shoal.cluster.units import parse_seconds
from shoal.errors import BadInput
from shoal.rehearse.virtual_time import VirtualTime
from shoal.runtime.files import read_bounded
from shoal.runtime.wording import counted

_MOST_SAID = 200  # of what is wrong with a file
_AT_A_STEP = re.compile(r"(?:server:)?[0-9]{1,6}@[0-9]{1,12}")
_AT_A_MOMENT = re.compile(r"(?:(server|host):)?([0-9]{1,6})@([^@]*[a-zµμ])")


class Loss(NamedTuple):
    at_s: float
    role: str  # worker, server, or host: all processes of it
    number: int


class _Event(msgspec.Struct, forbid_unknown_fields=True):
    at: str
    who: str
    what: Literal["kill"] = "kill"


class _Events(msgspec.Struct, forbid_unknown_fields=True):
    event: list[_Event]


@dataclass(frozen=True)
class Losses:
    """What a rehearsal loses, and when what was lost is back."""

    at_steps: tuple[str, ...] = ()  # as `shoal run --kill` takes them
    at_moments: tuple[Loss, ...] = ()
    mtbf_s: float | None = None  # between failures of any host of the run
    restarts: int | None = None  # of workers, in all; None: of copies of servers alone
    restart_s: float = 0.0  # from the loss of a process to the start of the next

    def __bool__(self) -> bool:
        return bool(self.at_steps or self.at_moments or self.mtbf_s or self.restarts)

    def check(self, **counts: int) -> None:
        """BadInput where one is named that is not there, of so many workers, servers or hosts."""
        for _, role, number in self.at_moments:
            if number >= counts.get(f"{role}s", math.inf):
                there = counted(counts[f"{role}s"], role)
                raise BadInput(f"there is no {role} {number} to be lost: the run has {there}")

    def begin(self, time: VirtualTime, lose: Callable[[Loss], None], hosts: int, seed: int) -> None:
        """From now on call `lose` at the moments of losses."""
        for loss in self.at_moments:
            time.at(loss.at_s, partial(lose, loss))
        if self.mtbf_s is None:
            return
        chance = random.Random(f"losses {seed}")
        rate = 1 / self.mtbf_s

        def fail() -> None:
            lose(Loss(time.now_s, "host", chance.randrange(hosts)))
            time.at(time.now_s + chance.expovariate(rate), fail)

        time.at(chance.expovariate(rate), fail)


def read_losses(
    kill: Sequence[str],
    mtbf: str | None,
    events: Path | None,
    restarts: int | None = None,
    restart_time: str = "10s",
) -> Losses:
    """From the options of a command."""
    moments = [text for text in kill if _AT_A_MOMENT.fullmatch(text)]
    at_steps = tuple(text for text in kill if text not in moments)
    for text in at_steps:
        if not _AT_A_STEP.fullmatch(text):
            raise BadInput(
                "--kill takes 2@50 or server:1@50, at a step, and 2@90s, server:1@90s or "
                f"host:0@5min, not {text[:40]!r}"
            )
    mtbf_s = None if mtbf is None else parse_seconds(mtbf)
    if mtbf_s == 0:
        raise BadInput("--mtbf takes the mean time between failures, such as 8h, not 0")
    found = [*map(_loss_of, moments), *(() if events is None else _events_of(events))]
    return Losses(at_steps, tuple(found), mtbf_s, restarts, parse_seconds(restart_time))


def _events_of(file: Path) -> list[Loss]:
    try:
        tables = tables_of(read_bounded(file, 1 << 20).decode(), "it")
        found = msgspec.convert(tables, _Events).event
        return [_loss_of(f"{event.who}@{event.at}") for event in found]
    except UnicodeDecodeError as error:
        raise BadInput(f"{file}: byte {error.start} is not UTF-8") from error
    except (msgspec.ValidationError, BadInput) as error:
        form = 'it takes tables [[event]] with at = "90s", who = "host:0" and what = "kill"'
        raise BadInput(f"{file}: {form}: {str(error)[:_MOST_SAID]}") from error


def _loss_of(text: str) -> Loss:
    match = _AT_A_MOMENT.fullmatch(text)
    if match is None:
        raise BadInput(f"a loss is of 2, server:1 or host:0, at 90s, not {text[:40]!r}")
    return Loss(parse_seconds(match[3]), match[1] or "worker", int(match[2]))
