"""The `train` command: compose the configuration, build, train."""

from __future__ import annotations

from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING

from models.spec import spec_of
from zeco_train.config.schema import describe, load_config
from zeco_train.lifecycle.end import Advice, Job, run_job
from zeco_train.system.command import explained_if_missing, quick_imports
from zeco_train.system.numbers import compact
from zeco_train.system.signals import exit_code

if TYPE_CHECKING:
    from zeco_train.training.trainer import Trainer

_ADVICE = Advice(
    lost_peer="nothing more was saved, the same command goes on from the last checkpoint",
    memory="a shorter data.seq_len, a smaller data.micro_batch, or more ranks for a sequence need less",
    timeout_key="parallel.timeout_seconds",
)


def main(arguments: list[str]) -> int:
    """Run `train.py` with Hydra overrides as arguments; returns the process's exit code."""
    return run_job(partial(_train, arguments), _ADVICE)


def _train(arguments: list[str], job: Job) -> int:
    if {"-h", "--help"} & set(arguments):
        if job.launch.rank == 0:
            print(describe([a for a in arguments if a not in ("-h", "--help")]))
        return 0
    config = load_config(arguments)
    # After the help and the checks of the arguments, which need none of it: these imports take a second.
    with explained_if_missing(), quick_imports():
        from zeco_train.training.build import load_trainer
        from zeco_train.training.checks import join_ranks
        from zeco_train.training.opening import open_run
    with job.joining(timedelta(seconds=config.parallel.timeout_seconds)):
        mesh = join_ranks(config, job.launch)
    job.enter("opening data and the run's folder")
    run = open_run(config, arguments, mesh)
    # Closed in reverse order: the lock on the folder is released last, when nothing writes there any more.
    job.closing.callback(run.release)
    job.keep_evidence(run.log)
    job.enter("building the model")
    trainer = load_trainer(run, mesh, job.watchdog)
    recorder, progress = trainer.recorder, trainer.progress
    job.closing.callback(recorder.close)
    job.closing.callback(trainer.profiler.close)
    job.closing.callback(trainer.loader.close)
    job.closing.callback(trainer.checkpointer.close)
    if trainer.is_finished:
        recorder.exit_code = 0
        recorder.note(f"the run in {run.path} has finished its {progress.step} steps; nothing to do")
        return 0
    recorder.note(_banner(trainer))
    stopped_by = trainer.train()
    trainer.step.forward.exchange.drain()
    summary = recorder.summarise()
    if stopped_by is not None:
        recorder.exit_code = exit_code(stopped_by)
        done = f"after step {progress.step}: saved" if progress.step else "before the first step was done"
        done += ", but not validated" if progress.step >= config.train.steps else ""
        summary = f"{stopped_by.name} {done}; the same command goes on from there"
        job.report_stop(summary)
    if summary is not None:
        recorder.note(summary + ", not saved (checkpoint.final=false)" * (not trainer.checkpointer.is_saved(progress)))
    return 0 if stopped_by is None else exit_code(stopped_by)


def _banner(trainer: Trainer) -> str:
    config, mesh, step = trainer.config, trainer.step.mesh, trainer.progress.step
    model, parameters = config.model, spec_of(config.model).num_parameters
    start = f"from step {step}" if step else "from the start"
    has_late_validation = not (config.train.eval_every or trainer.validation.is_empty)
    late = ", validation after the last step (train.eval_every=0)" * has_late_validation
    return (
        f"{config.name}: {model.name} ({compact(parameters)} parameters, {config.train.dtype.value}) with "
        f"sp={config.sp.backend.value}, {mesh.dp_size} × {mesh.sp_size} ranks (dp × sp) on {mesh.device.type}, "
        f"{config.parallel}; {config.data.global_batch} sequence{'s' * (config.data.global_batch != 1)} of "
        f"{config.data.seq_len:,} tokens a step, {start}{late}"
    )
