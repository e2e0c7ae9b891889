"""`shoal keys`: what hosts need to trust each other."""

from __future__ import annotations

import hashlib
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from shoal.commands import options
from shoal.commands.output import show as show_parts
from shoal.errors import BadInput, CheckFailed
from shoal.launch.hosts.certificates import HostNames, make_certificates
from shoal.runtime.config import RunConfig, variable_name
from shoal.runtime.secret import fingerprint, make_key_file, mode_warning
from shoal.transport.tcp.tls import own_certificate

app = typer.Typer(help="Keys for runs on several hosts.", no_args_is_help=True)


@app.command()
def new(
    file: Annotated[
        Path | None, typer.Argument(help="Where to write it.", show_default="~/.config/shoal/key")
    ] = None,
) -> None:
    """Make a pre-shared key, which every host of a run has to have."""
    own = RunConfig.from_environment().own_key
    path = file or own
    print(f"{path}: a new key, fingerprint {make_key_file(path)}")
    if path == own:
        print("copy it to the same place on every host, with mode 600; runs find it there")
    else:
        print(f"copy it to every host, with mode 600, and set SHOAL_SECRET_FILE={path} there")


@app.command()
def tls(
    folder: Annotated[Path, typer.Argument(help="Where to write them.", metavar="DIR")],
    host: Annotated[
        list[str],
        typer.Option(
            help="A host, with all names and addresses by which others reach it: "
            "node1,10.0.0.1; repeatable."
        ),
    ],
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
    key, certificate = None, _certificate(config, warnings)
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
