"""AdamW (Loshchilov & Hutter, 2019), fused."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.optim.adamw import adamw

from zeco_train.distributed.owned_matrices import local
from zeco_train.ops.operator import KernelRule
from zeco_train.training.optim.optimizer_spec import OptimizerSettings, OptimizerSpec, Parameters, decay_groups

if TYPE_CHECKING:
    from zeco_train.kernels.adamw import Updater

# Of parameters.
KERNELS = KernelRule((torch.float32,))


class FusedUpdate:
    """AdamW's update of many parameters: on CUDA in fp32 a launch of our kernel for all, elsewhere torch's fused one.

    Both can skip a step on the device. torch's writes the gradients back that it has divided by `grad_scale`, an eighth
    of its traffic; ours does not.
    """

    def __init__(self) -> None:
        self._updater: Updater | None = None

    def __call__(
        self,
        parameters: Sequence[Tensor],
        states: Sequence[dict[str, Tensor]],
        *,
        lr: float | Tensor,
        betas: tuple[float, float],
        eps: float,
        weight_decay: float,
        grad_scale: Tensor | None,
        found_inf: Tensor | None,
    ) -> None:
        """One step, in place; parameters, with gradients, are whole or this rank's shards.

        States have `step`, a scalar, `exp_avg` and `exp_avg_sq`. Gradients are divided by the scalar `grad_scale`; with
        `found_inf` 1 nothing is changed.
        """
        if not parameters:
            return
        grads = [gradient(parameter) for parameter in parameters]
        means, squares, steps = ([state[name] for state in states] for name in ("exp_avg", "exp_avg_sq", "step"))
        if not all(KERNELS.serves(parameter, parameter) for parameter in parameters):
            adamw(
                [*parameters], grads, means, squares, [], steps,
                fused=True, grad_scale=grad_scale, found_inf=found_inf, amsgrad=False, beta1=betas[0], beta2=betas[1],
                lr=lr, weight_decay=weight_decay, eps=eps, maximize=False,
            )  # fmt: skip
            return
        if self._updater is None:
            # Only where there is a GPU: the kernel imports Triton.
            from zeco_train.kernels.adamw import Updater

            self._updater = Updater()
        lists = [[local(tensor) for tensor in tensors] for tensors in (parameters, grads, means, squares)]
        own, own_grads, own_means, own_squares = lists
        self._updater.update(
            own, own_grads, own_means, own_squares, steps,
            lr=lr, betas=betas, eps=eps, weight_decay=weight_decay, grad_scale=grad_scale, found_inf=found_inf,
        )  # fmt: skip


class AdamW(torch.optim.AdamW):
    """`torch.optim.AdamW(…, fused=True)`, with its state and settings, updated by `FusedUpdate`.

    `found_inf` and `grad_scale` are scalars on the device, as for torch's fused optimizers; None: 0 and 1.
    """

    found_inf: Tensor | None = None
    grad_scale: Tensor | None = None

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings, fused=True)
        self._update = FusedUpdate()

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        assert closure is None
        for group in self.param_groups:
            parameters: list[Tensor] = []
            # It creates the states.
            self._init_group(group, parameters, [], [], [], [], [])
            self._update(
                parameters,
                [self.state[parameter] for parameter in parameters],
                **{name: group[name] for name in ("lr", "betas", "eps", "weight_decay")},
                grad_scale=self.grad_scale,
                found_inf=self.found_inf,
            )


def gradient(parameter: Tensor) -> Tensor:
    """The gradient of a parameter that took part in the step."""
    assert parameter.grad is not None, "every parameter takes part in every step"
    return parameter.grad


def _build(parameters: Parameters, settings: OptimizerSettings) -> AdamW:
    groups = decay_groups(parameters, settings.weight_decay)
    return AdamW(groups, lr=settings.lr, betas=settings.betas, eps=settings.eps)


def moments_bytes(elements: int, itemsize: int) -> int:
    """Two moments, and a step count in fp32."""
    return 2 * elements * itemsize + 4


ADAMW = OptimizerSpec(
    name="adamw",
    build=_build,
    state_bytes=lambda elements, itemsize, rule: moments_bytes(elements, itemsize),
    settings=("betas", "eps"),
)
