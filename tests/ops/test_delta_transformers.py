"""Delta rules against code that is not this project's: transformers' chunked rule for Qwen3-Next, in fp32 on a CPU."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.support.operator_cases import expected, make, operands_of, sharded
from tests.support.transformers_alone import in_transformers

# Importing transformers' model takes 8 s of CPU time.
pytestmark = [pytest.mark.numeric, pytest.mark.slow]

# fp32, other chunks of other sums; measured 1.6e-6.
TOLERANCE = 4e-6
# Their scale is K^-1/2.
_THEIRS = """
import sys, torch
from transformers.models.qwen3_next.modeling_qwen3_next import torch_chunk_gated_delta_rule
(q, k, v, g, beta, state), do, grad = torch.load(sys.argv[1])
leaves = [x.requires_grad_() for x in (q, k, v, g, beta, state)]
o, end = torch_chunk_gated_delta_rule(q, k, v, g, beta, initial_state=state, output_final_state=True)
found = torch.autograd.grad([o, end], leaves, [do, grad])
torch.save([o.detach(), end.detach(), *found], sys.argv[2])
"""


def test_rule_and_gradients_equal_those_of_transformers(tmp_path: Path) -> None:
    """Also over simulated ranks, which their function does not know."""
    # Their heads share nothing, and their decays must not underflow.
    values = make("gated_delta", 200, "weak", G=4)
    narrow = {key: x.float() for key, x in values.items()}
    given, results = tmp_path / "given.pt", tmp_path / "results.pt"
    operands = [*operands_of("gated_delta", narrow).values(), narrow["carry_in"]]
    torch.save((operands, narrow["do"], narrow["dcarry_out"]), given)
    in_transformers(_THEIRS, str(given), str(results))
    names = ("o", "carry_out", "dq", "dk", "dv", "dg", "dbeta", "dcarry_in")
    theirs = dict(zip(names, torch.load(results), strict=True))
    ours, exact = sharded("gated_delta", narrow, [0, 30, 128, 200]), expected("gated_delta", values)
    for name, x in theirs.items():
        assert (ours[name] - x).norm() <= TOLERANCE * x.norm(), name
        assert (x - exact[name]).norm() <= TOLERANCE * exact[name].norm(), name
