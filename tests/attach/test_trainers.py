"""What other trainers need: equal batches on the ranks of a sequence, the number of labels, and settings refused."""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from tests.support.attach_models import build, make_batch
from tests.support.distributed import on_ranks
from zeco_train.attach import AttachError, attach
from zeco_train.attach.trainers import count_labels, prepare_trainer


@pytest.mark.numeric
@on_ranks(4)
def test_ranks_of_a_sequence_read_the_same_rows_and_count_labels_of_all(rank: int, size: int) -> None:
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="4", LOCAL_WORLD_SIZE="4")
    from transformers import Trainer, TrainingArguments

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "sp"))
    model = build("qwen3", num_hidden_layers=1).float()
    attached = attach(model, mesh["sp"].get_group())
    # A replica's second micro-batch has fewer labels than its first.
    batches = [make_batch(1, length) for length in (40 + 10 * mesh["dp"].get_local_rank(), 20)]
    parts = [attached.shard(batch) for batch in batches]
    own = torch.tensor(sum(int((batch["labels"][:, 1:] != -100).sum()) for batch in batches))
    count_labels(parts, mesh["dp"].get_group())
    dist.all_reduce(own, group=mesh["dp"].get_group())
    assert [float(part["num_items_in_batch"]) for part in parts] == [float(own) / 2] * 2

    rows = [{"input_ids": torch.full((8,), number), "labels": torch.full((8,), number)} for number in range(16)]
    sizes = {"per_device_train_batch_size": 2, "per_device_eval_batch_size": 2}
    arguments = TrainingArguments("out", use_cpu=True, report_to=[], seed=3, **sizes)
    trainer = Trainer(model=model, args=arguments, train_dataset=rows)
    prepare_trainer(trainer, attached)
    with pytest.raises(AttachError, match=r"^prediction_loss_only"):
        trainer.predict(rows)
    with pytest.raises(AttachError, match=r"^labels"):
        trainer.evaluate([{"input_ids": row["input_ids"]} for row in rows])
    # Of the last step two sequences are left, as many as a replica has.
    with attached.off(), torch.no_grad():
        wanted = model(**{name: torch.stack([row[name] for row in rows[:6]]) for name in rows[0]}).loss
    assert trainer.evaluate(rows[:6])["eval_loss"] == pytest.approx(float(wanted), rel=1e-6)
    found = [batch["input_ids"] for batch in trainer.get_train_dataloader()]
    assert {tuple(ids.shape) for ids in found} == {(2, 4)}
    everyone: list[Any] = [None] * size
    dist.all_gather_object(everyone, [ids[:, 0].tolist() for ids in found])
    assert everyone[0] == everyone[1] != everyone[2] == everyone[3]
    assert sorted(row for batch in everyone[0] + everyone[2] for row in batch) == [*range(16)]


@pytest.mark.parametrize(
    ("field", "changes"),
    [
        ("num_processes", {"num_processes": 2}),
        ("average_tokens_across_devices", {"args": {"average_tokens_across_devices": False}}),
        ("label_smoothing_factor", {"args": {"label_smoothing_factor": 0.1}}),
        ("neftune_noise_alpha", {"args": {"neftune_noise_alpha": 5.0}}),
        ("model", {"model_accepts_loss_kwargs": False}),
        ("compute_loss_func", {"compute_loss_func": print}),
        ("compute_metrics", {"compute_metrics": print}),
        ("router_aux_loss_coef", {"aux_loss_enabled": True}),
        ("parallelism_config", {"parallelism_config": object()}),
    ],
)
@on_ranks(1)
def test_settings_that_would_change_the_loss_are_refused(rank: int, size: int, field: str, changes: Any) -> None:
    args = {"average_tokens_across_devices": True, **dict.fromkeys(("label_smoothing_factor", "neftune_noise_alpha"))}
    args |= changes.pop("args", {})
    accelerator = SimpleNamespace(parallelism_config=changes.pop("parallelism_config", None))
    accelerator.num_processes = changes.pop("num_processes", 1)
    own = {"model_accepts_loss_kwargs": True, "compute_loss_func": None, "compute_metrics": None}
    trainer = SimpleNamespace(args=SimpleNamespace(**args), accelerator=accelerator, **{**own, **changes})
    with pytest.raises(AttachError, match=f"^{field}: must"):
        prepare_trainer(trainer, SimpleNamespace())  # type: ignore[arg-type]
