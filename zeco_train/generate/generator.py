"""Prompts in, texts out: prefill, then decoding in batches, whatever ranks there are.

Every rank holds the whole model, and the states after a prompt are on all ranks of its sequence: these divide what
is to be decoded, and nothing crosses ranks then, but that all meet now and then to learn who still works.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from data.tokenizer import Tokenizer
from models.language_model import LanguageModel
from zeco_train.distributed.mesh import ProcessMesh
from zeco_train.errors import ConfigError, NonFiniteError
from zeco_train.generate.decode import Decoder
from zeco_train.generate.prefill import Prefill
from zeco_train.generate.sampling import Sampler, Sampling
from zeco_train.generate.text import CONTEXT, StopTexts, TextStream
from zeco_train.ops.seam import StateScan

_STEPS_BETWEEN_MEETINGS = 16

# Told each piece of a text once it is certain: of which prompt and sample, the piece, and whether it is the last one.
OnText = Callable[[int, int, str, bool], None]


@dataclass(frozen=True)
class Limits:
    """Where a text ends.

    Attributes:
        max_tokens: at the latest after so many tokens.
        stops: before the first of these texts.
        at_eos: before the tokenizer's end of sequence.
    """

    max_tokens: int = 256
    stops: tuple[str, ...] = ()
    at_eos: bool = True

    def validate(self) -> None:
        """Raise `ConfigError` for a value out of range."""
        if self.max_tokens < 1:
            raise ConfigError("max_tokens", self.max_tokens, "must be ≥ 1")
        if not all(self.stops):
            raise ConfigError("stop", "", "must be text that can be found")


@dataclass(frozen=True)
class Completion:
    """What follows a prompt.

    Attributes:
        prompt, sample: which prompt, and which of its samples.
        text: without the prompt.
        tokens: its ids; up to and including what ended it.
        ended_by: `eos`, `stop`, `length`, or `signal`.
    """

    prompt: int
    sample: int
    text: str
    tokens: list[int]
    ended_by: str


@dataclass
class Speed:
    """How long this rank has taken.

    Attributes:
        prompt_tokens, prefill_seconds: of the prompts, on all ranks of their sequence together.
        tokens, decode_seconds: of what followed, on this rank.
    """

    prompt_tokens: int = 0
    prefill_seconds: float = 0.0
    tokens: int = 0
    decode_seconds: float = 0.0


class _Key(NamedTuple):
    prompt: int
    sample: int


class _Row:
    """A text in the making."""

    def __init__(self, key: _Key, limits: Limits, tokenizer: Tokenizer, prompt: Tensor) -> None:
        self.key, self._limits = key, limits
        self._eos = tokenizer.eos_id if limits.at_eos else None
        self._stream = TextStream(tokenizer, prompt[-CONTEXT:].tolist())
        self._stops = StopTexts(limits.stops)
        self._pieces: list[str] = []
        self.tokens: list[int] = []
        self.ended_by = ""

    def add(self, token: int) -> str:
        """Take the next token; returns the text that is certain by it."""
        self.tokens.append(token)
        if token == self._eos:
            return self.end("eos")
        piece = self._stops.add(self._stream.add(token))
        self._pieces.append(piece)
        if self._stops.found is not None:
            self.ended_by = "stop"
        elif len(self.tokens) == self._limits.max_tokens:
            return piece + self.end("length")
        return piece

    def end(self, reason: str) -> str:
        """End the text where it is; returns what had been held back."""
        piece = self._stops.add(self._stream.finish())
        if self._stops.found is None:
            piece += self._stops.finish()
        self._pieces.append(piece)
        self.ended_by = reason
        return piece

    def completion(self) -> Completion:
        return Completion(*self.key, "".join(self._pieces), self.tokens, self.ended_by)


@dataclass(frozen=True)
class _Request:
    """What `Generator.generate` is asked for."""

    sampling: Sampling
    limits: Limits
    samples: int
    on_text: OnText | None

    def tell(self, row: _Row, piece: str) -> None:
        if self.on_text is not None and (piece or row.ended_by):
            self.on_text(*row.key, piece, bool(row.ended_by))


class Generator:
    """Generates texts with a model.

    Args:
        model: whole on every rank, in the dtype to compute in.
        tokenizer: of the model.
        mesh: the ranks; those of one SP group share a prompt, several groups take different prompts.
        scan: joins the shards of a prompt.
        prefill_tokens: of a prompt on a rank at once; bounds memory.
        batch: texts decoded at once on a rank.
        cuda_graph: see `Decoder`.
        stop: asked now and then; a number other than 0, on any rank, ends all texts where they are.

    Attributes:
        speed: of all calls so far.
    """

    def __init__(
        self,
        model: LanguageModel,
        tokenizer: Tokenizer,
        mesh: ProcessMesh,
        scan: StateScan,
        *,
        prefill_tokens: int = 16_384,
        batch: int = 32,
        cuda_graph: bool = True,
        stop: Callable[[], int] = lambda: 0,
    ) -> None:
        for name, value in (("prefill_tokens", prefill_tokens), ("batch", batch)):
            if value < 1:
                raise ConfigError(name, value, "must be ≥ 1")
        self._model, self._tokenizer, self._mesh = model, tokenizer, mesh
        self._prefill = Prefill(model, mesh, scan, prefill_tokens)
        self._batch, self._cuda_graph = batch, cuda_graph
        self._meetings = _Meetings(mesh, stop)
        self.speed = Speed()

    @property
    def stopped_by(self) -> int:
        """What `stop` gave on some rank; 0 if it has never given anything else."""
        return self._meetings.signal

    def encode(self, text: str) -> Tensor:
        """The ids of a prompt, [T] int64, T ≥ 1: an empty one is what stands before a document, the end of another."""
        ids = torch.as_tensor(self._tokenizer.encode([text])[0].astype("int64"))
        return ids if len(ids) else torch.tensor([self._tokenizer.eos_id])

    def generate(
        self,
        prompts: Sequence[Tensor],
        sampling: Sampling,
        limits: Limits,
        *,
        samples: int = 1,
        on_text: OnText | None = None,
    ) -> list[Completion]:
        """Texts after each of some prompts. Collective: all ranks give the same prompts and get all texts.

        Args:
            prompts: `encode`d, [T_i] int64.
            sampling: how tokens are chosen; sample j of each prompt has `sampling.seed` + j.
            limits: where texts end.
            samples: texts for each prompt.
            on_text: told of this rank's texts as they come.

        Returns:
            By prompt, and of each by sample. After a stop, those that had begun.

        Raises:
            NonFiniteError: the model's logits are NaN or infinite.
        """
        sampling.validate()
        limits.validate()
        request = _Request(sampling, limits, samples, on_text)
        own = list(range(len(prompts)))[self._mesh.dp_rank :: self._mesh.dp_size]
        at_once = max(1, self._batch * self._mesh.sp_size // samples)
        done: list[Completion] = []
        for start in range(0, len(own), at_once):
            done += self._run({i: prompts[i] for i in own[start : start + at_once]}, request)
        while not self._meetings.meet(in_batch=False, finished=True).all_finished:
            pass
        everyone = [done] * self._mesh.world_size
        dist.all_gather_object(everyone, done)
        return sorted((c for part in everyone for c in part), key=lambda c: (c.prompt, c.sample))

    def _run(self, prompts: dict[int, Tensor], request: _Request) -> list[Completion]:
        """Some prompts of this SP group, from prefill to the end; returns this rank's texts."""
        started = time.perf_counter()
        found = self._prefill.run(list(prompts.values()), proceed=lambda: not self._meetings.meet(in_batch=True).signal)
        self.speed.prefill_seconds += time.perf_counter() - started
        if found is None:
            return []
        self.speed.prompt_tokens += sum(map(len, prompts.values()))
        logits, states = found
        places = {prompt: place for place, prompt in enumerate(prompts)}
        keys = [_Key(prompt, sample) for prompt in prompts for sample in range(request.samples)]
        done: list[Completion] = []
        started, at_once = time.perf_counter(), self._batch * self._mesh.sp_size
        for start in range(0, len(keys), at_once):
            if self._meetings.signal:
                break
            own = keys[start : start + at_once][self._mesh.sp_rank :: self._mesh.sp_size]
            rows = [_Row(key, request.limits, self._tokenizer, prompts[key.prompt]) for key in own]
            index = torch.tensor([places[key.prompt] for key in own], dtype=torch.int64, device=logits.device)
            self._decode(rows, logits[index], [state[index] for state in states], request)
            done += [row.completion() for row in rows]
        self.speed.decode_seconds += time.perf_counter() - started
        self.speed.tokens += sum(len(completion.tokens) for completion in done)
        return done

    def _decode(self, rows: list[_Row], logits: Tensor, states: list[Tensor], request: _Request) -> None:
        """Bring rows to their ends, in the same number of meetings on all ranks of the group. A rank may have none."""
        seeds = [request.sampling.seed + row.key.sample for row in rows]
        sampler = Sampler(request.sampling, seeds, logits.device)
        decoder = Decoder(self._model, states, self._cuda_graph) if rows else None
        # Those that the decoder works on, ended ones among them until they are half of it.
        batch, tokens = list(rows), torch.empty(0)
        for step in range(request.limits.max_tokens):
            active = [place for place, row in enumerate(batch) if not row.ended_by]
            if step % self._meetings.steps_between == 0:
                met = self._meetings.meet(in_batch=bool(active))
                if met.signal or not met.batch_goes_on:
                    break
            if decoder is None or not active:
                continue
            if step > 0:
                if 2 * len(active) <= len(batch):
                    batch, tokens = [batch[place] for place in active], tokens[active]
                    decoder.keep(active)
                    sampler.keep(active)
                logits = decoder.step(tokens)
            tokens = sampler.draw(logits[:, : self._tokenizer.vocab_size])
            for row, token in zip(batch, tokens.tolist(), strict=True):
                if not row.ended_by:
                    self._check(row, token)
                    request.tell(row, row.add(token))
        for row in rows:
            if not row.ended_by:
                request.tell(row, row.end("signal"))

    def _check(self, row: _Row, token: int) -> None:
        if token < 0:
            place = f"prompt {row.key.prompt + 1}, token {len(row.tokens) + 1} after it"
            raise NonFiniteError(f"rank {self._mesh.rank}: {place}: the model's logits are NaN or infinite")


class _Meeting(NamedTuple):
    """What all ranks know by a meeting.

    Attributes:
        signal: that some rank has been told, or 0.
        batch_goes_on: some rank of this one's SP group has texts in the batch that have not ended.
        all_finished: no rank has any work left.
    """

    signal: int
    batch_goes_on: bool
    all_finished: bool


class _Meetings:
    """Where all ranks learn who still works, and whether any has been told to stop. What they do in between takes them
    different times, but all come by regularly, so nobody waits for longer than a few steps of another.

    Attributes:
        signal: of the last meeting.
        steps_between: of decoding, between two meetings.
    """

    def __init__(self, mesh: ProcessMesh, stop: Callable[[], int]) -> None:
        self._mesh, self._stop = mesh, stop
        self.signal = 0
        self.steps_between = _STEPS_BETWEEN_MEETINGS if mesh.world_size > 1 else 1

    def meet(self, *, in_batch: bool, finished: bool = False) -> _Meeting:
        """Say what this rank does, and hear of the others. Collective over all ranks, whatever they are at."""
        flags = torch.zeros(2 + self._mesh.dp_size, dtype=torch.int64)
        flags[0], flags[1], flags[2 + self._mesh.dp_rank] = self._stop(), int(not finished), int(in_batch)
        if self._mesh.world_size > 1:
            dist.all_reduce(flags, op=dist.ReduceOp.MAX)
        self.signal = int(flags[0])
        return _Meeting(self.signal, bool(flags[2 + self._mesh.dp_rank]), not flags[1])
