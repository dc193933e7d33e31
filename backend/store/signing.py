"""Ed25519 over the canonical JSON of a command (docs/seams.md section 5)."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey


def new_pair() -> tuple[bytes, bytes]:
    """A fresh (private, public) pair, 32 raw bytes each."""
    private = Ed25519PrivateKey.generate()
    return private.private_bytes_raw(), private.public_key().public_bytes_raw()


def canonical(command: Mapping[str, Any]) -> bytes:
    """The bytes that are signed: sorted keys, no spaces, UTF-8, without ``signature``."""
    rest = {k: v for k, v in command.items() if k != "signature"}
    return json.dumps(rest, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False).encode()


def sign(private: bytes, command: Mapping[str, Any]) -> str:
    """Signature as hex (64 bytes)."""
    return Ed25519PrivateKey.from_private_bytes(private).sign(canonical(command)).hex()


def verify(public: bytes, command: Mapping[str, Any]) -> bool:
    """True when ``command['signature']`` was made over this very command by the pair's private half."""
    try:
        signature = bytes.fromhex(str(command.get("signature", "")))
        Ed25519PublicKey.from_public_bytes(public).verify(signature, canonical(command))
    except (ValueError, InvalidSignature):
        return False
    return True
