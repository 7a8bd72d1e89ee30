"""Question: of faults planted in a copy of the code, how many do `verify`, or the tests, notice?
Command: python -m lab.campaigns.mutants [--judge tests --map FILE] [--only NAME …] [KEY=VALUE of verify …]; --list
Date: 2026-11-25 and 27, 96 faults of a grid of 244, at 55c9de0 and after `verify` and tests had changed; 96 of 248
Answer: of 95 that change results `verify` 33, then 95; tests 90, then 95; of the 96 `verify` 96. lab/README.md.

A fault is caught if the judge fails, or does not end in four times its time without a fault. Each campaign first runs
its judge without a fault, with a probe before each fault's statement: one that is not executed is not caught. Tests are
run by file, those only that execute the statement; `--map` keeps which, `--out` the outcomes, which are not judged
again.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from lab.campaigns.grid import Fault, catalogue, draw, places_by_kinds
from lab.campaigns.judges import Copy, Judge, Outcome, Tests, Verify


def main() -> int:
    """Run a campaign."""
    options = _options()
    faults = catalogue()
    chosen = draw(faults, options.number or len(faults), options.seed)
    if options.only:
        chosen = [fault for fault in faults if {fault.id, fault.place} & set(options.only)]
    if options.list:
        print(f"{places_by_kinds(faults)}\n")
        print("\n".join(f"{fault.id:36}{fault.kind:15}{fault.when:13}{fault.wrong}" for fault in chosen))
        return 0
    _import_torch()
    outcomes = _stored(options.out)
    with tempfile.TemporaryDirectory(prefix="zeco-mutants-") as folder:
        copy = Copy(Path(folder, "judged"))
        judge: Judge = Tests(options.map) if options.judge == "tests" else Verify(options.settings)
        judge.explore(copy, faults)
        for fault in chosen:
            if fault.id in outcomes:
                continue
            with copy.planted(fault):
                outcomes[fault.id] = found = judge.run(copy, fault)
            verdict = "caught" if found.caught else "SURVIVED"
            print(f"{verdict:9}{found.seconds:6.0f} s  {fault.id:36}{found.by[:120]}", flush=True)
            if options.out is not None:
                _store(options, chosen, outcomes)
    for of in ("kind", "place", "when"):
        print(f"\n{shares(chosen, outcomes, of)}")
    survivors = [fault for fault in chosen if not outcomes[fault.id].caught]
    print("\nsurvivors:", *(f"  {fault.id}: {fault.unchanged or fault.wrong}" for fault in survivors), sep="\n")
    return 0


def shares(faults: Sequence[Fault], outcomes: dict[str, Outcome], of: str) -> str:
    """Numbers of faults that change a result, and of those caught, by place, kind or condition."""
    rows = [f"{of:16}{'faults':>8}{'caught':>8}{'share':>8}"]
    counted = [fault for fault in faults if not fault.unchanged]
    for name in (*dict.fromkeys(getattr(fault, of) for fault in counted), "all"):
        members = [fault for fault in counted if name in ("all", getattr(fault, of))]
        caught = sum(outcomes[fault.id].caught for fault in members)
        rows.append(f"{name:16}{len(members):8}{caught:8}{caught / len(members):8.0%}")
    return "\n".join(rows)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="plant faults, and see whether they are noticed")
    parser.add_argument("settings", nargs="*", metavar="KEY=VALUE", help="of verify")
    parser.add_argument("--list", action="store_true", help="print the grid and what would be planted")
    parser.add_argument("--judge", choices=["verify", "tests"], default="verify")
    parser.add_argument("--number", type=int, default=96, help="of faults drawn; 0: all")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", nargs="+", default=[], metavar="NAME", help="places or faults, in place of a draw")
    parser.add_argument("--map", type=Path, metavar="FILE", help="which tests execute which fault; made if missing")
    parser.add_argument("--out", type=Path, metavar="FILE", help="results, JSON")
    options = parser.parse_args()
    if options.settings and options.judge == "tests":
        parser.error("settings are of verify")
    return options


def _import_torch() -> None:
    # Not the project, which each fork imports from the copy.
    import hydra  # noqa: F401
    import torch._dynamo
    import torch.distributed.checkpoint
    import torch.distributed.fsdp

    torch.set_num_threads(1)


def _stored(file: Path | None) -> dict[str, Outcome]:
    if file is None or not file.exists():
        return {}
    rows = json.loads(file.read_text())["faults"]
    return {row["id"]: Outcome(row["caught"], row["by"], row["seconds"]) for row in rows}


def _store(options: argparse.Namespace, chosen: Sequence[Fault], outcomes: dict[str, Outcome]) -> None:
    judged = [fault for fault in chosen if fault.id in outcomes]
    rows = [{"id": x.id, "place": x.place, "kind": x.kind, "when": x.when, **asdict(outcomes[x.id])} for x in judged]
    settings = {"judge": options.judge, "settings": options.settings, "seed": options.seed}
    options.out.write_text(json.dumps({**settings, "faults": rows}, indent=1) + "\n")


if __name__ == "__main__":
    sys.exit(main())
