"""Whom a process that listens beyond loopback lets in: one question, asked in one place.

    all ranks on this host       a key of the user's own, which is made where there is none
    a key on every host          strangers are refused by a handshake (runtime/secret.py)
    SHOAL_TRUSTED_NETWORK=1      the user says that there are no strangers; a line repeats it
    neither                      BadInput: nothing listens

Whatever would listen where other hosts reach it asks here before it does.
"""

from __future__ import annotations

import ipaddress
import os
from contextlib import suppress
from functools import cache
from pathlib import Path
from secrets import token_hex

from shoal.errors import BadInput
from shoal.runtime.config import RunConfig
from shoal.runtime.files import own_folder
from shoal.runtime.secret import make_key_file, read_secret_file
from shoal.runtime.wording import say

_HOW = "make a key with `shoal keys new` and copy it to every host"
_OR_TRUST = "set SHOAL_TRUSTED_NETWORK=1 where the network is trusted"
_said: set[str] = set()


def key_of_host(config: RunConfig) -> bytes:
    """Between processes of one host: the key of the run, or one in a file of this user."""
    return config.read_secret() or _own_key(own_folder() / "key")


@cache
def _own_key(path: Path) -> bytes:
    """Of mode 0600; made by the first process that asks."""
    if not path.exists():
        unfinished = path.with_name(f"key-{token_hex(8)}")
        make_key_file(unfinished)
        with suppress(FileExistsError):  # by another process, meanwhile
            os.link(unfinished, path)
        unfinished.unlink()
    return read_secret_file(path)


def require_protected(config: RunConfig, what: str, says: bool = True) -> bytes | None:
    """The key with which `what` refuses strangers; None where the network is trusted instead.

    BadInput where there is neither. `what` begins the sentence: "the rendezvous", for example.
    `says`: print the line of a trusted network, once in this process; for one rank of a run.
    """
    secret = config.read_secret()
    if secret is None:
        require_trusted_network(config, what, says, f"without a key: {_HOW}, or")
    return secret


def require_trusted_network(
    config: RunConfig, what: str, says: bool = True, why: str = "and cannot ask others for a key:"
) -> None:
    """For `what` that listens beyond this host and cannot ask for a key, such as NCCL."""
    if not config.tls.trusted_network:
        raise BadInput(f"{what} would listen beyond this host {why} {_OR_TRUST}")
    sentence = f"{what} lets in every process that reaches it: SHOAL_TRUSTED_NETWORK is 1"
    if says and sentence not in _said:
        _said.add(sentence)
        say(sentence)


def is_loopback(host: str) -> bool:
    """Whether only this host reaches what listens there; a name is not looked up."""
    with suppress(ValueError):
        return ipaddress.ip_address(host).is_loopback
    return host.lower() == "localhost"
