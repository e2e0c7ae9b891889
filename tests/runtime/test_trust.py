"""Whom a process that listens beyond loopback lets in."""

from __future__ import annotations

from pathlib import Path

import pytest

from shoal.errors import BadInput
from shoal.runtime.config import RunConfig
from shoal.runtime.secret import new_secret
from shoal.runtime.trust import require_protected, require_trusted_network


def config(tmp_path: Path, **variables: str) -> RunConfig:
    return RunConfig.from_environment({"XDG_CONFIG_HOME": str(tmp_path), **variables})


def test_without_a_key_nothing_listens_beyond_this_host(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match=r"the store would listen .* `shoal keys new`"):
        require_protected(config(tmp_path), "the store")


def test_the_key_of_this_user_is_found_without_a_variable(tmp_path: Path) -> None:
    secret = new_secret()
    file = tmp_path / "shoal" / "key"
    file.parent.mkdir()
    file.write_text(secret.hex())
    file.chmod(0o644)
    with pytest.raises(BadInput, match="chmod 600"):
        require_protected(config(tmp_path), "the store")
    file.chmod(0o600)
    assert require_protected(config(tmp_path), "the store") == secret
    other = new_secret()
    assert require_protected(config(tmp_path, SHOAL_SECRET=other.hex()), "the store") == other


def test_a_trusted_network_needs_no_key_and_is_said_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trusted = config(tmp_path, SHOAL_TRUSTED_NETWORK="1")
    what = f"the store of {tmp_path}"
    for _ in range(2):
        assert require_protected(trusted, what) is None
    assert capsys.readouterr().err == (
        f"shoal: {what} lets in every process that reaches it: SHOAL_TRUSTED_NETWORK is 1\n"
    )


def test_a_key_does_not_protect_what_cannot_ask_for_it(tmp_path: Path) -> None:
    keyed = config(tmp_path, SHOAL_SECRET=new_secret().hex())
    with pytest.raises(BadInput, match=r"NCCL .* cannot ask"):
        require_trusted_network(keyed, "NCCL")
    require_trusted_network(config(tmp_path, SHOAL_TRUSTED_NETWORK="1"), "NCCL", says=False)
