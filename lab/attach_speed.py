"""Question: what does an attached model of transformers pay for its sequence over ranks, beside one GPU and Ulysses?
Command: torchrun --standalone --nproc-per-node 2 -m lab.attach_speed [linear mamba2 hybrid olmo operator] [--tiny]
    torchrun --standalone --nproc-per-node 2 -m lab.peers.tuned lab.attach_speed fla   # fla, with its kernels tuned
Date: 2026-11-28, two H200s, then two H100s, transformers 5.17
Answer: 0.97 and 0.985 of one GPU's tokens/s a GPU where all layers are linear, 0.70 to 0.86 by Ulysses; OLMo-Hybrid
    with documents 0.95: docs/attach.md. The H200s' figures but the last part are of a longer script with the same
    models and loops, which also ran `verify` (results/attach_2xh200.txt).

A sequence of 16,384 tokens a GPU over all ranks, and the same model attached to each rank alone with as many: equal
work where layers are linear, and with packed documents of one GPU's tokens where some are softmax. Ulysses: an
all-to-all of a layer's operands by heads in place of the scan, and one of its outputs back. `--tiny`: on CPUs.
"""

from __future__ import annotations

import argparse
import gc
import importlib
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from functools import partial
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn

from zeco_train.attach import attach, forward
from zeco_train.ops.mix import mix_at, operator_of
from zeco_train.ops.position import SequencePosition
from zeco_train.sp.backend_registry import SPConfig
from zeco_train.sp.exchange import GroupExchange, local_exchange
from zeco_train.system.command import Parser, docstring

PHASES = ("linear", "mamba2", "hybrid", "olmo", "operator", "fla")
_VOCABULARY = 32_000


class _ByHeads(torch.autograd.Function):
    """[B, t, H, w] of this rank's tokens → [B, T, H / P, w] of all tokens; with `back` the other way."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, back: bool) -> Tensor:
        ctx.back = back
        return _exchanged(x, back)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return _exchanged(grads[0].contiguous(), not ctx.back), None


def _exchanged(x: Tensor, back: bool) -> Tensor:
    ranks = dist.get_world_size()
    parts = x.chunk(ranks, 1 if back else 2)
    sent = torch.stack([part.contiguous() for part in parts])
    received = torch.empty_like(sent)
    dist.all_to_all_single(received, sent)
    return torch.cat([*received], 2 if back else 1)


class _Gathered(torch.autograd.Function):
    """[B, t, …] → [B, T, …]: of heads that all ranks share; the gradients of their heads add up."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        parts = [torch.empty_like(x) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, x.contiguous())
        return torch.cat(parts, 1)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        total = grads[0].contiguous()
        dist.all_reduce(total)
        return total.chunk(dist.get_world_size(), 1)[dist.get_rank()]


def by_ulysses(name: str, operands: Sequence[Tensor], scale: float, whole: SequencePosition) -> Tensor:
    """O of this rank's tokens: the operator of its heads over all tokens, between two exchanges.

    Args:
        name: of the operator. operands: [B, t, H, …] of this rank's tokens. scale: of the outputs.
        whole: all tokens, on one rank.
    """
    ranks, found, together = dist.get_world_size(), [*operands], dict[tuple[torch.dtype, int], list[int]]()
    for i, (x, dims) in enumerate(zip(operands, operator_of(name, operands).dims, strict=True)):
        if "T" not in dims:
            found[i] = x.chunk(ranks)[dist.get_rank()] if dims[0] in "HG" else x
        elif x.shape[2] % ranks:
            found[i] = _Gathered.apply(x)
        else:  # one message for all of a dtype
            together.setdefault((x.dtype, x.shape[2]), []).append(i)
    for indices in together.values():
        wide = [operands[i] if operands[i].dim() == 4 else operands[i][..., None] for i in indices]
        parts = _ByHeads.apply(torch.cat(wide, -1), False).split([x.shape[-1] for x in wide], -1)
        for i, part in zip(indices, parts, strict=True):
            found[i] = (part if operands[i].dim() == 4 else part[..., 0]).contiguous()
    return _ByHeads.apply(mix_at(name, found, scale, whole, forward.StateInput())[0], True)


class _OneLayer(nn.Module):
    """A model of fla's layer alone, for inputs [B, t, D]."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, inputs_embeds: Tensor) -> Tensor:
        o: Tensor = self.layer(inputs_embeds)[0]
        return o


def _off(a: Tensor, b: Tensor) -> Tensor:
    return (a - b).norm() / b.norm()


class Measurement:
    """Times on the ranks of torchrun; `tiny`: small models on CPUs."""

    def __init__(self, *, tiny: bool) -> None:
        dist.init_process_group("gloo" if tiny else "nccl")
        self.tiny, self.rank, self.ranks = tiny, dist.get_rank(), dist.get_world_size()
        self.device = torch.device("cpu") if tiny else torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        if not tiny:
            torch.cuda.set_device(self.device)
        self.tokens, self.repeats = (96, 1) if tiny else (16_384, 3)
        self.alone = [dist.new_group([rank]) for rank in range(self.ranks)][self.rank]
        self.local = local_exchange()  # kept: a backward pass finds it by a handle

    def say(self, line: str) -> None:
        if self.rank == 0:
            print(line, flush=True)

    def seconds(self, step: Callable[[], object], repeats: int | None = None) -> float:
        """The slowest rank's mean of some steps after two."""
        repeats = repeats or self.repeats
        for count in (2, repeats):
            self._wait()
            dist.barrier()
            start = time.perf_counter()
            for _ in range(count):
                step()
            self._wait()
        found = torch.tensor((time.perf_counter() - start) / repeats, device=self.device)
        dist.all_reduce(found, op=dist.ReduceOp.MAX)
        return float(found)

    def _wait(self) -> None:
        if not self.tiny:
            torch.cuda.synchronize()

    def batch(self, tokens: int) -> dict[str, Tensor]:
        ids = torch.randint(_VOCABULARY, (1, tokens), generator=torch.Generator().manual_seed(1)).to(self.device)
        return {"input_ids": ids, "labels": ids}

    def compare(self, name: str, make: Callable[[], nn.Module], documents: Sequence[int] | None = None) -> None:
        """Print tokens/s of a model over all ranks, by Ulysses, and on one."""
        torch.manual_seed(0)
        with self.device:
            model: Any = make().to(torch.bfloat16).train()
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        self.say(f"{name}: {sum(p.numel() for p in model.parameters()) / 1e9:.2f}B, {self.tokens:,} tokens a rank")

        def measure(title: str, part: dict[str, Any]) -> float:
            def step() -> None:
                model.zero_grad(set_to_none=True)
                model(**part).loss.backward()

            found = self.seconds(step)
            self.say(f"  {title:<40} {found * 1e3:8.1f} ms  {self.tokens / found:9,.0f} tokens/s a rank")
            return found

        attached, whole = attach(model), self.batch(self.tokens * self.ranks)
        times = {"one sequence": measure("all ranks, one sequence", attached.shard(whole))}
        reduction = self.seconds(attached.reduce_gradients, 1)
        if documents is not None:
            times["documents"] = measure("all ranks, documents", attached.shard(whole, documents=documents))
        elif self.ranks > 1:
            with self.ulysses():
                times["Ulysses"] = measure("all ranks, Ulysses", attached.shard(whole))
        attached.detach()
        attached = attach(model, self.alone)
        one = measure("each rank alone", attached.shard(self.batch(self.tokens)))
        attached.detach()
        for title, found in times.items():
            self.say(f"  {title}: {one / found:.3f} of one, {one / (found + reduction):.3f} with the sum of gradients")
        model.zero_grad(set_to_none=True)
        gc.collect()
        if not self.tiny:
            torch.cuda.empty_cache()

    @contextmanager
    def ulysses(self) -> Iterator[None]:
        """Recurrences of linear layers by Ulysses in place of scans; convolutions and softmax as they are."""
        kept = forward.Frame.mix

        def mixed(frame: Any, name: str, operands: Sequence[Tensor], scale: float | None = None) -> Tensor:
            if name == "short_conv":
                return kept(frame, name, operands, scale)
            of = frame.of.position
            like = torch.empty(operands[0].shape[0], of.seq_len, device=self.device)
            whole = SequencePosition([0, of.seq_len], documents=of.documents, exchange=self.local).on(like)
            return by_ulysses(name, operands, operator_of(name, operands).scale_of(operands, scale), whole)

        with mock.patch.object(forward.Frame, "mix", mixed):
            yield

    def qwen(self, pattern: Sequence[str]) -> nn.Module:
        from transformers import Qwen3_5ForCausalLM, Qwen3_5TextConfig

        layers, width, heads, dim = (4, 32, 4, 8) if self.tiny else (16, 2048, 16, 128)
        config = Qwen3_5TextConfig(
            vocab_size=_VOCABULARY, hidden_size=width, intermediate_size=3 * width, num_hidden_layers=layers,
            layer_types=[pattern[i % len(pattern)] for i in range(layers)], num_attention_heads=heads,
            num_key_value_heads=heads // 4, head_dim=dim, linear_num_key_heads=heads, linear_num_value_heads=heads,
            linear_key_head_dim=dim, linear_value_head_dim=dim,
        )  # fmt: skip
        return Qwen3_5ForCausalLM(config)

    def mamba2(self) -> nn.Module:
        from transformers import Mamba2Config, Mamba2ForCausalLM

        layers, width, dim, states = (3, 32, 8, 12) if self.tiny else (36, 2048, 64, 128)
        config = Mamba2Config(
            vocab_size=_VOCABULARY, hidden_size=width, num_hidden_layers=layers, num_heads=2 * width // dim,
            head_dim=dim, state_size=states, n_groups=1,
        )  # fmt: skip
        return Mamba2ForCausalLM(config)

    def olmo(self) -> nn.Module:
        """OLMo-Hybrid-7B's own widths, 30 heads of 96 × 192, with fewer layers and words."""
        from transformers import OlmoHybridConfig, OlmoHybridForCausalLM

        sizes: dict[str, Any] = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
        if self.tiny:
            sizes |= {"hidden_size": 60, "intermediate_size": 90}
        pattern = ["linear_attention"] * 3 + ["full_attention"]
        config = OlmoHybridConfig(vocab_size=_VOCABULARY, num_hidden_layers=4, layer_types=pattern, **sizes)
        return OlmoHybridForCausalLM(config)

    def layer_of_fla(self) -> None:
        """Print milliseconds of fla's KDA layer, forward and backward: attached, and by fla's context parallelism."""
        from fla.layers import KimiDeltaAttention
        from fla.ops.cp import build_cp_context

        torch.manual_seed(0)
        width, dim = (32, 8) if self.tiny else (2048, 128)
        with self.device:
            layer = KimiDeltaAttention(hidden_size=width, head_dim=dim, num_heads=width // dim)
            layer = layer.to(torch.bfloat16).train()
        model = _OneLayer(layer)
        generator = torch.Generator(self.device).manual_seed(1)
        shape = 2, 1, self.tokens * self.ranks, width
        x, do = torch.randn(*shape, generator=generator, device=self.device, dtype=torch.bfloat16).unbind()
        found: dict[str, list[Tensor]] = {}

        def measure(title: str, part: dict[str, Any], own: Tensor) -> None:
            part["inputs_embeds"] = part["inputs_embeds"].detach().clone().requires_grad_()
            leaves = [part["inputs_embeds"], *model.parameters()]

            def step() -> Tensor:
                for leaf in leaves:
                    leaf.grad = None
                o: Tensor = model(**part)
                o.backward(own)
                return o

            start = time.perf_counter()
            o = step()
            self._wait()
            first = time.perf_counter() - start
            grads = [leaf.grad.float() for leaf in leaves if leaf.grad is not None]
            for grad in grads[1:]:
                dist.all_reduce(grad)
            found[title] = [o.detach().float(), *grads]
            self.say(f"  {title}: {self.seconds(step, 20) * 1e3:.3f} ms; first {first:.1f} s")

        attached = attach(model)
        part = attached.shard({"inputs_embeds": x})
        own = do.chunk(self.ranks, 1)[self.rank].contiguous()
        measure("attached", part, own)
        attached.detach()
        sliced = {"inputs_embeds": part["inputs_embeds"]}
        borders = torch.tensor([0, self.tokens * self.ranks])
        context = build_cp_context(
            cu_seqlens=borders.to(self.device), group=dist.group.WORLD, cu_seqlens_cpu=borders, conv1d_kernel_size=4
        )
        with ExitStack() as stack:
            for module, name in (("fla.layers.kda", "chunk_kda"), ("fla.modules.causal_conv1d.ops", "causal_conv1d")):
                place = importlib.import_module(module)
                call = partial(getattr(place, name), cp_context=context)
                stack.enter_context(mock.patch.object(place, name, call))
            measure("fla's context parallelism", sliced, own)
        attached = attach(model, self.alone)
        measure("attached, each rank alone", attached.shard({"inputs_embeds": part["inputs_embeds"]}), own)
        attached.detach()
        # Alone is a control: without the other ranks' tokens.
        for title in ("fla's context parallelism", "attached, each rank alone"):
            errors = [_off(a, b) for a, b in zip(found[title], found["attached"], strict=True)]
            worst = torch.tensor([errors[0], errors[1], max(errors[2:])], device=self.device)
            dist.all_reduce(worst, op=dist.ReduceOp.MAX)
            of = ", ".join(f"{name} {x:.1e}" for name, x in zip(("o", "dx", "weights"), worst.tolist(), strict=True))
            self.say(f"  {title}: off from the attached layer by {of}")

    def operators(self) -> None:
        """Print milliseconds of an operator's forward and backward pass, launched: bound by the host where short."""
        exchange = GroupExchange(SPConfig(), None, timedelta(minutes=5)).exchange
        for name, heads, K, V in (("gated_delta", 16, 128, 128), ("kda", 16, 128, 128), ("scalar_decay", 64, 128, 64)):
            heads, K, V = (4, 16, 16) if self.tiny else (heads, K, V)
            operands, do = self._operands(name, heads, K, V)
            bounds = [self.tokens * rank for rank in range(self.ranks + 1)]
            ours = SequencePosition(bounds, self.rank, exchange=exchange).on(operands[0])
            alone = SequencePosition([0, self.tokens], exchange=self.local).on(operands[0])
            long = torch.empty(1, self.tokens * self.ranks, device=self.device)
            whole = SequencePosition([0, self.tokens * self.ranks], exchange=self.local).on(long)
            calls = {
                "scan": lambda *x: mix_at(name, x, K**-0.5, ours, forward.StateInput())[0],  # noqa: B023
                "one rank": lambda *x: mix_at(name, x, K**-0.5, alone, forward.StateInput())[0],  # noqa: B023
                "Ulysses": lambda *x: by_ulysses(name, x, K**-0.5, whole),  # noqa: B023
            }
            for title, call in calls.items():

                def step(call: Any = call, operands: Any = operands, do: Tensor = do) -> None:
                    for x in operands:
                        x.grad = None
                    call(*operands).backward(do)

                self.say(f"{name} {heads} × {K} × {V}, {title}: {self.seconds(step, 10) * 1e3:.2f} ms")

    def _operands(self, name: str, heads: int, K: int, V: int) -> tuple[list[Tensor], Tensor]:
        generator = torch.Generator(self.device).manual_seed(3 + self.rank)

        def draw(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
            return torch.randn(1, self.tokens, *shape, generator=generator, device=self.device, dtype=dtype)

        keys = 1 if name == "scalar_decay" else heads
        q, k = (nn.functional.normalize(draw(keys, K).float(), dim=-1).bfloat16() for _ in range(2))
        g = -0.05 * draw(*((heads, K) if name == "kda" else (heads,)), dtype=torch.float32).exp()
        beta = [] if name == "scalar_decay" else [draw(heads, dtype=torch.float32).sigmoid()]
        return [x.detach().requires_grad_() for x in (q, k, draw(heads, V), g, *beta)], draw(heads, V)


def main(arguments: Sequence[str]) -> int:
    """Returns the exit code."""
    parser = Parser(
        prog="lab.attach_speed",
        description=docstring(sys.modules[__name__]),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    # Without any, argparse checks the empty list itself.
    parser.add_argument("phases", nargs="*", choices=[[], *PHASES])
    parser.add_argument("--tiny", action="store_true")
    options = parser.parse_args(arguments)
    if "fla" not in options.phases:
        # transformers computes in PyTorch where nothing is attached
        sys.modules |= dict.fromkeys(("fla", "causal_conv1d", "mamba_ssm", "kernels"))  # type: ignore[arg-type]
    of = Measurement(tiny=options.tiny)
    mixed = ["linear_attention"] * 3 + ["full_attention"]
    borders = [of.tokens * rank for rank in range(of.ranks + 1)]
    for phase in options.phases or PHASES[:-1]:
        match phase:
            case "linear":
                of.compare("Qwen3.5-like, all layers linear", lambda: of.qwen(mixed[:1]))
            case "mamba2":
                of.compare("Mamba-2", of.mamba2)
            case "hybrid":
                of.compare("Qwen3.5-like, 3 of 4 layers linear", lambda: of.qwen(mixed), borders)
            case "olmo":
                of.compare("OLMo-Hybrid, 3 of 4 layers linear", of.olmo, borders)
            case "fla":
                of.layer_of_fla()
            case _:
                of.operators()
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
