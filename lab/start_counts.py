"""What one rank of train.py does until its first step, counted: requests to stores, process groups, checks, sockets.

For `many_ranks.py`. Counting replaces functions of torch in this process.
"""

from __future__ import annotations

import importlib
import json
import resource
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d

from zeco_train.training.trainer import Trainer

_CHECKS = ("all_gather_object", "broadcast_object_list", "barrier")
_REQUESTS = ("set", "get", "add", "check", "wait", "delete_key", "append", "multi_get", "multi_set", "compare_set")


class CountingStore(dist.Store):
    """A store that counts requests and keys before it passes them on."""

    kept: ClassVar[list[CountingStore]] = []

    def __init__(self, store: dist.Store, counts: Counter[str]) -> None:
        super().__init__()
        self.store, self.counts = store, counts
        # torch keeps its own part of a store, without the methods of this class.
        self.kept.append(self)

    def has_extended_api(self) -> bool:
        """Whether keys can be read and set together, as gloo does then."""
        return True


def _counted(name: str) -> Callable[..., Any]:
    def request(self: CountingStore, *arguments: Any) -> Any:
        keys = arguments[0] if isinstance(arguments[0], list) else [arguments[0]]
        # The watchdog's: a few a second, also after the start.
        watching = any("/heartbeat/" in key or key.endswith("/lost") for key in keys)
        self.counts["watching" if watching else "requests"] += 1
        self.counts["keys"] += 0 if watching else len(keys)
        return getattr(self.store, name)(*arguments)

    return request


for _name in _REQUESTS:
    setattr(CountingStore, _name, _counted(_name))


def count_start(result: Path) -> None:
    """Count from now on; when training has ended, `result` has the counts at its start, as JSON.

    requests, keys     to the launcher's store, without the watchdog's
    groups, created    process groups that this rank is in, and all that it takes part in creating
    checks             collectives of objects, by which ranks agree, and barriers
    sockets            open at the first step
    cpu_seconds, seconds
    private_mb         after training: memory of this process that no other shares
    """
    counts, began, spent = Counter[str](), time.monotonic(), _cpu_seconds()
    connect = dist.TCPStore

    def connected(*args: Any, **options: Any) -> CountingStore:
        return CountingStore(connect(*args, **options), counts)

    # `torch.distributed.rendezvous` is a function beside the module of that name.
    for module in (importlib.import_module("torch.distributed.rendezvous"), dist):
        setattr(module, "TCPStore", connected)  # noqa: B010
    _count_groups(counts)
    for name in _CHECKS:
        setattr(dist, name, _counting(getattr(dist, name), counts))
    train = Trainer.train

    def counted(self: Trainer) -> Any:
        found = dict(counts) | {"cpu_seconds": _cpu_seconds() - spent, "seconds": time.monotonic() - began}
        found["sockets"] = _sockets()
        stopped_by = train(self)
        result.write_text(json.dumps(found | {"private_mb": _private_mb()}))
        return stopped_by

    Trainer.train = counted  # type: ignore[method-assign]


def _counting(function: Callable[..., Any], counts: Counter[str]) -> Callable[..., Any]:
    def counted(*args: Any, **options: Any) -> Any:
        counts["checks"] += 1
        return function(*args, **options)

    return counted


def _count_groups(counts: Counter[str]) -> None:
    """Count groups that this rank creates, and those of them that it is in."""
    create = c10d.new_group

    def counted(*args: Any, **options: Any) -> Any:
        group = create(*args, **options)
        counts["created"] += 1
        counts["groups"] += group is not dist.GroupMember.NON_GROUP_MEMBER
        return group

    c10d.new_group = dist.new_group = counted


def _sockets() -> int:
    """Open sockets of this process."""
    return sum(file.is_socket() for file in Path("/proc/self/fd").iterdir())


def _cpu_seconds() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def _private_mb() -> float:
    """Memory of this process alone, without what it shares with the process that it was forked from."""
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return sum(int(line.split()[1]) for line in lines if line.startswith("Private_")) / 1024
