"""What the trainers of other libraries need around an attached model.

All ranks of a sequence read the same batch, which the collator cuts.

A rank's loss is the sum over its own labels, divided by the number of labels of the whole sequence: the ranks' losses
and gradients add up. Averaged over ranks they need the group's size as a factor (`attached.size * loss`), and where
several groups train on sequences of their own, the number of labels of all of them (`count_labels`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from zeco_train.attach.attached import Attached
from zeco_train.attach.forward import AttachError

_COUNT = "num_items_in_batch"


def count_labels(parts: Sequence[dict[str, Any]], replicas: dist.ProcessGroup | None = None) -> None:
    """Give the micro-batches of a step the number of labels by which their losses add up to one mean over all labels.

    Collective over `replicas`. With n labels in all micro-batches of the group's sequences, the number is n; with
    replicas, whose gradients are averaged, it is the mean of their n.

    Args:
        parts: of `Attached.shard`, one a micro-batch; their `num_items_in_batch` is replaced.
        replicas: the ranks with the same slices of other sequences, one of each group.
    """
    total = torch.stack([torch.as_tensor(part[_COUNT]) for part in parts]).sum().double()
    if replicas is not None:
        total = total.to(parts[0]["input_ids"].device)
        dist.all_reduce(total, group=replicas)
        total = total / dist.get_world_size(replicas)
    for part in parts:
        part[_COUNT] = total.float()


def of_slice(attached: Attached, input_ids: Tensor, position_ids: Tensor | None = None) -> dict[str, Any]:
    """The arguments of an attached model for slices that a trainer has cut, as torchtitan does; without labels.

    Args:
        input_ids: [B, t] consecutive tokens of this rank, as many on each rank of the group.
        position_ids: [B, t] or [1, t]; where they restart at 0, documents begin, so that all ranks' positions are
            gathered, which is collective. None: positions in the sequence, of one document.
    """
    whole = {"input_ids": input_ids.new_zeros(input_ids.shape[0], input_ids.shape[1] * attached.size)}
    if position_ids is not None:
        parts = [torch.empty_like(position_ids) for _ in range(attached.size)]
        dist.all_gather(parts, position_ids.contiguous(), group=attached.group)
        whole["position_ids"] = torch.cat(parts, 1)
    return {**attached.shard(whole), "input_ids": input_ids}


def prepare_trainer(trainer: Any, attached: Attached) -> None:
    """Let a Trainer of transformers, or of a library that builds on it as TRL, train an attached model.

    Its data loaders give all ranks of a sequence the same rows, and its collator cuts the batch. The Trainer itself
    counts labels over ranks and multiplies the loss by the number of processes, since DDP and FSDP average gradients.

    Collective over all processes.

    Args:
        trainer: after its construction, before `train`; `trainer.model` is the attached model.
        attached: its groups are consecutive ranks, as {0, 1} and {2, 3}.

    Raises:
        AttachError: a setting under which the loss would be another one.
    """
    args, accelerator = trainer.args, trainer.accelerator
    refused = {
        # Without GPUs, accelerate joins the processes only with use_cpu=True; else each trains alone.
        "num_processes": (accelerator.num_processes != dist.get_world_size(), "must be all; on CPUs, set use_cpu=True"),
        "average_tokens_across_devices": (not args.average_tokens_across_devices, "must be true: each rank has a part"),
        "label_smoothing_factor": (args.label_smoothing_factor, "must be 0: it would shift the labels within a slice"),
        "neftune_noise_alpha": (args.neftune_noise_alpha, "must be None: the noise is larger in a shorter slice"),
        "model": (not trainer.model_accepts_loss_kwargs, "must take num_items_in_batch, so that ranks' losses add up"),
        "compute_metrics": (trainer.compute_metrics, "must be None: a rank has logits of its own tokens"),
        # TRL computes it of a rank's own tokens.
        "router_aux_loss_coef": (getattr(trainer, "aux_loss_enabled", False), "must be 0: it is no sum over ranks"),
        "compute_loss_func": (trainer.compute_loss_func, "must be None: it gets labels that are shifted already"),
        "parallelism_config": (
            accelerator.parallelism_config,
            "must be None: accelerate would cut each slice again (cp), or leave that to DeepSpeed (sp)",
        ),
    }
    for name, (is_set, rule) in refused.items():
        if is_set:
            raise AttachError(f"{name}: {rule}")
    ranks = dist.get_process_group_ranks(attached.group)
    if ranks != [*range(ranks[0], ranks[0] + attached.size)] or ranks[0] % attached.size:
        raise AttachError(f"group: accelerate gives consecutive ranks the same batch, not the ranks {ranks}")
    collate = trainer.data_collator
    trainer.data_collator = lambda rows: attached.shard(collate(rows))
    predict = trainer.prediction_step

    def prediction_step(model: Any, inputs: Any, prediction_loss_only: bool, **kwargs: Any) -> tuple[Any, ...]:
        if not prediction_loss_only:
            raise AttachError("prediction_loss_only: must be true: a rank has logits of its own tokens")
        loss, *others = predict(model, inputs, prediction_loss_only, **kwargs)
        if loss is None:
            raise AttachError("labels: missing in the data for evaluation, which gives a loss only")
        dist.all_reduce(loss, group=attached.group)
        # Of the last losses that it gathers, Trainer takes one for each sequence that is left, not one of each rank.
        if (loader := accelerator.gradient_state.active_dataloader) and loader.end_of_dataloader:
            loader.remainder *= attached.size
        return loss / attached.size, *others

    trainer.prediction_step = prediction_step
    shape = dist.get_world_size() // attached.size, attached.size
    # Only of data loaders: accelerate's own meshes come with one of its ways to cut sequences.
    mesh = init_device_mesh(accelerator.device.type, shape, mesh_dim_names=("dp_replicate", "cp"))
    accelerator._prepare_device_mesh = lambda: mesh
    # Where the first rank deals batches out, all ranks get rows of their own.
    accelerator.dataloader_config.dispatch_batches = False
