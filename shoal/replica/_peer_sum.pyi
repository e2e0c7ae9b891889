def add(
    out: int,
    dtype: int,
    pids: int,
    addresses: int,
    runs: int,
    ranks: int,
    me: int,
    count: int,
    start: int,
    stop: int,
    threads: int,
) -> tuple[int, int]: ...
def mix(
    out: int, dtype: int, terms: list[tuple[int, float]], elements: int, threads: int, /
) -> bool: ...
def let_read(pid: int) -> None: ...
def put(address: int, number: int, /) -> None: ...
def next(address: int, /) -> int: ...
def reached(address: int, ranks: int, number: int, ns: int, /) -> bool: ...
