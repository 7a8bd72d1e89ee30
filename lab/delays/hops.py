"""Part `hops` of case `delays`: a state sent to and fro between two ranks, by scans in alternating directions.

    hop h, from rank r = h mod 2:    x_{h+1} = exp(log_decay_r) ⊙_K x_h + state_r,    x_0 = 0

Each scan starts from what the scan before has delivered (`carry_in` of its first rank), so the hops cannot overlap. A
hop is the whole scan over two ranks, α₀ + α + βS in the cost model: unlike in a chain of many ranks, where the next
rank's kernel waits already, each hop also starts a kernel when the one before it ends. So it bounds a chain's hop from
above; chains of several lengths whose kernels all wait in their place (`lab.delays.chains`) have the hop itself.
"""

from __future__ import annotations

from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from lab.delays.chains import TwoGpuChain
from lab.delays.config import DelaysConfig
from zeco_train.bench.session import Row, Session, check_results
from zeco_train.bench.timing import Runner, Subject, capture_all
from zeco_train.bench.variants import backend_variant
from zeco_train.collectives.chain import CHAIN
from zeco_train.collectives.cost_model import MEASURED, Link, Load
from zeco_train.ops.seam import ScanRequest
from zeco_train.sp.scan_choice import fastest_scan

# fp32 folds, whose decays forget old errors, against fp64.
TOLERANCE = 1e-5


def measure_hops(heads: int, config: DelaysConfig, session: Session, runner: Runner) -> list[Row]:
    """Rows of a state with this many heads, launched and in a CUDA graph.

    Raises:
        WrongResultError: what arrived last is wrong, on some rank.
    """
    hops = _Hops(heads, config, session)
    results = {"the state after the last hop": (hops.run(config.hops), hops.expected(config.hops))}
    errors = session.agree(partial(check_results, hops.variant.name, session.rank, results, TOLERANCE))
    subjects, failed = [hops.subject("eager")], list[Row]()
    if config.graph and session.on_cuda:
        graphs, failed = capture_all([hops.subject("graph")], 1, session, TOLERANCE)
        subjects += graphs
    row: Row = {
        "part": "hops",
        "variant": hops.variant.name,
        "heads": heads,
        "state_mb": hops.state.nbytes / 1e6,
        "hops": config.hops,
        **hops.predicted(),
        "relative_error": max(max(of_rank.values()) for of_rank in session.gather(errors)),
    }
    rows = [{**row, **found, "each_us": 1e3 * found["median_ms"] / config.hops} for found in runner.rows(subjects)]
    return rows + [{**row, **each} for each in failed]


def measure_chains(heads: int, config: DelaysConfig, session: Session, runner: Runner) -> list[Row]:
    """Rows of chains of several lengths, on two GPUs.

    Raises:
        WrongResultError: what arrived is wrong, on some rank.
        CommunicationError: a kernel's wait timed out.
    """
    hops, chains, checked = _Hops(heads, config, session), [], []
    for ranks in config.chain_ranks:
        chain = TwoGpuChain(ranks, hops.state, hops.log_decay, session)
        # Two runs: only the later ones wait for credits.
        chain.run()
        results = {"the last state": (chain.run(), hops.expected(ranks - 1))}
        session.settle()
        session.agree(chain.check)
        checked.append(session.agree(partial(check_results, f"chain of {ranks}", session.rank, results, TOLERANCE)))
        chains.append(chain)
    subjects = [Subject(f"chain of {ranks}", each.run) for ranks, each in zip(config.chain_ranks, chains, strict=True)]
    rows, errors = runner.rows(subjects), session.gather(checked)
    for chain in chains:
        session.agree(chain.check)
    costs = MEASURED[Link.symmetric]
    for index, (ranks, row) in enumerate(zip(config.chain_ranks, rows, strict=True)):
        load = Load(ranks, tuple(hops.state.shape), hops.state.element_size())
        row |= {"part": "hops", "heads": heads, "state_mb": hops.state.nbytes / 1e6, "hops": ranks - 1}
        row |= {"relative_error": max(max(of_rank[index].values()) for of_rank in errors)}
        row |= {"model_us": 1e6 * costs.message, "model_chain_ms": 1e3 * fastest_scan((CHAIN,), costs, load).seconds}
        if index:
            more = ranks - config.chain_ranks[0]
            row["each_us"] = 1e3 * (row["median_ms"] - rows[0]["median_ms"]) / more
    return rows


class _Hops:
    """A rank's state and log-decays, and the scans that carry the state from rank to rank."""

    def __init__(self, heads: int, config: DelaysConfig, session: Session) -> None:
        self._session, self._hops = session, config.hops
        self.variant = backend_variant("zeco:chain:symmetric" if session.on_cuda else "zeco:chain:p2p")
        generator = torch.Generator(session.device).manual_seed(config.seed * session.world_size + session.rank)
        shape = (1, heads, config.key_dim, config.value_dim)
        self.state = torch.randn(shape, device=session.device, generator=generator)
        self.log_decay = -torch.rand(shape[:3], device=session.device, generator=generator)

    def subject(self, mode: str) -> Subject:
        """All hops, to be timed."""
        return Subject(self.variant.name, partial(self.run, self._hops, mode))

    def run(self, count: int, purpose: str = "eager") -> Tensor:
        """The state that this rank received last, after this many hops."""
        scan = self._session.exchange(self.variant, self.state.numel(), purpose).states
        carry: Tensor | None = None
        launched = []
        for hop in range(count):
            # The sender gets its own `carry_in` back, the receiver what was sent.
            launched.append(scan.launch(ScanRequest(self.state, self.log_decay, hop % 2 == 1, carry)))
            carry = launched[-1].wait()
        for each in launched:
            each.finish()
        assert carry is not None
        return carry

    def expected(self, count: int) -> Tensor:
        """What `run` returns, in float64. Collective."""
        states = [torch.empty_like(self.state) for _ in range(2)]
        log_decays = [torch.empty_like(self.log_decay) for _ in range(2)]
        dist.all_gather(states, self.state)
        dist.all_gather(log_decays, self.log_decay)
        # What each rank received last; rank 0 begins with nothing.
        received = [torch.zeros_like(self.state, dtype=torch.float64) for _ in range(2)]
        for hop in range(count):
            sender = hop % 2
            decay = log_decays[sender].double().exp()[..., None]
            received[1 - sender] = decay * received[sender] + states[sender].double()
        return received[self._session.rank]

    def predicted(self) -> Row:
        """The cost model's µs of a hop, and ms of a chain of as many hops over one rank more."""
        costs = MEASURED[Link.symmetric if self._session.on_cuda else Link.gloo]
        shape, size = tuple(self.state.shape), self.state.element_size()
        hop, whole = (fastest_scan((CHAIN,), costs, Load(ranks, shape, size)).seconds for ranks in (2, self._hops + 1))
        return {"model_us": 1e6 * hop, "model_chain_ms": 1e3 * whole}
