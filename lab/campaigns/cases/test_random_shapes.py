"""The kernels at random head dims, lengths, decays and strides under Triton's interpreter, in bf16 and fp32.

Cases, guard bands and limits are those of the campaign that runs on GPUs (`lab.campaigns.operator_shapes`). All have
at least three chunks. The interpreter runs the kernels that a GPU runs, with their tiles and masks, and rounds as they
do; what it cannot see is the code that ptxas makes of them (`lab.campaigns.descriptors`).
"""

from __future__ import annotations

import pytest

from lab.campaigns.operator_shapes import DELTA, Case, draw, errors_of
from tests.support import interpreter
from tests.support.distributed import run_distributed
from zeco_train.ops.operator import Target, assume

pytestmark = [pytest.mark.campaign, pytest.mark.numeric]

WITH_KERNELS = ("gla", "gsa", "scalar_decay", "fixed_decay", *DELTA)
# Narrower than a tile, just beside one, and of more tiles than one; the last two take longer.
PAIRS = [(64, 8), (40, 8), (1, 1), (5, 72), (33, 20), (16, 4), (72, 5), (24, 40), (130, 17), (65, 140)]
LENGTHS = (129, 130, 150, 192, 193)


def _failures(rank: int, world_size: int, cases: list[Case]) -> list[str]:
    interpreter.patch_bf16()
    interpreter.skip_overflow_checks()
    wrong = []
    with assume(Target("cuda")):
        for case in cases:
            off = {name: error for name, error in errors_of(case).items() if not error <= case.limit(name)}
            if off:
                wrong.append(f"{case}: {off}")
    return wrong


CASES = {name: draw(7, 20, [name], PAIRS, LENGTHS, ()) for name in WITH_KERNELS}
# Channels and states; a token takes longer than elsewhere.
OF_CHANNELS = draw(7, 20, ["mamba1"], [(5, 4), (33, 16), (3, 1), (40, 5)], (1, 15, 17, 33, 65), ())


# Of each operator and dtype that with the fewest tiles.
SMALL = [
    min((case for case in cases if case.dtype == dtype), key=lambda case: case.B * case.H * case.T * case.K * case.V)
    for cases in (*CASES.values(), OF_CHANNELS)
    for dtype in ("bf16", "fp32")
]


@pytest.mark.parametrize("cases", [SMALL, *CASES.values(), OF_CHANNELS], ids=["small", *CASES, "mamba1"])
def test_kernels_match_fp64_at_random_shapes(cases: list[Case], monkeypatch: pytest.MonkeyPatch) -> None:
    # The interpreter is chosen when Triton is imported, so the kernels run in a separate process.
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert run_distributed(_failures, 1, cases, fresh=True) == [[]]


def test_cases_are_of_every_kind() -> None:
    cases = [case for cases in CASES.values() for case in cases]
    assert len(cases) == 140
    assert {case.dtype for case in cases} == {"bf16", "fp32"}
    assert min(case.T for case in cases) > 128
    assert any(case.documents for case in cases)
    assert {case.beta for case in cases if case.operator in DELTA} == {0.0, 0.5, 1.0, 2.0}
    assert {"strong", "vanishing", "resets", "erased", "none"} <= {case.decays for case in cases}
