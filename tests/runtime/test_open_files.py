"""The limit of open files, where many ranks are connected."""

from __future__ import annotations

import resource

import pytest

from shoal.errors import BadInput
from shoal.transport.tcp.connect import require_open_files


def test_the_soft_limit_is_raised_and_the_hard_one_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    raised: list[tuple[int, int]] = []
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (1024, 4096))
    monkeypatch.setattr(resource, "setrlimit", lambda kind, limits: raised.append(limits))
    require_open_files(400)
    assert not raised
    require_open_files(1020)
    assert raised == [(1532, 4096)]
    with pytest.raises(BadInput, match=r"may have 4096: .* ulimit -n 4592"):
        require_open_files(4080)
