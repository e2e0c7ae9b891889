from typing import Any

def count_ids(counts: Any, ids: Any, /) -> int: ...
def gather(
    ids: Any,
    places: Any,
    copies: int,
    row_bytes: int,
    target: Any,
    copied: tuple[Any, int, Any] | None,
    owned: tuple[Any, int, Any],
    counts: Any,
    copy_counts: Any,
    /,
) -> int: ...
def locate(
    size: int, height: int, width: int, keys: Any, ids: Any, shards: int, owners: Any, slots: Any, /
) -> int: ...
def route(
    ids: Any,
    places: Any,
    num_rows: int,
    width: int,
    owners: Any,
    hot: Any,
    is_hot: Any,
    turn: int,
    ordered: Any,
    places_in_order: Any,
    counts: Any,
    /,
) -> int: ...
