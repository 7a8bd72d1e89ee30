"""The `doubling` scan on any number of ranks, in one process: ranks only send to higher ranks, so they run in order."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.collectives.test_collectives import Pairs, check
from zeco_train.collectives import PendingScan
from zeco_train.collectives.cost_model import Load
from zeco_train.collectives.doubling import DOUBLING, _Doubling
from zeco_train.errors import ConfigError
from zeco_train.ops.seam import ScanRequest

pytestmark = pytest.mark.numeric
SHAPE = (1, 2, 5, 3)


class Message:
    """A transfer that completes when waited for: its counterpart was posted earlier."""

    def __init__(self, wait: Any = lambda: None) -> None:
        self.wait = wait


class Mail:
    """Stand-in for `zeco_train.collectives.wire.Wire`; undelivered messages of all ranks are in `sent`."""

    def __init__(self, position: int, size: int, sent: dict[tuple[int, int, int], Tensor]) -> None:
        self.position, self.size, self.sent = position, size, sent
        self.is_first, self.is_last = position == 0, position == size - 1
        self.receives = 0

    def send(self, tensor: Tensor, position: int, tag: int, what: str) -> Message:
        assert tensor.is_contiguous()
        self.sent[self.position, position, tag] = tensor.clone()
        return Message()

    def receive(self, into: Tensor, position: int, tag: int, what: str) -> Message:
        self.receives += 1
        # Raises if the length differs from the sender's.
        return Message(lambda: into.view(-1).copy_(self.sent.pop((position, self.position, tag)).view(-1)))

    def broadcast(self, tensor: Tensor, position: int, what: str) -> Message:
        return Message()


@pytest.mark.few
@pytest.mark.parametrize("matrices", [False, True])
@pytest.mark.parametrize("size", [2, 3, 4, 5, 6, 7, 8, 9, 16, 17])
def test_doubling_equals_reference_on_any_rank_count(size: int, matrices: bool) -> None:
    rounds = (size - 1).bit_length()
    for seed, (with_carry, restarts) in enumerate(((False, False), (True, False), (True, True))):
        pairs = Pairs.make(seed, size, SHAPE, torch.float64, with_carry, restarts, matrices)
        sent: dict[tuple[int, int, int], Tensor] = {}
        messages, sent_bytes = Counter[int](), Counter[int]()
        for rank in range(size):
            carry_in = None if pairs.carry_in is None else pairs.carry_in if rank == 0 else pairs.carry_in * torch.nan
            request = ScanRequest(pairs.states[rank], pairs.transitions[rank], False, carry_in, want_carry=True)
            job = _Doubling(request, range(rounds))
            job.wire = wire = Mail(rank, size, sent)  # type: ignore[assignment]
            job.scan = scan = PendingScan(want_carry=True)
            job.post()
            # All receives are posted at launch.
            assert wire.receives == rank.bit_length()
            job.run()
            assert wire.receives == rank.bit_length()
            for (source, _, _), tensor in sent.items():
                messages[source] += source == rank
                sent_bytes[source] += tensor.nbytes * (source == rank)
            check(f"incoming state of rank {rank}", scan.wait(), pairs.incoming(rank, False), (size, seed))
        check("carry_out", scan.carry_out(), pairs.incoming(size, False), (size, seed))
        assert not sent, "messages that nobody received"
        assert max(messages.values()) == rounds
        assert max(sent_bytes.values()) == DOUBLING.bytes_sent(Load(size, SHAPE, 8, matrices), True)


def test_doubling_rejects_symmetric_transport_and_blocks() -> None:
    from zeco_train.sp.all_scan_config import AllScanAlgorithm, AllScanConfig, AllScanTransport

    config = AllScanConfig(AllScanAlgorithm["doubling"])
    config.validate()
    assert config.scans == (DOUBLING,)
    assert DOUBLING not in AllScanConfig().scans
    config.transport = AllScanTransport.symmetric
    with pytest.raises(ConfigError, match=r"^sp.all_scan.transport=symmetric: doubling has no kernel yet"):
        config.validate()
    with pytest.raises(ConfigError, match=r"^sp.all_scan.blocks=2: would be ignored; it needs .*algorithm=chain$"):
        AllScanConfig(AllScanAlgorithm["doubling"], blocks="2").validate()
