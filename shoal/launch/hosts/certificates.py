"""Certificates for TLS between hosts: an authority of one's own, and one certificate per host.

    DIR/ca.pem  DIR/ca.key          signs the others; the key stays where it was made
    DIR/NAME.pem  DIR/NAME.key      for host NAME

They are made by the program `openssl`. Keys are on the curve P-256, with mode 0600.
"""

from __future__ import annotations

import ipaddress
import re
import secrets
import shutil
import subprocess
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from shoal.errors import BadInput, ShoalError
from shoal.runtime.files import scratch_folder

_LABEL = r"[A-Za-z0-9_]([A-Za-z0-9_-]{0,61}[A-Za-z0-9_])?"
_NAME = re.compile(rf"{_LABEL}(\.{_LABEL})*")
_CURVE = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes")
_CA_DAYS = "3650"
_HOST_DAYS = "825"
_SECONDS = 60
_CA_EXTENSIONS = """
basicConstraints = critical, CA:TRUE, pathlen:0
keyUsage = critical, keyCertSign, cRLSign
subjectKeyIdentifier = hash
"""
_HOST_EXTENSIONS = """
basicConstraints = critical, CA:FALSE
keyUsage = critical, digitalSignature
extendedKeyUsage = serverAuth, clientAuth
subjectKeyIdentifier = hash
authorityKeyIdentifier = keyid
"""


@dataclass(frozen=True)
class HostNames:
    """One host: the name of its files, and all names and addresses by which it is reached."""

    names: tuple[str, ...]

    @classmethod
    def parse(cls, text: str) -> HostNames:
        """From "node1" or "node1,10.0.0.1"; BadInput names a bad one."""
        names = tuple(text.split(","))
        for name in names:
            if not _is_address(name) and (len(name) > 253 or _NAME.fullmatch(name) is None):
                raise BadInput(f"{name!r} is not the name or address of a host")
        if names[0] == "ca":
            raise BadInput("'ca' names the files of the authority: give the host another name")
        return cls(names)

    def certificate(self, folder: Path) -> Path:
        return folder / f"{self.names[0].replace(':', '_')}.pem"

    def key(self, folder: Path) -> Path:
        return self.certificate(folder).with_suffix(".key")


def _is_address(name: str) -> bool:
    with suppress(ValueError):
        ipaddress.ip_address(name)
        return True
    return False


def make_certificates(folder: Path, hosts: list[HostNames]) -> bool:
    """Write them; whether an authority was made as well: one that is there signs further hosts."""
    if shutil.which("openssl") is None:
        raise BadInput("certificates are made by the program openssl, which is not installed here")
    try:
        _check_free(folder, hosts)
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise BadInput(f"cannot make the folder {folder}: {error.strerror}") from error
    certificate, key = authority = folder / "ca.pem", folder / "ca.key"
    is_new = not key.exists()
    with scratch_folder("keys") as work:
        if is_new:
            name = f"/CN=Shoal authority {secrets.token_hex(4)}"
            how = ("-days", _CA_DAYS, "-subj", name, "-extensions", "extensions")
            files = ("-config", _config(work, _CA_EXTENSIONS), "-keyout", key, "-out", certificate)
            _openssl("req", "-x509", *_CURVE, *how, *files)
        for host in hosts:
            _make_host(authority, work, host, folder)
    return is_new


def _check_free(folder: Path, hosts: list[HostNames]) -> None:
    paths = [path for host in hosts for path in (host.certificate(folder), host.key(folder))]
    for path in paths:
        if path.exists():
            raise BadInput(f"{path} is there already: remove it first, or name another folder")
        if paths.count(path) > 1:
            raise BadInput(f"two hosts are named {path.stem}: give each another name first")
    certificate, key = folder / "ca.pem", folder / "ca.key"
    if certificate.exists() != key.exists():
        there, missing = (certificate, key) if certificate.exists() else (key, certificate)
        raise BadInput(f"{there} is there without {missing}: bring it, or name another folder")


def _make_host(authority: tuple[Path, Path], work: Path, host: HostNames, folder: Path) -> None:
    certificate, key, request = work / "host.pem", work / "host.key", work / "request"
    names = ",".join(f"{'IP' if _is_address(name) else 'DNS'}:{name}" for name in host.names)
    config = _config(work, f"{_HOST_EXTENSIONS}subjectAltName = {names}\n")
    subject = ("-subj", f"/CN={host.names[0][:64]}", "-config", config)
    _openssl("req", "-new", *_CURVE, *subject, "-keyout", key, "-out", request)
    serial = f"0x{secrets.token_hex(16)}"
    signer = ("-CA", authority[0], "-CAkey", authority[1], "-set_serial", serial)
    how = ("-days", _HOST_DAYS, "-extfile", config, "-extensions", "extensions")
    _openssl("x509", "-req", "-in", request, *signer, *how, "-out", certificate)
    shutil.move(key, host.key(folder))
    shutil.move(certificate, host.certificate(folder))


def _config(work: Path, extensions: str) -> Path:
    """Its own, so that what the system's openssl.cnf adds does not count."""
    file = work / "config"
    head = "[req]\ndistinguished_name = name\nprompt = no\n[name]\n[extensions]"
    file.write_text(head + extensions)
    return file


def _openssl(*words: str | Path) -> None:
    done = subprocess.run(
        ["openssl", *words], capture_output=True, text=True, timeout=_SECONDS, umask=0o077
    )
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["no reason"])[-1]
        raise ShoalError(f"openssl {words[0]} failed: {last}")
