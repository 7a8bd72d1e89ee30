"""Listen address and authentication of a Slurm job's processes.

The batch script generates a new RENDEZVOUS_KEY for each attempt and passes it in the environment of its steps, which
only the user and root can read. The key itself is never sent over the network.

`python launch/slurm_network.py` prints this node's address on CLUSTER_INTERFACE.
"""

from __future__ import annotations

import fcntl
import hmac
import os
import socket
import struct
import sys

_SIOCGIFADDR = 0x8915
# sizeof(struct ifreq) on 64-bit Linux, size of its name with the closing NUL, and bytes of the IPv4 address.
_REQUEST_BYTES, _NAME_BYTES = 40, 16
_ADDRESS = slice(20, 24)
MAC_BYTES = 32


def own_address() -> str | None:
    """This node's IPv4 address on CLUSTER_INTERFACE; None if that is not set.

    Raises:
        OSError: no such interface, or it has no IPv4 address.
    """
    name = os.environ.get("CLUSTER_INTERFACE", "")
    if not name:
        return None
    if len(os.fsencode(name)) >= _NAME_BYTES:
        raise OSError(f"longer than {_NAME_BYTES - 1} bytes")
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        request = struct.pack(f"{_REQUEST_BYTES}s", os.fsencode(name))
        answer = fcntl.ioctl(any_socket, _SIOCGIFADDR, request)
    return socket.inet_ntoa(answer[_ADDRESS])


def no_interface(error: OSError) -> str:
    """Message for an error of `own_address`."""
    name, place = os.environ.get("CLUSTER_INTERFACE"), os.environ.get("SLURMD_NODENAME", "this node")
    return f"error: CLUSTER_INTERFACE={name}: no interface with an IPv4 address on {place} ({error.strerror or error})"


def sign(key: bytes, message: bytes) -> bytes:
    """[MAC_BYTES] HMAC-SHA256 of a message."""
    return hmac.digest(key, message, "sha256")


def token(purpose: str) -> str:
    """Proof of possession of RENDEZVOUS_KEY, valid for one purpose."""
    return sign(os.environ["RENDEZVOUS_KEY"].encode(), purpose.encode()).hex()


def main() -> int:
    """The command; returns the exit code."""
    try:
        print(own_address() or "")
    except OSError as error:
        print(no_interface(error), file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
