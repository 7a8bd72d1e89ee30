"""Question: are results right with more than 2^31 elements in values and chunk states, where 32-bit offsets overflow?
Command: python -m lab.huge [--dtypes fp32 bf16] [--seed N]; a GPU with 60 GB of memory in bf16, 110 in fp32
Date: recorded on 2026-11-22, lab/history.md (Verification)
Answer: yes, on one H200: the largest errors from float64 are those of ordinary lengths, fp32 4.4e-6 and bf16 3.5e-3.

Forward and backward of the default operator on 65,536 tokens of as many heads as it takes; the first, the middle and
the last head are compared with float64 on the CPU.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Sequence
from dataclasses import replace

import torch
import torch.nn.functional as F

from zeco_train.errors import ConfigError
from zeco_train.ops import CHUNK
from zeco_train.ops.operator_registry import DEFAULT
from zeco_train.sp.exchange import local_exchange
from zeco_train.system.command import Parser, docstring, errors_in_a_line
from zeco_train.system.signals import run_command
from zeco_train.verify import report
from zeco_train.verify.config import DTYPES, LIMITS
from zeco_train.verify.reference import ALONE, exact
from zeco_train.verify.report import Deviation, VerifyRow, deviations
from zeco_train.verify.runs import pieces, run_on_ranks
from zeco_train.verify.whole import STATES, Results, Whole, decay_rates

_TOKENS = 1 << 16
# The chunk states have K / CHUNK times as many elements as the values: with K ≥ CHUNK both are large enough.
_KEY_DIM = CHUNK
_ELEMENTS = 1 << 31


def huge_sequence(dtype: torch.dtype, seed: int, value_dim: int = 128, elements: int = _ELEMENTS) -> Whole:
    """A sequence on one rank whose values, and states at chunk boundaries, have more than `elements` elements."""
    heads = elements // (_TOKENS * value_dim) + 1
    whole = Whole(f"{seed} huge", DEFAULT, _TOKENS, 1, heads=heads, groups=heads, key_dim=_KEY_DIM, value_dim=value_dim)
    return replace(whole, carry=True, dtype=dtype, is_launched=True)


def huge_deviations(whole: Whole, device: torch.device) -> dict[str, Deviation]:
    """Forward and backward of all heads; deviations of the first, the middle and the last one."""
    part = _part(whole, device)
    results = run_on_ranks(whole, part, local_exchange(), 0)
    heads = sorted({0, whole.heads // 2, whole.heads - 1})
    chosen = {name: x[:, :, heads].cpu() for name, x in part.items()}
    (expected,) = exact(whole, ALONE, [chosen], [state[:, heads] for state in whole.ends])
    actual = {name: x[:, heads] if name in STATES else x[:, :, heads] for name, x in results.items()}
    return deviations({name: x.cpu() for name, x in actual.items()}, expected)


def _part(whole: Whole, device: torch.device) -> Results:
    # As of `Whole.part`, but created on the device, a few tokens at a time.
    generator = torch.Generator(device).manual_seed(sum(whole.name.encode()))
    shape = (1, whole.tokens, whole.heads)
    dims = {"q": whole.key_dim, "k": whole.key_dim, "v": whole.value_dim, "do": whole.value_dim}
    part = {name: torch.empty(*shape, dim, dtype=whole.dtype, device=device) for name, dim in dims.items()}
    part["g"] = torch.empty(*shape, whole.key_dim, device=device)
    rates = decay_rates(whole.heads, whole.key_dim).to(device)
    for start, stop in pieces(whole.tokens, 4096):
        for name, x in part.items():
            piece = x[:, start:stop]
            random = torch.randn(piece.shape, generator=generator, device=device)
            piece.copy_(F.logsigmoid(random) * rates if name == "g" else random)
    return {name: part[name] for name in ("q", "k", "v", "g", "do")}


@errors_in_a_line
def main(arguments: Sequence[str]) -> int:
    """Returns the exit code, 1 if a result is off."""
    parser = Parser(prog="python -m lab.huge", description=docstring(sys.modules[__name__]))
    parser.add_argument("--dtypes", nargs="+", choices=["fp32", "bf16"], default=["fp32", "bf16"])
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        raise ConfigError("device", "cpu", "needs a CUDA device with about 60 GB (bf16) or 110 GB (fp32) of memory")
    torch.set_float32_matmul_precision("highest")
    rows = []
    print(report.header(), flush=True)
    for dtype in options.dtypes:
        whole = huge_sequence(DTYPES[dtype], options.seed)
        found = huge_deviations(whole, torch.device("cuda"))
        rows.append(VerifyRow(dtype, whole.tokens, 1, whole.layout, "one device", (found,), LIMITS[dtype]))
        print(report.line(rows[-1]), flush=True)
        gc.collect()  # autograd's functions hold tensors in cycles
        torch.cuda.empty_cache()
    print(report.summary(rows))
    return int(any(row.failures for row in rows))


if __name__ == "__main__":
    run_command("lab.huge")
