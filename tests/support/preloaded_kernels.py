"""What interpreted kernels need before their first launch, in the process that they are forked from.

With TRITON_INTERPRET=1; see `tests.support.distributed`.
"""

import gc
import sys

import pytest  # noqa: F401 - by the modules of tests
import torch.distributed.tensor  # noqa: F401 - by `torch.testing.assert_close`
import triton.compiler.code_generator  # noqa: F401 - by the first launch
from triton.runtime.interpreter import InterpretedFunction

import zeco_train.kernels.adamw
import zeco_train.kernels.pack
import zeco_train.kernels.rows
import zeco_train.ops.delta.kernels.launch
import zeco_train.ops.gated_norm.kernels
import zeco_train.ops.gla.kernels.launch
import zeco_train.ops.gsa.kernels
import zeco_train.ops.hgrn.kernels
import zeco_train.ops.mamba1.kernels
import zeco_train.ops.mamba2.kernels
import zeco_train.ops.scalar_decay.kernels.launch
import zeco_train.ops.short_conv.kernels
import zeco_train.sp.exchange  # noqa: F401
from tests.support.interpreter import quicken

quicken()
for name in [name for name in sys.modules if name.startswith(("zeco_train.", "triton.language."))]:
    for member in [*vars(sys.modules[name]).values()]:
        if isinstance(member, InterpretedFunction):
            member.rewrite()
# The processes share these objects' memory; a collection would visit, and so copy, all of it.
gc.collect()
gc.freeze()
