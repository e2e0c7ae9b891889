"""Workers of an elastic run as threads that count as processes of several hosts."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from shoal.comm.members.board import Board, GroupMember
from shoal.comm.members.network_board import NetworkBoard, ServedBoard
from shoal.comm.network import HostSpec
from shoal.comm.store.service import StoreService
from tests.elastic import Workers

SECRET = b"k" * 32


@dataclass
class HostWorkers(Workers):
    """`per_host` neighbours share a host. The board is served as a launcher does it."""

    per_host: int = 1
    moved: dict[GroupMember, str] = field(default_factory=dict)  # those that came back elsewhere

    @contextmanager
    def serving(self) -> Iterator[None]:
        service = StoreService("127.0.0.1", 0, SECRET)
        self._port = service.port
        self._served = ServedBoard(service)
        try:
            yield
        finally:
            service.close()

    def note_start(self, member: GroupMember) -> None:
        self._served.note_start(member)

    def note_exit(self, member: GroupMember) -> None:
        self._served.note_exit(member)

    def board(self, member: GroupMember) -> Board:
        return NetworkBoard(("127.0.0.1", self._port), SECRET, member, 1)

    def hosts(self, member: GroupMember) -> HostSpec:
        name = self.moved.get(member, f"host {member.worker // self.per_host}")
        return HostSpec(f"{self.folder} {name}")
