"""Question: how fast and exact is LASP's own code beside ours, with one fixed decay a head on two GPUs?
Command: torchrun --standalone --nproc-per-node 2 -m lab.peers.lasp_beside FOLDER [VARIANT …]
Date: 2026-11-24, 1d5882e, 2 × H200; FOLDER: github.com/OpenNLPLab/LASP (MIT) at 13f320a
Answer: zeco 0.561 ms, its fastest, lasp_fuse_parallel, 7.449; both within 2.7e-3 of fp64. lab/results/lasp_2xh200.txt.

Adapted, around LASP's files and not in them:
- tensors in LASP's own layout [1, H, T, D], made before the clock starts; slopes are minus our log-decays, our scale 1;
- its groups get the timeout of 60 s;
- `no barrier`: without the `dist.barrier()` at the start of lasp_fuse_parallel's forward, which the algorithm does not
  need;
- lasp_cache gets its positions in fp32; bf16, as in its test, rounds those beyond 256. Its kernel takes memory that
  nothing has written for a state and adds it, with decay, to the state that it sends on: with slow decays a large
  error.

Environment: OUT, a folder for the table; LIMIT_S, seconds until a rank that hangs ends with its stacks (150);
LASP_DEVICE=cpu rehearses on CPUs with Triton's interpreter, on smaller tensors in fp32.
"""

from __future__ import annotations

import faulthandler
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor

from zeco_train.bench.config import OperatorConfig
from zeco_train.bench.operands import Inputs, Shape
from zeco_train.bench.operator import sent_mb
from zeco_train.bench.report import time_columns
from zeco_train.bench.runner import Runner, Subject
from zeco_train.bench.session import Session
from zeco_train.bench.variants import backend_variant
from zeco_train.errors import ConfigError, ZecoError
from zeco_train.lifecycle.job import Advice, Job, run_job
from zeco_train.ops.mix import mix
from zeco_train.ops.oracle import exact_results
from zeco_train.ops.registry import OPERATORS
from zeco_train.sp.exchange import local_exchange
from zeco_train.system.numbers import relative_error
from zeco_train.system.tables import format_table

ON_CPU = os.environ.get("LASP_DEVICE") == "cpu"
RANKS = 2
TIMEOUT_SECONDS = 60
HEADS, DIM = (2, 128) if ON_CPU else (16, 128)
TOKENS, CHECK_TOKENS = (256, 512) if ON_CPU else (16_384, 2_048)
OURS = ("dp", "zeco", "lasp1", "lasp2")
LASPS = ("lasp_fuse_parallel, no barrier", "lasp_fuse_parallel", "lasp_fuse", "lasp_cache", "lasp_naive")
RESULTS = ("o", "dq", "dk", "dv")
_COLUMNS = {
    "variant": ("variant", "<32"),
    **time_columns("ms", 3),
    "ratio": ("/ dp", ">6:.3f"),
    "sent_mb": ("MB sent", ">7:.2f"),
    **{name: (name, ">8:.1e") for name in RESULTS},
}
_ADVICE = Advice(lost_peer="start again", memory="use GPUs with more memory", timeout_key="timeout_seconds")


@dataclass(frozen=True)
class Lasp:
    """LASP's code.

    Attributes:
        package: `lasp`.
        fuse_parallel: its module lasp_fuse_parallel, whose name in the package is that of a function.
        utils: its module utils.
        names: of the variants to run.
    """

    package: Any
    fuse_parallel: Any
    utils: Any
    names: Sequence[str] = LASPS

    @classmethod
    def load(cls, folder: Path, names: Sequence[str] = LASPS) -> Lasp:
        """Import it from a checkout, to run the variants `names`.

        Raises:
            ConfigError: there is no package `lasp`, or it cannot be imported.
        """
        if not (folder / "lasp" / "__init__.py").is_file():
            raise ConfigError("FOLDER", folder, "has no package lasp; must be a checkout of github.com/OpenNLPLab/LASP")
        # Only for these imports: a checkout has other packages, too.
        sys.path.insert(0, str(folder))
        try:
            package, fuse_parallel, utils = map(import_module, ("lasp", "lasp.lasp_fuse_parallel", "lasp.utils"))
            return cls(package, fuse_parallel, utils, names)
        except ImportError as error:
            raise ConfigError("FOLDER", folder, f"its package lasp cannot be imported ({error})") from error
        finally:
            sys.path.remove(str(folder))

    def join(self, ranks: int) -> None:
        """Create its process groups, with a timeout, over all ranks. Collective."""
        with mock.patch.object(dist, "new_group", partial(dist.new_group, timeout=timedelta(seconds=TIMEOUT_SECONDS))):
            self.utils.initialize_lasp(1, ranks)

    @contextmanager
    def without_barrier(self) -> Iterator[None]:
        """Within it, lasp_fuse_parallel does not wait for the other rank's host."""
        self.fuse_parallel.dist = SimpleNamespace(send=dist.send, recv=dist.recv, barrier=lambda: None)
        try:
            yield
        finally:
            self.fuse_parallel.dist = dist

    def steps(self, inputs: Inputs) -> dict[str, tuple[Callable[[], Tensor], list[Tensor]]]:
        """A forward + backward of each of the variants `names`, which returns o [1, H, T, V], and the leaves of all."""
        leaves, slopes, do = _operands(inputs)
        q, k, v = leaves
        shape = 1, q.shape[1], q.shape[3], v.shape[3]
        received = [torch.empty(shape, dtype=torch.float32, device=q.device) for _ in range(2)]
        positions = torch.arange(q.shape[2], device=q.device, dtype=torch.float32)
        lasp = self.package
        forwards: dict[str, Callable[[], Tensor]] = {
            "lasp_fuse_parallel": lambda: lasp.lasp_fuse_parallel(q, k, v, slopes, *received),
            "lasp_fuse": lambda: lasp.lasp_fuse(q, k, v, slopes, *received),
            "lasp_cache": lambda: lasp.lasp_cache(q, k, v, slopes, positions, *received),
            "lasp_naive": lambda: lasp.lasp_naive(q, k, v, slopes),
        }

        def step(forward: Callable[[], Tensor]) -> Tensor:
            o = forward()
            o.backward(do)
            return o

        def step_without_barrier() -> Tensor:
            with self.without_barrier():
                return step(forwards["lasp_fuse_parallel"])

        steps: dict[str, Callable[[], Tensor]] = {LASPS[0]: step_without_barrier}
        steps |= {name: partial(step, forward) for name, forward in forwards.items()}
        return {name: (steps[name], leaves) for name in self.names}


def _operands(inputs: Inputs) -> tuple[list[Tensor], Tensor, Tensor]:
    """q, k, v as leaves in LASP's layout [1, H, T, D]; slopes [H, 1, 1]; do [1, H, T, V]."""
    leaves = [inputs.operands[name].detach().transpose(1, 2).contiguous().requires_grad_() for name in ("q", "k", "v")]
    slopes = -inputs.operands["log_decay"].detach().float().reshape(-1, 1, 1)
    return leaves, slopes, inputs.do.transpose(1, 2).contiguous()


def _our_attention(name: str, session: Session, tokens: int) -> Callable[..., Tensor]:
    alone = name == "dp"
    exchange = local_exchange() if alone else session.exchange(backend_variant(name), HEADS * DIM * DIM)
    position = session.position(exchange, tokens, alone=alone)
    return lambda *operands: mix("fixed_decay", operands, position, scale=1.0)[0]


def _refused(run: Callable[[], Any], name: str) -> Any:
    """Run it; an error that is not ours becomes one on which the ranks can agree."""
    try:
        found = run()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        return found
    except ZecoError:
        raise
    except Exception as error:
        raise ConfigError("variants", name, " ".join(f"{type(error).__name__}: {error}".split())[:300]) from error


def _forget(leaves: list[Tensor]) -> None:
    for leaf in leaves:
        leaf.grad = None


def _shape(tokens: int) -> Shape:
    return Shape(HEADS, DIM, DIM, tokens, "fixed_decay", None, "retention")


def check(lasp: Lasp, config: OperatorConfig, session: Session) -> dict[str, dict[str, Any]]:
    """Largest errors over the ranks, by variant; a note where one did not run."""
    own = Inputs.random(_shape(CHECK_TOKENS), config.dtype, 1 + session.rank, session.device)
    whole = own.gathered(session)
    expected = exact_results(OPERATORS[_shape(1).operator], whole.operands, whole.do)
    part = slice(session.rank * CHECK_TOKENS, (session.rank + 1) * CHECK_TOKENS)
    found: dict[str, dict[str, Any]] = {}
    for name in OURS:
        alone = name == "dp"
        attention = _our_attention(name, session, whole.tokens if alone else CHECK_TOKENS)
        results = (whole if alone else own).results(attention)
        own_part = {n: results[n][:, part] if alone else results[n] for n in RESULTS}
        found[name] = _worst({n: relative_error(x, expected[n][:, part]) for n, x in own_part.items()}, session)
    for name, (run, leaves) in lasp.steps(own).items():
        _forget(leaves)
        try:
            o = session.agree(partial(_refused, run, name))
        except ConfigError as error:
            found[name] = {"note": f"not run: {error}"}
            continue
        results = dict(zip(RESULTS, (o, *(leaf.grad for leaf in leaves if leaf.grad is not None)), strict=True))
        errors = {n: relative_error(x.transpose(1, 2), expected[n][:, part]) for n, x in results.items()}
        found[name] = _worst(errors, session)
    return found


def _worst(errors: dict[str, float], session: Session) -> dict[str, Any]:
    by_rank = session.gather(errors)
    return {name: max(each[name] for each in by_rank) for name in errors}


def measure(
    lasp: Lasp, config: OperatorConfig, session: Session, checked: dict[str, dict[str, Any]]
) -> list[dict[str, Any]]:
    """Rows of the table: times, bytes, errors, notes. A variant that does not run gets a note in `checked`, too."""
    inputs = Inputs.random(_shape(TOKENS), config.dtype, 1 + session.rank, session.device)
    subjects = []
    for name in OURS:
        attention = _our_attention(name, session, TOKENS)
        run = partial(lambda of: of(*inputs.operands.values()).backward(inputs.do), attention)
        subjects.append(Subject(name, run, inputs.forget_grads))
    sent = {subject.name: sent_mb(subject, session) for subject in subjects}
    # fp32 [H, K, V], one way in each pass.
    state_mb = HEADS * DIM * DIM * 4e-6
    for name, (step, leaves) in lasp.steps(inputs).items():
        if "note" in checked[name]:
            continue
        try:
            # Its kernels are compiled for each length.
            session.agree(partial(_refused, step, name))
        except ConfigError as error:
            checked[name] = {"note": f"not run: {error}"}
            continue
        subjects.append(Subject(name, step, partial(_forget, leaves)))
        sent[name] = 2 * state_mb
    rows = Runner(config, session).rows(subjects)
    dp = next(row["median_ms"] for row in rows if row["variant"] == "dp")
    rows = [
        {**row, "ratio": row["median_ms"] / dp, "sent_mb": sent[row["variant"]], **checked[row["variant"]]}
        for row in rows
    ]
    timed = {row["variant"] for row in rows}
    return rows + [{"variant": name, **each} for name, each in checked.items() if name not in timed]


def main(arguments: list[str]) -> int:
    """Check, measure, and print the table; returns the process's exit code."""
    return run_job(partial(_run, arguments), _ADVICE)


def _run(arguments: list[str], job: Job) -> int:
    if not arguments:
        raise ConfigError("FOLDER", "", "must be a checkout of github.com/OpenNLPLab/LASP")
    folder, *names = arguments
    for name in names:
        if name not in LASPS:
            raise ConfigError("VARIANT", name, f"must be one of {'; '.join(LASPS)}")
    if job.launch.world_size != RANKS:
        problem = f"must be {RANKS}; start with torchrun --standalone --nproc-per-node {RANKS}"
        raise ConfigError("ranks", job.launch.world_size, problem)
    with ExitStack() as stack:
        if ON_CPU:
            # Is read where LASP's kernels are defined.
            stack.enter_context(mock.patch.dict(os.environ, TRITON_INTERPRET="1"))
            # LASP enters the GPU of its tensors.
            stack.enter_context(mock.patch.object(torch.cuda, "device", return_value=nullcontext()))
        lasp = Lasp.load(Path(folder).resolve(), names or LASPS)
        if not ON_CPU and (gpus := torch.cuda.device_count()) < RANKS:
            raise ConfigError("GPUs", gpus, f"must be {RANKS}; LASP_DEVICE=cpu rehearses this script on CPUs")
        faulthandler.dump_traceback_later(float(os.environ.get("LIMIT_S", "150")), exit=True)
        stack.callback(faulthandler.cancel_dump_traceback_later)
        _compare(lasp, job)
    return 0


def _compare(lasp: Lasp, job: Job) -> None:
    runs = ["runs=3", "warmup=1", "flush_mb=0", "device=cpu", "dtype=fp32"] if ON_CPU else ["runs=30", "warmup=5"]
    config = OperatorConfig.load([*runs, f"timeout_seconds={TIMEOUT_SECONDS}"])
    with job.joining(timedelta(seconds=config.timeout_seconds)):
        session = Session.open(config, job.launch, job)
    lasp.join(session.world_size)
    session.enter("checking the results")
    checked = check(lasp, config, session)
    session.say(f"checked at {CHECK_TOKENS} tokens a rank: {checked}")
    session.enter("measuring")
    rows = measure(lasp, config, session, checked)
    device = torch.cuda.get_device_name() if session.on_cuda else "cpu"
    title = f"{session.world_size} x {device}, torch {torch.__version__}, H {HEADS}, K = V = {DIM}"
    title += f", {TOKENS:,} tokens a rank, {config.dtype.value}, forward + backward"
    table = f"{title}\n{format_table(rows, _COLUMNS)}"
    session.say(table)
    if session.rank == 0 and os.environ.get("OUT"):
        (Path(os.environ["OUT"]) / "lasp_beside.txt").write_text(table + "\n")
    session.settle()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
