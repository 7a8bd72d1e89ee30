"""One optimizer step: forward and backward passes of its micro-batches, then the update.

The host only launches work here. It synchronises only to read a step's numbers (`Numbers.read`), which are ready before
the optimizer has run, so the next step is launched meanwhile. Skipping a non-finite step is therefore decided on the
device: the weights are not changed if loss or norm is not finite.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from data.reader import Batch
from models.language_model import LanguageModel
from zeco_train.distributed.mesh import ProcessMesh
from zeco_train.distributed.parallelize import Strategy, begin_micro_batch, global_norm
from zeco_train.ops.seam import StateScan
from zeco_train.ops.segments import LayerStates
from zeco_train.training.forward import SequenceForward


class Numbers:
    """Loss and gradient norm of a step, copied to the host asynchronously."""

    def __init__(self, loss: Tensor, norm: Tensor) -> None:
        both = torch.stack([loss.double(), norm.double()])
        self._values, self._ready = both, None
        if both.is_cuda:
            # A copy to pageable memory would make the host wait.
            self._values = torch.empty_like(both, device="cpu", pin_memory=True)
            self._values.copy_(both, non_blocking=True)
            self._ready = torch.cuda.Event()
            self._ready.record()

    def read(self) -> tuple[float, float]:
        """Wait for the copy; returns loss and norm."""
        if self._ready is not None:
            self._ready.synchronize()
        loss, norm = self._values.tolist()
        return loss, norm


class TrainingStep:
    """The work of one optimizer step. All methods are collective.

    Args:
        model: parallelised (`zeco_train.distributed.parallelize`).
        optimizer: reads `found_inf` and `grad_scale`, as torch's fused optimizers do.
        scan: passes states between the shards of a sequence.
        mesh: the ranks.
        strategy: how the model is parallelised.
        grad_clip: largest global gradient norm; 0 clips nothing.
        tokens_per_step: of the global batch; a batch's own count of labels takes precedence.
        seq_len: of a whole sequence.

    Attributes:
        forward: the forward passes.
    """

    def __init__(
        self,
        model: LanguageModel,
        optimizer: torch.optim.Optimizer,
        scan: StateScan,
        mesh: ProcessMesh,
        *,
        strategy: Strategy,
        grad_clip: float,
        tokens_per_step: int,
        seq_len: int,
    ) -> None:
        self.model, self.optimizer, self.scan, self.mesh = model, optimizer, scan, mesh
        self.forward = SequenceForward(model, scan, mesh)
        self._strategy, self._grad_clip = strategy, grad_clip
        self._tokens_per_step, self._seq_len = tokens_per_step, seq_len

    def backward(
        self, segments: Sequence[Batch], *, last: bool, proceed: Callable[[], bool] = lambda: True
    ) -> Tensor | None:
        """Accumulate the gradient of one micro-batch.

        A first pass computes the states of all segments but the last; then each segment, last to first, is run forward
        and backward. The loss is the sum over this rank's tokens, divided by the labels of the *global* batch, so that
        the sum of gradients over all ranks and micro-batches is the gradient of the mean, however the batch is split.

        Args:
            segments: this rank's shards of the micro-batch's segments, in order; one if the sequence is not segmented.
            last: the optimizer step's last micro-batch.
            proceed: called before each pass over a segment; must return the same on all ranks.

        Returns:
            This rank's share of the loss, fp64, on the device; None if `proceed` returned False, and then the gradients
            are incomplete.
        """
        states = self._first_pass(segments, proceed)
        if states is None:
            return None
        loss = torch.zeros((), dtype=torch.float64, device=self.mesh.device)
        carry_grads: list[Tensor | None] = []
        for index in reversed(range(len(segments))):
            if not proceed():
                return None
            # Segments run last to first, so the first one completes the gradient.
            begin_micro_batch(self.model, self._strategy, last=last and index == 0)
            batch = segments[index]
            loss_sum = self.forward.loss(batch, self._seq_len, states[index])
            share = loss_sum / (batch.step_labels or self._tokens_per_step)
            outputs: list[Tensor] = [share]
            grads: list[Tensor | None] = [None]
            if carry_grads:
                outputs, grads = outputs + states[index].carry_out, grads + carry_grads
            torch.autograd.backward(outputs, grads)
            loss += share.detach()
            carry_grads = [carry.grad for carry in states[index].carry_in or ()]
            # Frees this segment's states, which earlier segments do not need.
            states.pop()
        return loss

    def loss(self, segments: Sequence[Batch]) -> Tensor:
        """Sum of the token losses of this rank's part of a micro-batch, without gradients."""
        return self.forward.total_loss(segments, self._seq_len)

    def update(self, loss: Tensor) -> Numbers:
        """Clip the gradient by its global norm and run the optimizer step, if loss and norm are finite.

        Args:
            loss: the sum of this rank's shares.

        Returns:
            The loss over all ranks, and the norm before clipping: the same on every rank.
        """
        dist.all_reduce(loss)
        norm = global_norm(self.model)
        # Before the optimizer's kernels are queued, so that reading does not wait for them.
        numbers = Numbers(loss, norm)
        # Fused optimizers divide gradients by `grad_scale`, and skip the step if `found_inf` is 1: torch's mechanism
        # for loss scaling. Separate clipping would be another pass over all gradients.
        self.optimizer.found_inf = (~(loss.isfinite() & norm.isfinite())).float()  # type: ignore[attr-defined]
        if self._grad_clip > 0:
            # 1e-6 as in `torch.nn.utils.clip_grad_norm_`.
            self.optimizer.grad_scale = ((norm + 1e-6) / self._grad_clip).clamp(min=1.0).float()  # type: ignore[attr-defined]
        self.optimizer.step()
        return numbers

    def zero_grad(self) -> None:
        """Free the gradients."""
        self.optimizer.zero_grad(set_to_none=True)

    def _first_pass(self, segments: Sequence[Batch], proceed: Callable[[], bool]) -> list[LayerStates] | None:
        """The incoming states of each segment, for its second pass; None if `proceed` returned False."""
        if len(segments) == 1:
            return [LayerStates()]
        states = []
        carries = self.forward.zero_carries(segments)
        for batch in segments[:-1]:
            if not proceed():
                return None
            first = LayerStates(carry_in=carries, want_carry=True)
            with torch.no_grad():
                self.forward.fill_states(batch, self._seq_len, first)
            states.append(LayerStates(first.received, _leaves(carries), want_carry=True))
            carries = first.carry_out
        return [*states, LayerStates(None, _leaves(carries))]


def _leaves(carries: Sequence[Tensor] | None) -> list[Tensor]:
    """Cut the autograd graph between segments; `backward` passes the gradients on."""
    return [carry.detach().requires_grad_() for carry in carries or ()]
