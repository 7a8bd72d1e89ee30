"""A network switch in user space: `python -m lab.emulated_switch DEVICE … --delay-ms D --rate-mb R`.

It makes one TUN device for each name, and forwards IPv4 packets between them: the n-th device has the address
10.77.0.n. A packet leaves its sender's link at that link's rate, one after another, and arrives after the delay. Lines
on stdin cut a device off (`cut 2`) and join it again (`join 2`). Ends with its input. Needs root and /dev/net/tun, but
no queueing discipline of the kernel.
"""

from __future__ import annotations

import argparse
import fcntl
import heapq
import os
import select
import struct
import sys
import time
from collections.abc import Sequence

# linux/if_tun.h: TUNSETIFF; IP packets, without a header of the device's own.
_TUNSETIFF, _IFF_TUN, _IFF_NO_PI = 0x400454CA, 0x0001, 0x1000
_LARGEST_PACKET = 1 << 16
SUBNET = "10.77.0"


def address(node: int) -> str:
    """The IPv4 address of a node, counted from 0."""
    return f"{SUBNET}.{node + 1}"


class Switch:
    """Links of equal delay and rate between TUN devices.

    Args:
        devices: names of the devices to make.
        delay: seconds from leaving a link to arrival.
        rate: bytes per second of each sender's link.

    Raises:
        OSError: the devices cannot be made.
    """

    def __init__(self, devices: Sequence[str], delay: float, rate: float) -> None:
        self._files = [_open(name) for name in devices]
        self._index = {file: index for index, file in enumerate(self._files)}
        self._delay, self._rate = delay, rate
        # Time at which a link has sent all that it was given.
        self._free = [0.0] * len(devices)
        self._cut: set[int] = set()
        # (arrival, number, receiver, packet)
        self._under_way: list[tuple[float, int, int, bytes]] = []
        self._number = 0

    def run(self, commands: int) -> None:
        """Forward packets until the file of commands ends."""
        pending = b""
        while True:
            self._deliver()
            wait = max(0.0, self._under_way[0][0] - time.monotonic()) if self._under_way else None
            # Not epoll, whose timeouts are whole milliseconds.
            ready, _, _ = select.select([commands, *self._files], [], [], wait)
            for file in ready:
                if file != commands:
                    self._take(file)
                    continue
                if not (read := os.read(commands, 4096)):
                    return
                *lines, pending = (pending + read).split(b"\n")
                for line in lines:
                    self._obey(line.decode())

    def _obey(self, line: str) -> None:
        command, _, node = line.partition(" ")
        {"cut": self._cut.add, "join": self._cut.discard}[command](int(node))
        # So that the sender of the command knows.
        print(line, flush=True)

    def _take(self, file: int) -> None:
        """Read all packets of a device."""
        source, now = self._index[file], time.monotonic()
        while True:
            try:
                packet = os.read(file, _LARGEST_PACKET)
            except BlockingIOError:
                return
            receiver = _receiver(packet)
            if receiver is None or receiver >= len(self._files) or {source, receiver} & self._cut:
                continue
            self._free[source] = max(self._free[source], now) + len(packet) / self._rate
            self._number += 1
            heapq.heappush(self._under_way, (self._free[source] + self._delay, self._number, receiver, packet))

    def _deliver(self) -> None:
        now = time.monotonic()
        while self._under_way and self._under_way[0][0] <= now:
            _, _, receiver, packet = heapq.heappop(self._under_way)
            try:
                os.write(self._files[receiver], packet)
            except OSError:
                # The device is down: a packet is lost, as on a wire.
                continue


def _open(name: str) -> int:
    file = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(file, _TUNSETIFF, struct.pack("16sH22x", name.encode(), _IFF_TUN | _IFF_NO_PI))
    return file


def _receiver(packet: bytes) -> int | None:
    """The node to which an IPv4 packet is addressed; None if it is not in this network."""
    if len(packet) < 20 or packet[0] >> 4 != 4 or packet[16:19] != bytes(map(int, SUBNET.split("."))):
        return None
    return packet[19] - 1 if packet[19] else None


def main(arguments: Sequence[str]) -> int:
    """The command; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("devices", nargs="+", metavar="DEVICE")
    parser.add_argument("--delay-ms", type=float, required=True)
    parser.add_argument("--rate-mb", type=float, required=True, help="10^6 bytes per second")
    options = parser.parse_args(arguments)
    switch = Switch(options.devices, options.delay_ms / 1e3, options.rate_mb * 1e6)
    print("ready", flush=True)
    switch.run(sys.stdin.fileno())
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
