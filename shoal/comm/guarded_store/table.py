"""What a store holds: keys with values, and logs to which ranks append."""

from __future__ import annotations

from shoal.comm.guarded_store.session import AT_THE_END, StoreReply, StoreRequest

_MAX_READ_BYTES = 1 << 20  # in one reply, unless one entry has more


class StoreTable:
    """The keys and values; without sockets."""

    def __init__(self) -> None:
        self._values: dict[str, bytes] = {}
        self._logs: dict[str, list[bytes]] = {}

    def answer(self, request: StoreRequest) -> StoreReply | None:
        """None as long as a key is not there that the request waits for."""
        keys = request.keys
        if request.operation == "count":
            return StoreReply(number=len(self._values))
        if request.operation == "check":
            return StoreReply(number=int(all(key in self._values for key in keys)))
        if request.operation == "wait":
            return StoreReply() if all(key in self._values for key in keys) else None
        if len(keys) != 1:
            return StoreReply(refusal=f"{request.operation} takes one key, not {len(keys)}")
        return self._of_one(request, keys[0])

    def _of_one(self, request: StoreRequest, key: str) -> StoreReply | None:
        if request.operation == "append":
            return self._append(key, request)
        if request.operation == "read":
            return self._read(key, request.number)
        if request.operation == "get":
            return StoreReply(self._values[key]) if key in self._values else None
        if request.operation == "delete":
            return StoreReply(number=int(self._values.pop(key, None) is not None))
        if request.operation == "add":
            return self._add(key, request.number)
        if request.operation == "compare_set":
            return self._compare_set(key, request.expected, request.value)
        self._values[key] = request.value
        return StoreReply()

    def _add(self, key: str, number: int) -> StoreReply:
        text = self._values.get(key, b"0")
        try:
            total = int(text) + number
        except ValueError:
            return StoreReply(refusal=f"{key!r} is not a counter")
        self._values[key] = b"%d" % total
        return StoreReply(number=total)

    def _compare_set(self, key: str, expected: bytes, desired: bytes) -> StoreReply:
        """As TCPStore: a key that is not there is set where nothing is expected."""
        now = self._values.get(key)
        if now is None and expected:
            return StoreReply(expected)
        if now is None or now == expected:
            self._values[key] = desired
        return StoreReply(self._values[key])

    def _append(self, key: str, request: StoreRequest) -> StoreReply:
        """-1 where the log has another length than the one who appends has seen."""
        log = self._logs.setdefault(key, [])
        if request.number not in (AT_THE_END, len(log)):
            return StoreReply(number=-1)
        log.append(request.value)
        return StoreReply(number=len(log))

    def _read(self, key: str, start: int) -> StoreReply | None:
        """What comes at `start` and after it, as much as one reply takes; `number`: read next."""
        log = self._logs.get(key, [])
        if start < 0 or start >= len(log):
            return None if start == len(log) else StoreReply(refusal=f"{key!r} is shorter")
        end, num_bytes = start, 0
        while end < len(log) and (end == start or num_bytes + len(log[end]) <= _MAX_READ_BYTES):
            num_bytes += len(log[end])
            end += 1
        return StoreReply(values=log[start:end], number=end)
