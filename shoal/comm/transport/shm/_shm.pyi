from typing import Any

from torch import Tensor

Segment = Any

def create(size: int, slot_bytes: int, ring_bytes: int, generation: int, /) -> int: ...
def attach(fd: int, rank: int, size: int, generation: int, /) -> Segment: ...
def watch(group: Segment, /) -> int: ...
def pidfd(group: Segment, rank: int, /) -> int: ...
def collective(
    group: Segment,
    kind: int,
    data: int,
    out: int,
    count: int,
    dtype: int,
    op: int,
    root: int,
    table: int,
    timeout_ns: int,
    /,
) -> int: ...
def start(
    group: Segment,
    kind: int,
    data: int,
    out: int,
    count: int,
    dtype: int,
    op: int,
    root: int,
    table: int,
    /,
) -> bool: ...
def finish(group: Segment, timeout_ns: int, /) -> int: ...

class LightWork: ...

def lane(
    segment: Any,
    handle: Segment,
    queue: Any,
    waiting: Any,
    is_locked: Any,
    codes: dict[Any, int],
    work: type[LightWork],
    fallback: Any,
    /,
) -> Any: ...
def failure(group: Segment, /) -> tuple[int, int, int, int, int]: ...
def waiting(group: Segment, /) -> tuple[int, list[int]] | None: ...
def pid(group: Segment, rank: int, /) -> int: ...
def history(group: Segment, rank: int, /) -> list[tuple[int, ...]]: ...
def tune(group: Segment, direct_bytes: int, spins: int, /) -> int: ...
def post(
    group: Segment, is_send: int, data: Tensor, num_bytes: int, peer: int, tag: int, /
) -> int: ...  # `data` is kept until the operation is forgotten
def state(group: Segment, op: int, /) -> int: ...
def wait(group: Segment, op: int, timeout_ns: int, /) -> tuple[int, int, int]: ...
def forget(group: Segment, op: int, /) -> int: ...
def withdraw(group: Segment, op: int, /) -> bool: ...
def serve(group: Segment, /) -> int: ...
def stop(group: Segment, /) -> int: ...
def leave(group: Segment, /) -> int: ...
def detach(group: Segment, /) -> int: ...
def copy_rows(
    source: int,
    source_rows: int,
    target: int,
    target_rows: int,
    row_bytes: int,
    origins: int,
    places: int,
    count: int,
    /,
) -> int: ...
def take_rows(
    index: Any, low: int, ids: Any, rows: Any, target: Any, places: Any, row_bytes: int, /
) -> int: ...
