"""What somebody probably meant: the known names nearest to a mistyped one, for error messages."""

import difflib
import re
from collections.abc import Iterable

MAX_SUGGESTIONS = 3


def canonical(name: str) -> str:
    """``"H100-SXM"`` and ``"h100 sxm"`` are the same name: lower case, only letters and digits."""
    return re.sub(r"[^a-z0-9]", "", name.lower())


def nearest_names(name: str, known: Iterable[str]) -> list[str]:
    """At most three of `known`, the best match first; none if nothing is similar."""
    by_canonical = {canonical(candidate): candidate for candidate in known}
    wanted = canonical(name)
    contains = [key for key in by_canonical if wanted and (wanted in key or key in wanted)]
    similar = difflib.get_close_matches(wanted, by_canonical, n=MAX_SUGGESTIONS, cutoff=0.5)
    keys = list(dict.fromkeys([*similar, *contains]))[:MAX_SUGGESTIONS]
    return [by_canonical[key] for key in keys]


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """``"did you mean H20, H200?"``, or all that is known if nothing is similar."""
    known = list(known)
    near = nearest_names(name, known)
    return f"did you mean {', '.join(near)}?" if near else f"use one of {', '.join(known)}"
