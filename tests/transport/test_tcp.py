"""The transport over TCP, on threads."""

from __future__ import annotations

import pytest
import torch

from shoal.transport.tcp.transport import TcpTransport, is_built
from tests.transport.conformance import Connect, TransportConformance
from tests.transport.tcp import on_tcp

pytestmark = pytest.mark.skipif(not is_built(), reason="the native part is not built")


class TestTcp(TransportConformance):
    @pytest.fixture
    def connect(self) -> Connect:
        return on_tcp


@pytest.mark.parametrize("streams", [1, 4])
def test_large_messages_go_both_ways_at_once_and_are_added_on_arrival(streams: int) -> None:
    def body(transport: TcpTransport) -> torch.Tensor:
        peer = 1 - transport.rank
        data = torch.arange(1 << 20, dtype=torch.float32) + transport.rank
        total = torch.full_like(data, 0.5)
        arrives = transport.recv_reduce(total, peer, 1, "sum")
        sent = transport.send(data, peer, 1)
        arrives.wait()
        sent.wait()
        return total

    for rank, total in enumerate(on_tcp(2, body, streams=streams)):
        assert torch.equal(total, torch.arange(1 << 20, dtype=torch.float32) + 1.5 - rank)
