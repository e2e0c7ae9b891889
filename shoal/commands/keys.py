"""`shoal keys`: what hosts need to trust each other. Certificates are made by `openssl`.

DIR/ca.pem  DIR/ca.key          signs the others; the key stays where it was made
DIR/NAME.pem  DIR/NAME.key      for host NAME, on the curve P-256, with mode 0600
"""

from __future__ import annotations

import hashlib
import ipaddress
import re
import secrets
import shutil
import subprocess
import sys
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import typer

from shoal.comm.transport.tcp.tls import own_certificate
from shoal.commands import options
from shoal.commands.options import argument, option
from shoal.commands.output import show as show_parts
from shoal.errors import BadInput, CheckFailed, ShoalError
from shoal.runtime.config import RunConfig, variable_name
from shoal.runtime.files import scratch_folder
from shoal.runtime.secret import fingerprint, make_key_file, mode_warning

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
            _openssl(
                "req",
                "-x509",
                *_CURVE,
                "-days",
                _CA_DAYS,
                "-subj",
                name,
                "-extensions",
                "extensions",
                "-config",
                _config(work, _CA_EXTENSIONS),
                "-keyout",
                key,
                "-out",
                certificate,
            )
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
    certificate = folder / "ca.pem"
    key = folder / "ca.key"
    if certificate.exists() != key.exists():
        there, missing = (certificate, key) if certificate.exists() else (key, certificate)
        raise BadInput(f"{there} is there without {missing}: bring it, or name another folder")


def _make_host(authority: tuple[Path, Path], work: Path, host: HostNames, folder: Path) -> None:
    certificate = work / "host.pem"
    key = work / "host.key"
    request = work / "request"
    names = ",".join(f"{'IP' if _is_address(name) else 'DNS'}:{name}" for name in host.names)
    config = _config(work, f"{_HOST_EXTENSIONS}subjectAltName = {names}\n")
    _openssl(
        "req",
        "-new",
        *_CURVE,
        "-subj",
        f"/CN={host.names[0][:64]}",
        "-config",
        config,
        "-keyout",
        key,
        "-out",
        request,
    )
    serial = f"0x{secrets.token_hex(16)}"
    _openssl(
        "x509",
        "-req",
        "-in",
        request,
        "-CA",
        authority[0],
        "-CAkey",
        authority[1],
        "-set_serial",
        serial,
        "-days",
        _HOST_DAYS,
        "-extfile",
        config,
        "-extensions",
        "extensions",
        "-out",
        certificate,
    )
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


app = typer.Typer(help="Keys for runs on several hosts.", no_args_is_help=True)


@app.command()
def new(
    file: Path | None = argument("Where to write it.", show_default="~/.config/shoal/key"),
) -> None:
    """Make a pre-shared key, which every host of a run has to have."""
    own = RunConfig.from_environment().own_key
    path = file or own
    lines = [f"{path}: a new key, fingerprint {make_key_file(path)}"]
    if path == own:
        lines.append("copy it to the same place on every host, with mode 600; runs find it there")
    else:
        where = f"set SHOAL_SECRET_FILE={path} there"
        lines.append(f"copy it to every host, with mode 600, and {where}")
    show_parts(None, lines, as_json=False)


@app.command()
def tls(
    folder: Path = argument("Where to write them.", ..., metavar="DIR"),
    host: list[str] = option(
        "A host, with all names and addresses by which others reach it: "
        "node1,10.0.0.1; repeatable.",
        ...,
    ),
) -> None:
    """Make an authority, or use the one in DIR, and a certificate for each host."""
    hosts = [HostNames.parse(text) for text in host]
    is_new = make_certificates(folder, hosts)
    if is_new:
        print(f"{folder / 'ca.pem'}: the authority; keep {folder / 'ca.key'} on this host only")
    print("on each host, beside the key of `shoal keys new`:")
    for names in hosts:
        print(
            f"  {names.names[0]}: SHOAL_TLS_CA={folder / 'ca.pem'} "
            f"SHOAL_TLS_CERT={names.certificate(folder)} SHOAL_TLS_KEY={names.key(folder)}"
        )


@app.command()
def show(as_json: options.Json = False) -> None:
    """Show which key and certificate runs of this user find here, never the key itself."""
    config = RunConfig.from_environment()
    file = config.secret_file or (config.own_key if config.own_key.exists() else None)
    if config.secret is not None:  # not in the directory of a run, which is that run's own
        file = None
    source = str(file or config.own_key) if config.secret is None else variable_name("secret")
    warnings = [] if file is None else [mode_warning(file)]
    key = None
    certificate = _certificate(config, warnings)
    said = [warning for warning in warnings if warning]
    try:
        secret = config.read_secret()
        if secret is not None:
            key = {"from": source, "fingerprint": fingerprint(secret)}
    except BadInput as error:
        said = said or [str(error)]
    lines = [f"key: none that can be used; `shoal keys new` writes {config.own_key}"]
    if key is not None:
        lines = [f"key: {key['from']}, fingerprint {key['fingerprint']}"]
    if certificate is not None:
        lines.append(f"certificate: {certificate['from']}, SHA-256 {certificate['sha256']}")
    if config.tls.trusted_network:
        lines.append("SHOAL_TRUSTED_NETWORK is 1: what has no key is open to the network")
    show_parts({"key": key, "certificate": certificate, "warnings": said}, lines, as_json)
    sys.stdout.flush()
    if said:
        raise CheckFailed("; ".join(said))


def _certificate(config: RunConfig, warnings: list[str | None]) -> dict[str, Any] | None:
    tls = config.tls
    if not tls.certificate:
        return None
    if tls.key:
        warnings.append(mode_warning(Path(tls.key)))
    try:
        der = own_certificate(tls)
    except (OSError, ValueError) as error:
        raise BadInput(f"SHOAL_TLS_CERT {tls.certificate} holds no certificate: {error}") from error
    return {"from": tls.certificate, "sha256": hashlib.sha256(der).hexdigest()}
