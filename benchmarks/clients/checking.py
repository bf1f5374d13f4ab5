"""What the small programs share. It lies beside them, so that any environment's Python finds it."""

from pydantic import BaseModel


class Verdict(BaseModel):
    """An opinion, which models are asked for."""

    good: bool


def check(holds: bool, what: str) -> None:
    """Say that `what` is fine; exit code 1 if it does not hold."""
    if not holds:
        raise SystemExit(f"failed: {what}")
    print(f"{what}: ok")
