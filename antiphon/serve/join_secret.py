"""The secret that workers of other machines share with the engine. Read from a file or the environment, never from the
command line, which everybody on the machine can see."""

import hashlib
import hmac
import os
from pathlib import Path

from antiphon.base.errors import UserError

VARIABLE = "ANTIPHON_JOIN_SECRET"
MIN_BYTES = 16


def exchange_secret(join_secret: bytes) -> bytes:
    """The secret of the exchange between workers, made from the one that all machines have."""
    return hmac.digest(join_secret, b"antiphon exchange", hashlib.sha256)


def read_join_secret(path: Path | None) -> bytes:
    """The file's content without white space around it, else the variable's. `UserError` if neither is there."""
    if path is not None:
        try:
            secret = path.read_bytes().strip()
        except OSError as error:
            raise UserError(f"--secret-file {path}: {error.strerror}") from error
    else:
        secret = os.environ.get(VARIABLE, "").strip().encode()
        if not secret:
            raise UserError(
                f"no secret to join with: give --secret-file FILE or set {VARIABLE} (for example the output of "
                "'openssl rand -hex 32'), the same for the engine and all workers"
            )
    if len(secret) < MIN_BYTES:
        raise UserError(f"the secret has {len(secret)} bytes: it must have at least {MIN_BYTES}")
    return secret
