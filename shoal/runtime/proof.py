"""Proofs that one knows the secret of a run, which itself never travels."""

from __future__ import annotations

import hashlib
import hmac
import secrets

NONCE_BYTES = 32


def fresh_nonce() -> bytes:
    return secrets.token_bytes(NONCE_BYTES)


def proof(secret: bytes, side: str, *claims: bytes) -> bytes:
    """HMAC of `claims`, each with its length, under the name of one side."""
    code = hmac.new(secret, side.encode(), hashlib.sha256)
    for claim in claims:
        code.update(len(claim).to_bytes(8, "little") + claim)
    return code.digest()


def is_proof(given: bytes, secret: bytes, side: str, *claims: bytes) -> bool:
    return hmac.compare_digest(given, proof(secret, side, *claims))
