"""A `Profile` as JSON, and back, strictly: an unknown, missing or impossible entry is an error that names its place.

The file mirrors the dataclasses of `cost.profile` and `cost.curves` key by key; tuples are lists.

Rejected: reading leniently. A misspelt table would be taken for one that was never measured, and the roofline would
answer in its place without anybody noticing.
"""

from dataclasses import asdict
from pathlib import Path

from antiphon.cost.profile import PROFILE_VERSION, Profile
from antiphon.specs.strict_table import read_json, write_json


def write_profile(profile: Profile, path: Path) -> None:
    """Replaces the file at `path`."""
    write_json(asdict(profile), path)


def read_profile(path: Path) -> Profile:
    """Read a file of `antiphon profile`. `UserError` names the file and the entry that is wrong."""
    table = read_json(path)
    version = table.whole("version", at_least=0)
    if version != PROFILE_VERSION:
        fix = "make the profile again with `antiphon profile`"
        raise table.error("version", f"this program reads version {PROFILE_VERSION}: {fix}")
    return table.read(Profile, version=version)
