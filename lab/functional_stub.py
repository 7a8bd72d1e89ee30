"""Write the stub of `zeco_train.functional`, which shows its functions to editors and type checkers.

    python -m lab.functional_stub

To be run when an operator is new or its documentation has changed; `tests/sp/test_functions.py` compares the two.
"""

from __future__ import annotations

import inspect
import textwrap
from inspect import Parameter
from pathlib import Path

from zeco_train import functional
from zeco_train.sp.functions import FUNCTIONS


def stub() -> str:
    """Its text."""
    head = [
        '"""Every operator as a differentiable function. Made by `python -m lab.functional_stub`; do not edit."""',
        "",
        "from collections.abc import Sequence",
        "",
        "from torch import Tensor",
        "",
        "from zeco_train.sp.functions import Ranks as Ranks",
        "from zeco_train.sp.functions import connect as connect",
        "",
        "__all__: list[str]",
    ]
    for name, function in FUNCTIONS.items():
        signature = inspect.signature(function)
        first = [p for p in signature.parameters.values() if p.kind is Parameter.POSITIONAL_OR_KEYWORD]
        others = [p for p in signature.parameters.values() if p.kind is Parameter.KEYWORD_ONLY]
        lines = [f"{p.name}: {p.annotation}," for p in first] + ["*,"]
        lines += [f"{p.name}: {p.annotation} = {p.default}," for p in others]
        assert function.__doc__ is not None
        text = '"""' + function.__doc__.rstrip() + '\n"""'
        head += ["", f"def {name}(", textwrap.indent("\n".join(lines), "    "), f") -> {signature.return_annotation}:"]
        head += [textwrap.indent(text, "    ")]
    return "\n".join(head) + "\n"


if __name__ == "__main__":
    Path(functional.__file__).with_suffix(".pyi").write_text(stub())
