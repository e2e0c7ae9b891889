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
def let_read(pid: int) -> None: ...
