"""Foreign models, exact over the ranks that share their sequences (docs/attach.md).

    attached = attach(model, group)                      # an unmodified model of transformers or fla
    loss = model(**attached.shard(batch)).loss           # of this rank's tokens; all ranks' losses sum to the loss
    loss.backward()
    attached.reduce_gradients()                          # without DDP or FSDP
    verify(attached, batch).problems                     # against one device, every gradient

The package imports neither `data` nor `models`, so a project may have packages of these names.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from zeco_train.attach.attached import Attached, attach
    from zeco_train.attach.forward import AttachError
    from zeco_train.attach.proof import Proof, verify

__all__ = ["AttachError", "Attached", "Proof", "attach", "verify"]


def __getattr__(name: str) -> Any:
    # On first use: the command reports a missing package in a line of its own.
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from zeco_train.attach import proof

    return getattr(proof, name)
