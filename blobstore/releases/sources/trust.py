"""Signatures: ECDSA on P-256 with SHA-256, in cosign's formats.

A signature is the base64 text that `cosign sign-blob` writes, of the bytes of an index. A public key is PEM, as in
cosign.pub. A private key is PKCS#8 in PEM, with or without a password, or cosign.key, which needs PyNaCl.
Format: https://github.com/sigstore/cosign/blob/main/specs/SIGNATURE_SPEC.md
"""

from __future__ import annotations

import base64
import binascii
import json
import os
import re
from pathlib import Path
from typing import Any

from blobstore.core.errors import ReleaseError, TrustError
from blobstore.core.memory.mapped_file import as_path
from blobstore.core.requirements import needed
from blobstore.releases.sources.source import read_small

with needed("signatures need cryptography", "releases"):
    from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
    from cryptography.hazmat.primitives import hashes
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.hazmat.primitives.kdf.scrypt import Scrypt
    from cryptography.hazmat.primitives.serialization import (
        load_der_private_key,
        load_pem_private_key,
        load_pem_public_key,
    )

__all__ = ["check_signature", "sign"]

_PASSWORD = "COSIGN_PASSWORD"  # noqa: S105 - the name of the variable that cosign reads
_COSIGN = re.compile(rb"-----BEGIN ENCRYPTED (?:COSIGN|SIGSTORE) PRIVATE KEY-----\s+([A-Za-z0-9+/=\s]+)-----END ")


def sign(data: bytes, key: str | os.PathLike[str]) -> str:
    """Sign an index.

    Args:
        data: its bytes.
        key: the file of a private key; its password is in `$COSIGN_PASSWORD`.

    Returns:
        The signature, base64.

    Raises:
        FileAccessError: the file cannot be read.
        ReleaseError: it has no such key, or the password is wrong.
    """
    path = as_path(key)
    private = _private_key(path)
    if not isinstance(private, ec.EllipticCurvePrivateKey) or not isinstance(private.curve, ec.SECP256R1):
        raise ReleaseError(f"{path}: expected an ECDSA key on P-256, as cosign makes them")
    return base64.b64encode(private.sign(data, ec.ECDSA(hashes.SHA256()))).decode()


def _private_key(path: Path) -> Any:
    text = read_small(path, 1 << 16)
    password = os.environ.get(_PASSWORD, "").encode()
    try:
        if (match := _COSIGN.search(text)) is not None:
            return load_der_private_key(_decrypted(base64.b64decode(match[1]), password), None)
        encrypted = b"ENCRYPTED PRIVATE KEY" in text
        return load_pem_private_key(text, password if encrypted else None)
    except (ValueError, TypeError, KeyError, binascii.Error, UnsupportedAlgorithm, MemoryError) as error:
        raise ReleaseError(f"{path}: not a private key, or ${_PASSWORD} is not its password: {error}") from None


def _decrypted(box: bytes, password: bytes) -> bytes:
    """The key in a cosign.key: JSON with scrypt's parameters and a secret box of NaCl."""
    with needed("an encrypted cosign.key needs PyNaCl", "releases"):
        from nacl.exceptions import CryptoError
        from nacl.secret import SecretBox
    content = json.loads(box)
    kdf, cipher = content["kdf"], content["cipher"]
    if kdf["name"] != "scrypt" or cipher["name"] != "nacl/secretbox":
        raise ValueError(f"unknown encryption {kdf['name']!r} and {cipher['name']!r}")
    numbers = kdf["params"]
    secret = Scrypt(base64.b64decode(kdf["salt"]), 32, numbers["N"], numbers["r"], numbers["p"]).derive(password)
    try:
        return bytes(
            SecretBox(secret).decrypt(base64.b64decode(content["ciphertext"]), base64.b64decode(cipher["nonce"]))
        )
    except CryptoError:
        raise ValueError("the password is wrong") from None


def check_signature(data: bytes, signature: str | None, key: str | os.PathLike[str], what: str) -> None:
    """Raise TrustError unless the signature of an index is by this key.

    Args:
        data: the bytes of the index.
        signature: base64; None if there is none.
        key: the file of a public key.
        what: the release, for messages.

    Raises:
        TrustError: it is not signed, or by another key.
        FileAccessError, ReleaseError: the file of the key cannot be read, or has no such key.
    """
    path = as_path(key)
    try:
        public = load_pem_public_key(read_small(path, 1 << 16))
    except (ValueError, UnsupportedAlgorithm) as error:
        raise ReleaseError(f"{path}: not a public key in PEM: {error}") from None
    if not isinstance(public, ec.EllipticCurvePublicKey) or not isinstance(public.curve, ec.SECP256R1):
        raise ReleaseError(f"{path}: expected an ECDSA key on P-256, as cosign makes them")
    if signature is None:
        raise TrustError(f"{what}: the release is not signed, and a signature by {path} is asked for")
    try:
        public.verify(base64.b64decode(signature.strip(), validate=True), data, ec.ECDSA(hashes.SHA256()))
    except (InvalidSignature, ValueError):
        raise TrustError(f"{what}: the release is not signed by {path}") from None
