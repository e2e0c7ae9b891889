"""Servers as threads, and clients of a small model."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from shoal.replica.flat_params import FlatParams
from shoal.runtime.config import RunConfig, TlsConfig
from shoal.runtime.secret import new_secret
from shoal.server.client.client import Client
from shoal.server.consistency import Rule
from shoal.server.messages import Commit
from shoal.server.model.named_optimizer import NamedOptimizer
from shoal.server.process.server import Server
from shoal.server.protocol.endpoint import PLAIN
from shoal.sync.ps.plan import ServedOptions, specs_of
from tests.folders import socket_folder

SECRET = new_secret()
MODEL = 7


class Servers(list[Server]):
    """Their clients are closed before them."""

    stack: ExitStack


@contextmanager
def servers(count: int = 1, tcp: bool = False) -> Iterator[list[Server]]:
    with ExitStack() as stack:
        folder = stack.enter_context(socket_folder())
        addresses = [
            "tcp:127.0.0.1:0" if tcp else f"unix:{folder}/server-{i}.sock" for i in range(count)
        ]
        found = Servers(stack.enter_context(Server(address, SECRET)) for address in addresses)
        found.stack = stack
        yield found


@contextmanager
def launched(
    monkeypatch: pytest.MonkeyPatch, count: int, tcp: bool = False
) -> Iterator[list[Server]]:
    """As if a launcher had started that many servers."""
    with servers(count, tcp) as found:
        monkeypatch.setenv("SHOAL_SERVERS", ",".join(server.address for server in found))
        monkeypatch.setenv("SHOAL_SECRET", SECRET.hex())
        yield found


def flat_of() -> FlatParams:
    torch.manual_seed(0)
    return FlatParams(nn.Linear(3, 5).named_parameters())


def client_of(found: list[Server], rank: int, rule: Rule, **options: Any) -> Client:
    client = client_at([server.address for server in found], rank, rule, **options)
    if isinstance(found, Servers):
        found.stack.callback(client.close)
    return client


def client_at(
    addresses: Sequence[str | Sequence[str]],
    rank: int,
    rule: Rule,
    secret: bytes = SECRET,
    tls: TlsConfig = PLAIN,
    generation: int = 0,
    **options: Any,
) -> Client:
    """Of servers, or of shards that have several copies each."""
    served = ServedOptions(rule, **{"optimizer": NamedOptimizer("SGD", {"lr": 1.0}), **options})
    first = addresses[0] if isinstance(addresses[0], str) else addresses[0][0]
    specs = specs_of(flat_of(), [first] * len(addresses), served)
    return Client(rank, MODEL, addresses, secret, specs, RunConfig(incarnation=generation, tls=tls))


def fill(client: Client, value: float) -> tuple[Commit, Tensor]:
    """Gradients that are `value` everywhere, ready to be committed as the first step."""
    client.out[0].fill_(value)
    client.push(slice(0, client.size))
    heads = torch.ones(1, 1 + client.specs[0].parameters)
    return Commit(0, 0, 1.0), heads


def weights(client: Client, version: int = 0) -> Tensor:
    client.pull(None, version).wait()
    spec = client.specs
    return client.inbox[spec[0].start : spec[-1].stop].clone()
