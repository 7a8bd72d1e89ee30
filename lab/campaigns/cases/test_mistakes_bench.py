"""More mistakes in arguments of `bench model`."""

from __future__ import annotations

import pytest

from tests.bench import test_model as gate
from zeco_train.sp.backend_registry import SHARING

pytestmark = pytest.mark.campaign


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["model.num_layer=3"], "model.num_layer=3: unknown key of mixer gla; did you mean model.num_layers?"),
        (["model.num_heads=2"], "model.num_heads=2: write heads=[…] here"),
        (["model.name=a/b"], "model.name=a/b: names the figures; must be a plain name without /"),
        (["mixers=[gla,ring]"], "model.mixer=ring: must be one of gla, linear, "),
        (["mixers=[gla,retnet]", "model.gate_low_rank_dim=8"], "unknown key of mixer retnet"),
        (["model=gla_125m", "mixers=[retnet]"], "model.mixer=retnet: no configs/model/retnet_125m.yaml"),
        (["heads=[3]"], "model.num_heads=3: must divide hidden_size"),
        (["heads=[]"], "heads=[]: must be a list of numbers ≥ 1"),
        (["every=[2]", "model.attn.every=4"], "model.attn.every=4: is one of every=[…] already; leave it out"),
        (["every=[2,2]"], "every=[2, 2]: must be a list of different ones"),
        (["attention=ring"], "sp.attention=ring: would be ignored; it needs model.attn.every"),
        (["segments=3"], "tokens=16384: must divide by segments=3"),
        (["segments=512"], "check_tokens=256: must divide by segments=512"),
        (["steps=0"], "steps=0: must be ≥ 1"),
        (["strategy=hsdp"], "strategy=hsdp: must be ddp, zero1, zero2 or zero3"),
        (["variants=[copy]"], f"variants=copy: must be one of dp, products, {', '.join(SHARING)}, fla"),
        (["variants=[fla:fast]"], "fla takes :no_optimizer and :compile"),
        (["variants=[dp:compile]"], "dp takes :no_optimizer"),
        (["device=cpu", "variants=[fla]"], "variants=fla: flash-linear-attention's kernels need CUDA"),
    ],
)
def test_invalid_arguments_print_one_error_line(
    arguments: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    gate.test_invalid_arguments_print_one_error_line(arguments, says, capsys)
