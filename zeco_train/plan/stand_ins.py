"""Stand-ins for modules that are not there, or take too long to import, and for kernels that are not to be launched."""

from __future__ import annotations

import contextlib
import importlib
import sys
import types
from collections.abc import Iterator, Mapping
from typing import Any

from zeco_train.ops.operator_registry import OPERATORS


# In place of a kernel, or of anything that Triton offers at import.
class _NoKernel:
    def __getitem__(self, grid: Any) -> _NoKernel:
        return self

    def __call__(self, *arguments: Any, **options: Any) -> _NoKernel:
        return self

    def __getattr__(self, name: str) -> _NoKernel:
        return self

    def __bool__(self) -> bool:
        return False


@contextlib.contextmanager
def _stand_ins(modules: Mapping[str, Any]) -> Iterator[None]:
    before = {name: sys.modules[name] for name in modules if name in sys.modules}
    sys.modules.update(modules)
    try:
        yield
    finally:
        for name in modules:
            del sys.modules[name]
        sys.modules.update(before)


@contextlib.contextmanager
def without_launches() -> Iterator[None]:
    """Kernels launch nothing; without Triton they are imported all the same."""
    try:
        from triton.runtime.jit import KernelInterface
    except ImportError:
        _import_kernels()
        yield
        return
    launch = KernelInterface.__getitem__
    KernelInterface.__getitem__ = lambda kernel, grid: _NoKernel()
    try:
        yield
    finally:
        KernelInterface.__getitem__ = launch


def _import_kernels() -> None:
    """Import them where Triton is missing."""
    triton: Any = types.ModuleType("triton")
    language: Any = types.ModuleType("triton.language")
    triton.jit, triton.knobs, triton.language = _NoKernel(), _NoKernel(), language
    runtime = types.SimpleNamespace(JITFunction=type("_NoFunction", (), {}), driver=None, _async_compile=None)
    language.__getattr__ = lambda name: _NoKernel()
    with _stand_ins({"triton": triton, "triton.language": language, "triton.runtime": runtime}):
        for one in OPERATORS.values():
            if one.cuda is not None:
                importlib.import_module(one.cuda.partition(":")[0])
        for name in ("ops.gated_norm.kernels", "ops.mamba2.kernels", "kernels.rows"):
            importlib.import_module(f"zeco_train.{name}")


@contextlib.contextmanager
def without_code_generator() -> Iterator[None]:
    """The partitioner needs one module of Inductor's that imports all of its code generator, which takes a second."""
    of_partitioner, lowering = "torch._inductor.pattern_matcher", types.ModuleType("torch._inductor.lowering")
    if of_partitioner in sys.modules:
        yield
        return
    lowering.fallback_node_due_to_unsupported_type = None  # type: ignore[attr-defined]
    with _stand_ins({lowering.__name__: lowering}):
        importlib.import_module(of_partitioner)
    try:
        yield
    finally:
        # Another user imports it anew, with the code generator.
        del sys.modules[of_partitioner]
