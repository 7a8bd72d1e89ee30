"""Question: do two versions of this project train, evaluate, write text and export alike, to the last bit?
Command: python -m lab.campaigns.same_bits [COMMIT|FOLDER|FILE.json] [--keep FILE.json] [--only TEXT]
    [--dtypes fp32,fp64] [--device cpu] [--ranks 2] [KEY=VALUE of train.py …]
Date: –
Answer: a line for each case; tests/gpu_results.md has those of GPUs.

COMMIT (default: `BEFORE`) is checked out in a temporary folder; FOLDER is another copy of the sources, for machines
without git; FILE.json holds the results that `--keep` has written earlier on the same machine, in place of a version.
Prints one line per case; exits with 1 if one differs or fails.

For refactorings that must not change what is computed. Each version runs all cases in one process of its own, which
forks the ranks: they need not import torch again. Only command lines and files are used, so any two versions compare.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import io
import json
import os
import runpy
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path

HERE = Path(__file__).resolve().parents[2]
# The last commit before the redesign into a core and a lab (issues 41 and 42).
BEFORE = "d2b9b8f"
COLUMNS = ("loss", "grad_norm", "val_loss")
BACKENDS = {
    "dp": ["sp=dp"],
    "lasp1": ["sp=lasp1"],
    "lasp2": ["sp=lasp2"],
    "chain": ["sp=zeco", "sp.all_scan.algorithm=chain"],
    "two_shot": ["sp=zeco", "sp.all_scan.algorithm=two_shot"],
    "doubling": ["sp=zeco", "sp.all_scan.algorithm=doubling"],
}
LANE = ["sp=zeco", "sp.all_scan.algorithm=lane", "sp.all_scan.ranks_per_node=2"]
DOCUMENTS = ["data.reset_state_at_document=true"]
MIXERS = (
    *("linear", "retnet", "lightning", "hgrn2", "based", "rebased", "cosformer"),
    *("mamba2", "gated_deltanet", "delta_net", "kda"),
)
# FlashAttention's order of sums is not fixed otherwise.
HYBRID = ["model=gated_deltanet_tiny", "model.attn.every=2", "train.deterministic=true"]
METHODS = ("all_gather", "ulysses", "ring")
STRATEGIES = ("ddp", "hsdp", "zero2", "zero3")
LIMIT_SECONDS = 300.0
_SETTINGS = [
    "model.num_layers=2",
    "data.seq_len=512",
    "data.global_batch=4",
    "sched.warmup_steps=2",
    "train.log_every=1",
    "train.eval_every=0",
    "train.eval_sequences=2",
]


@dataclass(frozen=True)
class Case:
    """A run that both versions train.

    Attributes:
        settings: arguments of `train.py`.
        ranks: of the run; None: those of the command line.
        resumed: arguments with which it goes on for as many steps again, and the number of ranks.
        used: the trained model is evaluated, writes text and is exported.
    """

    name: str
    settings: list[str]
    ranks: int | None = None
    resumed: tuple[list[str], int] | None = None
    used: bool = False


def cases(dtypes: list[str], on_gpu: bool) -> Iterator[Case]:
    """Every path whose bits matter, each in its cheapest setting."""
    chain = BACKENDS["chain"]
    for dtype in dtypes:
        kind = [f"train.dtype={dtype}"]
        for name, split in BACKENDS.items():
            yield Case(f"{dtype} {name}", [*kind, *split])
            segments = ["train.segments=2", "train.recompute=full"]
            yield Case(f"{dtype} {name}, documents, segments, full recompute", [*kind, *split, *DOCUMENTS, *segments])
        if not on_gpu:
            yield Case(f"{dtype} lane, 4 ranks", [*kind, *LANE], ranks=4)
            batch = ["data.micro_batch=2", "data.seq_len=513"]
            yield Case(f"{dtype} chain, 3 ranks, batch of 2", [*kind, *chain, *batch], ranks=3)
            documents = [*kind, "sp=lasp1", "sched=constant", *DOCUMENTS, "data.seq_len=510"]
            yield Case(f"{dtype} resumed on 3 ranks", documents, resumed=(["sp=lasp2"], 3))
            yield Case(f"{dtype} mlm", [*kind, *chain, "model=linear_tiny", "task=mlm", "model.causal=false"])
        for strategy in STRATEGIES:
            recompute = "train.recompute=selective"
            yield Case(f"{dtype} {strategy}, selective recompute", [*kind, *chain, f"parallel={strategy}", recompute])
        for mixer in MIXERS:
            yield Case(f"{dtype} {mixer}, documents", [*kind, *chain, f"model={mixer}_tiny", *DOCUMENTS])
        for method in METHODS:
            hybrid = [*HYBRID, f"sp.attention={method}"]
            yield Case(f"{dtype} hybrid by {method}", [*kind, *chain, *hybrid])
            documents = [*DOCUMENTS, "train.recompute=selective"]
            yield Case(f"{dtype} hybrid by {method}, documents", [*kind, *BACKENDS["lasp2"], *hybrid, *documents])
        yield Case(f"{dtype} muon", [*kind, *chain, "optim=muon"])
        # A schedule that depends on the number of steps would differ between the two halves.
        yield Case(f"{dtype} resumed on one rank", [*kind, "sp=lasp1", "sched=constant"], resumed=(["sp=dp"], 1))
        for model in (["model=gla_tiny"], ["model=mamba2_tiny"], HYBRID):
            yield Case(f"{dtype} used: {' '.join(model)}", [*kind, *chain, *model], used=True)
    yield Case("fp8", ["train.dtype=bf16", "train.matmul=fp8", *chain])


@dataclass
class Worker:
    """Runs cases with the sources of one version, in the process that has them on its path."""

    tree: Path
    device: str
    ranks: int
    steps: int
    more: list[str]
    folder: Path
    lines: list[str] = field(default_factory=list)
    commands: int = 0

    def run(self, case: Case) -> list[str]:
        """The case's results, one text each: floats in hexadecimal, digests of tensors and files, printed text."""
        self.lines, run, ranks = [], self.folder / "run", case.ranks or self.ranks
        more = [f"train.device={self.device}", *self.more, f"run_dir={run}"]
        settings = [*_SETTINGS, *case.settings, *more]
        self._command(ranks, ["train.py", *settings, f"train.steps={self.steps}"])
        if case.resumed:
            others, ranks = case.resumed
            self._command(ranks, ["train.py", *settings, *others, f"train.steps={2 * self.steps}"])
        self._read_run(run)
        if case.used:
            self._use(run, ranks)
        return self.lines

    def _use(self, run: Path, ranks: int) -> None:
        device, out = f"train.device={self.device}", self.folder / "export"
        evaluate = ["zeco_train.evaluate", str(run), "--out", str(self.folder / "results"), "validation.sequences=4"]
        self._command(ranks, [*evaluate, device])
        found = json.loads((self.folder / "results/results.json").read_text())
        self.lines += sorted(f"evaluate {name} {value}" for name, value in _floats("tasks", found["tasks"]))
        generate = ["zeco_train.generate", str(run), "--prompt=def main(", "--max-tokens=30", "--seed=3"]
        self._command(1, [*generate, f"--json={self.folder / 'texts.json'}", device])
        (text,) = json.loads((self.folder / "texts.json").read_text())["completions"]
        self.lines.append(f"generate {text['tokens']} {text['text']!r}")
        self._command(1, ["zeco_train.export", str(run), str(out)])
        for path in sorted(out.rglob("*")):
            # zeco_train.json says of which version and settings it is; both may differ.
            if path.suffix in (".safetensors", ".json", ".model", ".txt") and path.name != "zeco_train.json":
                self.lines.append(f"export {path.relative_to(out)} {_digest(path.read_bytes())}")

    def _read_run(self, run: Path) -> None:
        rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
        for row in rows:
            values = [f"{column} {float(row[column]).hex()}" for column in COLUMNS if row.get(column) is not None]
            self.lines.append(f"step {row['step']} {' '.join(values)}")
        for name, digest in sorted(_tensors((run / "checkpoints/latest").resolve())):
            self.lines.append(f"{name} {digest}")

    def _command(self, ranks: int, command: list[str]) -> None:
        """Run it on so many ranks; raises `RuntimeError`, whose message is the last of its output."""
        # Below the ports that systems give away: a probed one may be another's by the time it is used.
        self.commands += 1
        port = 20000 + (os.getpid() * 50 + self.commands) % 12000
        launch = {"WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        outputs = [self.folder / f"rank_{rank}.txt" for rank in range(ranks)]
        pids = [
            self._fork({**launch, "RANK": rank, "LOCAL_RANK": rank}, command, outputs[rank]) for rank in range(ranks)
        ]
        deadline, codes = time.monotonic() + LIMIT_SECONDS, dict[int, int]()
        while len(codes) < ranks and time.monotonic() < deadline and not any(codes.values()):
            for pid in set(pids) - codes.keys():
                if (ended := os.waitpid(pid, os.WNOHANG))[0]:
                    codes[pid] = os.waitstatus_to_exitcode(ended[1])
            time.sleep(0.02)
        for pid in set(pids) - codes.keys():
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
        if [*codes.values()] != [0] * ranks:
            texts = [line for path in outputs for line in path.read_text(errors="replace").splitlines() if line.strip()]
            errors = [line for line in texts if "rror" in line] or texts[-3:]
            raise RuntimeError(f"{command[0]}: exit codes {codes}: {errors[-1:]}")

    def _fork(self, launch: dict[str, object], command: list[str], output: Path) -> int:
        if pid := os.fork():
            return pid
        code = 1
        try:
            file = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            os.dup2(file, 1)
            os.dup2(file, 2)
            os.setpgid(0, 0)
            os.chdir(self.folder)
            os.environ.update({name: str(value) for name, value in launch.items()})
            sys.argv[:] = command
            if command[0].endswith(".py"):
                runpy.run_path(str(self.tree / command[0]), run_name="__main__")
            else:
                runpy.run_module(command[0], run_name="__main__", alter_sys=True)
            code = 0
        except SystemExit as ended:
            code = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)


def _floats(name: str, value: object) -> Iterator[tuple[str, str]]:
    if isinstance(value, dict):
        for key, part in value.items():
            yield from _floats(f"{name}.{key}", part)
    elif isinstance(value, list):
        for index, part in enumerate(value):
            yield from _floats(f"{name}.{index}", part)
    elif isinstance(value, float):
        yield name, value.hex()


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:16]


def _tensors(checkpoint: Path) -> Iterator[tuple[str, str]]:
    """Names and digests of all tensors of a checkpoint: weights and the optimizer's state."""
    import torch
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata

    folder = next(path.parent for path in checkpoint.rglob(".metadata"))
    found = dcp.FileSystemReader(folder).read_metadata().state_dict_metadata
    state = {
        name: torch.empty(entry.size, dtype=entry.properties.dtype)
        for name, entry in found.items()
        if isinstance(entry, TensorStorageMetadata)
    }
    with contextlib.redirect_stderr(io.StringIO()):
        dcp.load(state, checkpoint_id=folder, no_dist=True)
    for name, tensor in state.items():
        yield name, _digest(tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes() if tensor.numel() else b"")


def work() -> int:
    """In a process of its own: read cases and settings from stdin, and print one line of JSON per case."""
    given = json.load(sys.stdin)
    tree, todo = Path(given.pop("tree")), [Case(**entry) for entry in given.pop("cases")]
    import torch
    import torch.distributed.checkpoint
    import torch.distributed.fsdp  # noqa: F401

    # What ranks need, imported before they are forked.
    with contextlib.suppress(ImportError):
        import zeco_train.cli
        import zeco_train.evaluate
        import zeco_train.export
        import zeco_train.generate.__main__
        import zeco_train.training.build
    import zeco_train

    assert Path(zeco_train.__file__).resolve().is_relative_to(tree), (zeco_train.__file__, tree)
    for case in todo:
        began = time.monotonic()
        with tempfile.TemporaryDirectory(prefix="zeco-bits-") as folder:
            try:
                lines = Worker(tree, folder=Path(folder), **given).run(case)
            except (RuntimeError, OSError, ValueError, KeyError, StopIteration) as error:
                lines = [f"FAILED: {error!r}"]
        print(json.dumps([case.name, lines, time.monotonic() - began]), flush=True)
    return 0


@contextmanager
def sources(name: str) -> Iterator[Path]:
    """The folder of that name, or a temporary checkout of that commit."""
    if Path(name).is_dir():
        yield Path(name).resolve()
        return
    with tempfile.TemporaryDirectory(prefix="zeco-sources-") as folder:
        tree = Path(folder).resolve() / "tree"
        git = ["git", "-C", str(HERE), "worktree"]
        subprocess.run([*git, "add", "--quiet", "--detach", str(tree), name], check=True)
        try:
            yield tree
        finally:
            subprocess.run([*git, "remove", "--force", str(tree)], check=True)


def results(tree: Path, todo: list[Case], options: dict[str, object]) -> Iterator[tuple[str, list[str], float]]:
    """Name, results and seconds of each case with the sources in `tree`."""
    given = {"tree": str(tree), "cases": [asdict(case) for case in todo], **options}
    with tempfile.TemporaryFile("w+") as stdin, tempfile.TemporaryDirectory() as empty:
        json.dump(given, stdin)
        stdin.seek(0)
        # A process with threads of its own, or that has opened a CUDA device, could not be forked.
        forks = {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "PYTORCH_NVML_BASED_CUDA_CHECK": "1"}
        environment = {
            **os.environ,
            **forks,
            "PYTHONPATH": os.pathsep.join([str(tree), os.environ.get("PYTHONPATH", "")]),
        }
        command = [sys.executable, "-P", __file__, "--work"]
        with subprocess.Popen(
            command, cwd=empty, stdin=stdin, stdout=subprocess.PIPE, env=environment, text=True
        ) as process:
            assert process.stdout is not None
            for line in process.stdout:
                name, lines, seconds = json.loads(line)
                yield name, lines, seconds
        if process.returncode:
            raise RuntimeError(f"{tree}: exit code {process.returncode}")


def verdict(before: list[str], found: list[str]) -> str:
    """`same` followed by the number of results, or the first difference."""
    for old, new in zip(before, found, strict=False):
        if new.startswith("FAILED"):
            return new
        if old != new:
            return f"DIFFERENT: {old} became {new}"
    if len(before) != len(found):
        return f"DIFFERENT: {len(before)} results became {len(found)}"
    return f"same {len(found)} results"


def main() -> int:
    """Compare all cases; returns 1 if one differs or fails."""
    parser = argparse.ArgumentParser(description="run two versions, and compare their results bit by bit")
    parser.add_argument("other", metavar="COMMIT|FOLDER|FILE.json", nargs="?", default=BEFORE)
    parser.add_argument("--keep", type=Path, metavar="FILE.json", help="write the results of these sources")
    parser.add_argument("--dtypes", default="fp32,fp64")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--only", default="", metavar="TEXT", help="cases with this in their name")
    parser.add_argument("--part", default="0/1", metavar="K/N", help="every N-th case from the K-th on")
    options, more = parser.parse_known_args()
    if "=" in options.other:
        more, options.other = [options.other, *more], BEFORE
    todo = [case for case in cases(options.dtypes.split(","), options.device != "cpu") if options.only in case.name]
    part, parts = map(int, options.part.split("/"))
    todo = todo[part::parts]
    given = {"device": options.device, "ranks": options.ranks, "steps": options.steps, "more": more}
    kept, failed = dict[str, list[str]](), 0
    with contextlib.ExitStack() as stack:
        if options.other.endswith(".json"):
            earlier = json.loads(Path(options.other).read_text())
            others = iter([(case.name, earlier[case.name], 0.0) for case in todo])
        else:
            tree = stack.enter_context(sources(options.other))
            others = results(tree, todo, given)
        here = results(HERE, todo, given)
        for (name, old, _), (_, new, seconds) in zip(others, here, strict=True):
            found = verdict(old, new)
            kept[name] = new
            failed += not found.startswith("same")
            print(f"{name}: {found} ({seconds:.1f} s)", flush=True)
    if options.keep:
        options.keep.write_text(json.dumps(kept, indent=0))
    print(f"{failed} failed" if failed else f"all {len(kept)} cases the same")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(work() if sys.argv[1:] == ["--work"] else main())
