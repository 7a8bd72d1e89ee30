"""ZeCO-Train: exact long-context training of gated linear attention models with sequence parallelism.

From Python (docs/from_python.md): `load` gives a trained model, `open_store` a token store, and `functional` has every
operator as a plain function. Nothing of it is imported before its first use.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from zeco_train.version import __version__

if TYPE_CHECKING:
    from data.store import TokenStore
    from zeco_train import functional
    from zeco_train.errors import ZecoError
    from zeco_train.generate.generator import Completion
    from zeco_train.model import Model, load

    open_store = TokenStore.open

# Public, by semantic versions, with the names in `functional.__all__`; docs/from_python.md says what that covers.
__all__ = ["Completion", "Model", "ZecoError", "__version__", "functional", "load", "open_store"]
_PLACES = {
    "Completion": "zeco_train.generate.generator:Completion",
    "Model": "zeco_train.model:Model",
    "ZecoError": "zeco_train.errors:ZecoError",
    "load": "zeco_train.model:load",
    "open_store": "data.store:TokenStore.open",
}


def __getattr__(name: str) -> Any:
    if name == "functional":
        return importlib.import_module("zeco_train.functional")
    if name not in _PLACES:
        raise AttributeError(f"module 'zeco_train' has no attribute {name!r}; it has {', '.join(__all__)}")
    module, _, path = _PLACES[name].partition(":")
    if name != "ZecoError":
        from zeco_train.system.command import import_own_packages

        import_own_packages()
    found: Any = importlib.import_module(module)
    for part in path.split("."):
        found = getattr(found, part)
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
