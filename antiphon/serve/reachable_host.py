"""Hosts that other machines are told to dial: a wildcard such as 0.0.0.0 is a place to listen, nobody can dial it.

Every spelling counts (`0.0.0.0`, `::`, `0`, `::ffff:0.0.0.0`), so the address is parsed, not compared. Names are not
looked up: what a name means is the other machine's affair.
"""

import socket
from ipaddress import IPv6Address, ip_address

from antiphon.base.errors import UserError


def is_wildcard(host: str) -> bool:
    """Whether `host` is written as an address that means "all of this machine's"."""
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM, flags=socket.AI_NUMERICHOST)
    except (OSError, UnicodeError):
        return False  # a name
    address = ip_address(str(found[0][4][0]).partition("%")[0])
    mapped = address.ipv4_mapped if isinstance(address, IPv6Address) else None
    return (mapped or address).is_unspecified


def refuse_wildcard(option: str, value: str, host: str) -> None:
    """`UserError` that names the option if nobody can dial the host it gives."""
    if is_wildcard(host):
        raise UserError(
            f"{option} is {value}: nobody can dial that; name the address by which the other machines reach this one"
        )
