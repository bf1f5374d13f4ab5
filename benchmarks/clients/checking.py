"""What the small programs share. It lies beside them, so that any environment's Python finds it."""


def check(holds: bool, what: str) -> None:
    """Say that `what` is fine; exit code 1 if it does not hold."""
    if not holds:
        raise SystemExit(f"failed: {what}")
    print(f"{what}: ok")
