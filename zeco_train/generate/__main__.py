"""The command `python -m zeco_train.generate`: find the model, join the ranks, load it, generate."""

from __future__ import annotations

from zeco_train.system.signals import run_command

if __name__ == "__main__":
    # Before the other imports, which take seconds.
    run_command("zeco_train.generate.__main__")

import signal
import sys
from collections.abc import Sequence
from dataclasses import asdict
from datetime import timedelta
from functools import partial

import torch.distributed as dist
from torch import Tensor

from models.spec import spec_of
from zeco_train.config.schema import Config, to_plain
from zeco_train.distributed.config import resolve_sp_size
from zeco_train.distributed.mesh import ProcessMesh, agree, find_device, join_alike
from zeco_train.errors import ConfigError, DataError
from zeco_train.generate.generator import Completion, Generator, Speed
from zeco_train.generate.options import Options, parse, read_prompts
from zeco_train.generate.output import Printer, write_json
from zeco_train.hf.trained import Trained, find_trained, load_trained
from zeco_train.lifecycle.end import Advice, Job, run_job
from zeco_train.lifecycle.join import Launch
from zeco_train.ops.operator import Target
from zeco_train.ops.slow_paths import check_kernels, warn_of
from zeco_train.sp.of_model import connect_model
from zeco_train.system.paths import warn_of_replacing
from zeco_train.system.signals import StopRequest

_ADVICE = Advice(
    lost_peer="generate again",
    memory="smaller --prefill-tokens or --batch, or more ranks, need less",
    timeout_key="parallel.timeout_seconds",
)

# Caches of softmax layers from this size on are mentioned before they are allocated.
_MENTIONED_BYTES = 10**9


def main(arguments: list[str]) -> int:
    """Generate; returns the process's exit code."""
    return run_job(partial(_generate, arguments), _ADVICE)


def _generate(arguments: list[str], job: Job) -> int:
    if {"-h", "--help"} & set(arguments) and job.launch.rank != 0:
        return 0
    options = parse(arguments)
    trained = find_trained(options.run)
    if not trained.model.causal:
        raise ConfigError("RUN", options.run, "reads in both directions (model.causal=false), so it cannot generate")
    config = trained.configure(options.overrides)
    timeout = timedelta(seconds=config.parallel.timeout_seconds)
    with job.joining(timeout):
        mesh = _join(config, options, job.launch, timeout)
    if mesh.is_main:
        warn_of_replacing([] if options.json is None else [options.json])
    job.enter("loading the model")
    model = load_trained(trained, mesh, dtype=config.train.dtype, strategy=None)
    tokenizer = agree(mesh, lambda: trained.tokenizer)
    exchange = connect_model(config.sp, config.model, mesh)
    stop = StopRequest()
    printer = Printer(len(options.prompts) * options.samples, options.samples, sys.stdout, options.stream)
    generator = Generator(
        model,
        tokenizer,
        mesh,
        exchange,
        prefill_tokens=options.prefill_tokens,
        batch=options.batch,
        cuda_graph=options.cuda_graph,
        # A closed pipe, as after `| head`, ends all ranks like a signal.
        stop=lambda: signal.SIGPIPE if printer.is_closed else stop.signal or 0,
    )
    job.enter("reading the prompts")
    # Signals still end the process: stdin may be a terminal that a user leaves by Ctrl-C.
    texts, prompts = _share_prompts(options, generator, trained, mesh)
    cached = generator.cache_bytes(prompts, options.limits, options.samples)
    if mesh.is_main and cached >= _MENTIONED_BYTES:
        size = f"{cached / 1e9:.3g} GB of memory on each rank"
        print(f"keys and values of softmax layers take up to {size}; smaller --batch needs less", file=sys.stderr)
    job.enter("generating")
    with stop:
        completions = generator.generate(
            prompts,
            options.sampling,
            options.limits,
            samples=options.samples,
            # The texts of other ranks are printed at the end, by `finish`.
            on_text=printer.tell if mesh.is_main else None,
        )
    exchange.drain()
    if mesh.is_main:
        printer.finish(completions)
        if options.json is not None:
            write_json(options.json, texts, completions, _facts(options, trained, mesh, generator.speed))
        print(_summary(completions, generator.speed), file=sys.stderr, flush=True)
    # Shell convention for a process ended by a signal.
    return 128 + generator.stopped_by if generator.stopped_by else 0


def _join(config: Config, options: Options, launch: Launch, timeout: timedelta) -> ProcessMesh:
    sp_size = resolve_sp_size(config.sp.size, launch.world_size, config.sp.backend.value)
    device = find_device(config.train.device, launch, "train.device")
    spec, dtype = spec_of(config.model), config.train.dtype.compute
    # The prompts' passes, and a step for each token of the texts.
    calls = [*spec.calls(dtype), *spec.calls(dtype, steps=True)]
    slow = check_kernels("train.kernels", config.train.kernels, calls, Target.of(device))
    # Prompts and results are rank 0's alone; a model's path may differ between nodes.
    own = {name: str(value) for name, value in vars(options).items() if name not in ("run", "prompts", "json")}
    mesh = join_alike(to_plain(config), launch, sp_size, device, timeout, own)
    if mesh.is_main:
        warn_of(slow)
    return mesh


def _share_prompts(
    options: Options, generator: Generator, trained: Trained, mesh: ProcessMesh
) -> tuple[list[str], list[Tensor]]:

    def read() -> tuple[list[str], list[Tensor]]:
        texts = read_prompts(options.prompts)
        prompts = [generator.encode(text, control=options.control_strings == "ids") for text in texts]
        largest = max(int(ids.max()) for ids in prompts)
        if largest >= trained.model.vocab_size:
            problem = f"its tokenizer gives id {largest}, and it has {trained.model.vocab_size}"
            raise DataError(trained.path, problem, "the tokenizer is of another model")
        return texts, prompts

    found = agree(mesh, read if mesh.is_main else lambda: ([], []))
    ids = [found[1]]
    dist.broadcast_object_list(ids, src=0)
    return found[0], ids[0]


def _facts(options: Options, trained: Trained, mesh: ProcessMesh, speed: Speed) -> dict[str, object]:
    return {
        "model": str(trained.path),
        "step": trained.step,
        "ranks": mesh.world_size,
        "device": mesh.device.type,
        "sampling": asdict(options.sampling),
        "limits": asdict(options.limits),
        "speed": asdict(speed),
    }


# `Completion.ended_by`, for users.
_ENDS = {
    "length": "stopped at --max-tokens",
    "eos": "ended by the model",
    "stop": "stopped at --stop",
    "signal": "stopped by a signal",
}


def _summary(completions: Sequence[Completion], speed: Speed) -> str:
    tokens = sum(len(completion.tokens) for completion in completions)
    ends = [_ENDS[completion.ended_by] for completion in completions]
    reasons = ", ".join(f"{ends.count(end)} {end}" for end in dict.fromkeys(ends)) if len(ends) != 1 else ends[0]
    read = f"prompts: {speed.prompt_tokens:,} tokens in {speed.prefill_seconds:.2f} s"
    rate = tokens / speed.decode_seconds if speed.decode_seconds else 0.0
    return f"{read}; texts: {tokens:,} tokens in {speed.decode_seconds:.2f} s, {rate:,.0f} tokens/s; {reasons}"
