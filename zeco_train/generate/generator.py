"""Text generation: prefill, then batched decoding, on any number of ranks.

The model is replicated on every rank. After prefill, all ranks of an SP group hold the states of its prompts and divide
the texts. Decoding is local; ranks synchronise every 16 steps to detect completion. Softmax layers have whole caches on
every rank, of all prompts of an SP group until they are divided.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor

from data.tokenizer import Tokenizer
from models.language_model import LanguageModel
from models.mixer_registry import check_document
from zeco_train.distributed.mesh import ProcessMesh, total_memory
from zeco_train.errors import ConfigError, NonFiniteError
from zeco_train.generate.decode import Decoder
from zeco_train.generate.prefill import Prefill
from zeco_train.generate.sampling import Sampler, Sampling
from zeco_train.lifecycle.join import gather
from zeco_train.ops.seam import Exchange

_STEPS_BETWEEN = 16

# Callback for each final piece of a text: (prompt, sample, piece, whether it is the last).
OnText = Callable[[int, int, str, bool], None]


@dataclass(frozen=True)
class Limits:
    """Stopping criteria: so many tokens, before the first of some texts, at the end-of-sequence token."""

    max_tokens: int = 256
    stops: tuple[str, ...] = ()
    at_eos: bool = True

    def validate(self) -> None:
        if self.max_tokens < 1:
            raise ConfigError("max_tokens", self.max_tokens, "must be ≥ 1")
        if not all(self.stops):
            raise ConfigError("stop", "", "must be text that can be found")


@dataclass(frozen=True)
class Completion:
    """The continuation of a prompt, by the indices of prompt and sample.

    Attributes:
        text: without the prompt.
        tokens: its ids, including those of the end of sequence or stop string.
        ended_by: `eos`, `stop`, `length`, or `signal`.
    """

    prompt: int
    sample: int
    text: str
    tokens: list[int]
    ended_by: str


@dataclass
class Speed:
    """Tokens and times: of prefill by all ranks of the SP group together, of decoding by this rank."""

    prompt_tokens: int = 0
    prefill_seconds: float = 0.0
    tokens: int = 0
    decode_seconds: float = 0.0


class _Key(NamedTuple):
    prompt: int
    sample: int


class _Row:
    def __init__(self, key: _Key, limits: Limits, tokenizer: Tokenizer, prompt: Tensor) -> None:
        self.key, self._limits = key, limits
        self._eos = tokenizer.eos_id if limits.at_eos else None
        self._stream = TextStream(tokenizer, prompt.numpy())
        self._stops = StopTexts(limits.stops)
        self._pieces: list[str] = []
        self.tokens: list[int] = []
        self.ended_by = ""

    def add(self, token: int) -> str:
        """Append a token; returns the text that is final after it."""
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
        """End the text here; returns the text held back so far."""
        piece = self._stops.add(self._stream.finish())
        if self._stops.found is None:
            piece += self._stops.finish()
        self._pieces.append(piece)
        self.ended_by = reason if self._stops.found is None else "stop"
        return piece

    def completion(self) -> Completion:
        return Completion(*self.key, "".join(self._pieces), self.tokens, self.ended_by)


@dataclass(frozen=True)
class _Request:
    sampling: Sampling
    limits: Limits
    samples: int
    on_text: OnText | None

    def emit(self, row: _Row, piece: str) -> None:
        if self.on_text is not None and (piece or row.ended_by):
            self.on_text(*row.key, piece, bool(row.ended_by))


class Generator:
    """Generates texts with a model.

    Args:
        model: replicated on every rank, in the compute dtype.
        mesh: an SP group shares a prompt, different groups process different prompts.
        prefill_tokens: maximum prompt tokens per rank and prefill piece; bounds memory.
        batch: texts decoded at once per rank.
        stop: polled periodically; a nonzero value on any rank ends all texts.
    """

    def __init__(
        self,
        model: LanguageModel,
        tokenizer: Tokenizer,
        mesh: ProcessMesh,
        exchange: Exchange,
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
        self._prefill = Prefill(model, mesh, exchange, prefill_tokens)
        self._batch, self._cuda_graph = batch, cuda_graph
        self._ranks = _Synchronizer(mesh, stop)
        self.speed = Speed()  # totals over all calls so far

    @property
    def stopped_by(self) -> int:
        """The nonzero value of `stop` on some rank, else 0."""
        return self._ranks.signal

    def encode(self, text: str, *, control: bool = False) -> Tensor:
        """The ids of a prompt, [T] int64, T ≥ 1; an empty prompt becomes the end-of-sequence id, as in training."""
        ids = torch.as_tensor(self._tokenizer.encode([text], control=control)[0].astype("int64"))
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
        """Generate texts for each prompt. Collective: all ranks pass the same prompts and get all texts.

        Args:
            prompts: `encode`d, [T_i] int64.
            sampling: sample j of each prompt uses seed `sampling.seed` + j.
            on_text: callback for this rank's texts as they are generated.

        Returns:
            Sorted by prompt, then sample. After a stop, only texts that had begun.

        Raises:
            ConfigError: prompt and text could be longer than the model's longest document, or caches are larger than
                memory.
            NonFiniteError: the model's logits are NaN or infinite.
        """
        sampling.validate()
        limits.validate()
        self.cache_bytes(prompts, limits, samples)
        longest = max(map(len, prompts), default=0) + limits.max_tokens
        check_document(self._model.config, "tokens of a prompt and max_tokens", longest)
        request = _Request(sampling, limits, samples, on_text)
        done: list[Completion] = []
        for group in self._groups(len(prompts), samples, self._mesh.dp_rank):
            done += self._run({number: prompts[number] for number in group}, request)
        # A rank without work goes on synchronizing: the others would wait for it in their next all-reduce.
        while not self._ranks.synchronize(in_batch=False, finished=True).all_finished:
            pass
        everyone = gather(done, self._mesh.world_size)
        return sorted((c for part in everyone for c in part), key=lambda c: (c.prompt, c.sample))

    def cache_bytes(self, prompts: Sequence[Tensor], limits: Limits, samples: int = 1) -> int:
        """Most bytes that the caches of softmax layers take on a rank in `generate`; 0 without such layers.

        Raises:
            ConfigError: the prompts' alone are larger than memory.
        """
        least = most = 0
        for dp_rank in range(self._mesh.dp_size):
            for group in self._groups(len(prompts), samples, dp_rank):
                longest = max(len(prompts[number]) for number in group) + limits.max_tokens
                of_one = self._model.cache_bytes(longest)
                least = max(least, len(group) * of_one)
                # Copies: the texts of one rank, or in prefill the prompts that go on.
                copies = max(min(self._batch, len(group) * samples), len(group) - 1)
                most = max(most, (len(group) + copies) * of_one)
        if least and least > (memory := total_memory(self._mesh.device))[0]:
            available, owner = memory
            sizes = f"{least / 1e9:.3g} GB, {owner} has {available / 1e9:.3g} GB"
            problem = f"keys and values of softmax layers take {sizes}; fewer texts at once or a smaller max_tokens"
            raise ConfigError("batch", self._batch, f"{problem} need less")
        return most

    def _groups(self, num_prompts: int, samples: int, dp_rank: int) -> Iterator[Sequence[int]]:
        own = range(num_prompts)[dp_rank :: self._mesh.dp_size]
        at_once = max(1, self._batch * self._mesh.sp_size // samples)
        for start in range(0, len(own), at_once):
            yield own[start : start + at_once]

    def _run(self, prompts: dict[int, Tensor], request: _Request) -> list[Completion]:
        started = time.perf_counter()
        found = self._prefill.run(
            list(prompts.values()),
            proceed=lambda: not self._ranks.synchronize(in_batch=True).signal,
            capacity=max(map(len, prompts.values())) + request.limits.max_tokens,
        )
        if self._mesh.device.type == "cuda":
            # The last piece may still be running.
            torch.cuda.synchronize(self._mesh.device)
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
            if self._ranks.signal:
                break
            own = keys[start : start + at_once][self._mesh.sp_rank :: self._mesh.sp_size]
            rows = [_Row(key, request.limits, self._tokenizer, prompts[key.prompt]) for key in own]
            index = torch.tensor([places[key.prompt] for key in own], dtype=torch.int64, device=logits.device)
            positions = torch.tensor([len(prompts[key.prompt]) for key in own], device=logits.device)
            taken = _taken(states, index, is_last=start + at_once >= len(keys))
            decoder = Decoder(self._model, taken, positions, self._cuda_graph) if rows else None
            self._decode(rows, logits[index], decoder, request)
            done += [row.completion() for row in rows]
        self.speed.decode_seconds += time.perf_counter() - started
        self.speed.tokens += sum(len(completion.tokens) for completion in done)
        return done

    # Synchronizes equally often on all ranks of the group; `rows` may be empty.
    def _decode(self, rows: list[_Row], logits: Tensor, decoder: Decoder | None, request: _Request) -> None:
        seeds = [request.sampling.seed + row.key.sample for row in rows]
        sampler = Sampler(request.sampling, seeds, logits.device)
        # Rows in the decoder; ended rows are dropped once they are half of the batch.
        batch, tokens = list(rows), torch.empty(0)
        for step in range(request.limits.max_tokens):
            active = [place for place, row in enumerate(batch) if not row.ended_by]
            if step % self._ranks.steps_between == 0:
                found = self._ranks.synchronize(in_batch=bool(active))
                # Agreed by all ranks of the group, so all leave the loop after synchronizing equally often.
                if found.signal or not found.batch_goes_on:
                    break
            if decoder is None or not active:
                continue
            if step > 0:
                if 2 * len(active) <= len(batch):
                    batch, tokens = [batch[place] for place in active], tokens[active]
                    decoder.keep(active)
                    sampler.keep(active)
                logits = decoder.step(tokens)
            # A model's vocabulary may be larger than its tokenizer's; such ids have no text.
            tokens = sampler.draw(logits[:, : self._tokenizer.vocab_size])
            for row, token in zip(batch, tokens.tolist(), strict=True):
                if not row.ended_by:
                    if token < 0:
                        place = f"prompt {row.key.prompt + 1}, token {len(row.tokens) + 1} after it"
                        raise NonFiniteError(f"rank {self._mesh.rank}: {place}: the model's logits are NaN or infinite")
                    request.emit(row, row.add(token))
        for row in rows:
            if not row.ended_by:
                request.emit(row, row.end("signal"))


def _taken(states: list[Tensor], index: Tensor, *, is_last: bool) -> list[Tensor]:
    # The last ones leave nothing behind, since caches may be too large to be there twice.
    if not is_last:
        return [state[index] for state in states]
    if not torch.equal(index, torch.arange(len(states[0]), device=index.device)):
        for place, state in enumerate(states):
            states[place] = state[index]
    return states


class _Synchronized(NamedTuple):
    signal: int
    # Some rank of this SP group has unfinished texts in the batch.
    batch_goes_on: bool
    # No rank has any work left.
    all_finished: bool


class _Synchronizer:
    # Ranks progress at different speeds in between, but all synchronize regularly, so the wait is a few steps at most.
    # `signal` is of the last time.

    def __init__(self, mesh: ProcessMesh, stop: Callable[[], int]) -> None:
        self._mesh, self._stop = mesh, stop
        self.signal = 0
        self.steps_between = _STEPS_BETWEEN if mesh.world_size > 1 else 1

    def synchronize(self, *, in_batch: bool, finished: bool = False) -> _Synchronized:
        # Collective over all ranks, in prefill, decoding or finished.
        # Signal, work left, and by SP group whether its batch goes on: one all-reduce for all.
        flags = torch.zeros(2 + self._mesh.dp_size, dtype=torch.int64)
        flags[0], flags[1], flags[2 + self._mesh.dp_rank] = self._stop(), int(not finished), int(in_batch)
        if self._mesh.world_size > 1:
            dist.all_reduce(flags, op=dist.ReduceOp.MAX)
        self.signal = int(flags[0])
        return _Synchronized(self.signal, bool(flags[2 + self._mesh.dp_rank]), not flags[1])


# --- text of tokens, of which only what no later token can change is given out ---

# Replacement character for invalid or incomplete UTF-8. Up to three of a character's four bytes may be present, and a
# decoder may emit one mark for each.
_MARK = "\ufffd"
_MOST_MARKS = 3
# Preceding tokens decoded as context: enough for a tokenizer's treatment of word boundaries.
_CONTEXT = 8
_MOST_IDS = 64


class TextStream:
    """Decodes a sequence token by token.

    The pieces join to the text of context and tokens decoded at once, without as many characters as the context's text
    has; the context is the tokens before the first.
    """

    def __init__(self, tokenizer: Tokenizer, context: Sequence[int] | NDArray[np.integer] = ()) -> None:
        self._tokenizer = tokenizer
        self._ids = self._end_of(context)
        self._given = len(self._decode(self._ids))

    def add(self, token: int) -> str:
        """The text that is certain with this token; "" while later tokens may change it."""
        self._ids.append(token)
        if token in self._tokenizer.open_ids:
            return ""
        text = self._decode(self._ids)
        piece = self._give(text, _settled(text))
        if len(self._ids) > _MOST_IDS:
            # Bounds the work per token, however long the text.
            self._ids = self._end_of(self._ids)
            self._given = _settled(self._decode(self._ids))
        return piece

    def finish(self) -> str:
        """The remaining text, after the last token."""
        text = self._decode(self._ids)
        return self._give(text, len(text))

    def _give(self, text: str, stop: int) -> str:
        piece = text[self._given : stop]
        self._given = max(self._given, stop)
        return piece

    def _end_of(self, ids: Sequence[int] | NDArray[np.integer]) -> list[int]:
        # From which on the text is decoded as it is after all ids before.
        start = max(len(ids) - _CONTEXT, 0)
        # Not within ids that are decoded together, and with some text: a decoder treats the first text differently.
        while start and (int(ids[start]) in self._tokenizer.open_ids or not self._decode(ids[start:])):
            start -= 1
        return [int(token) for token in ids[start:]]

    def _decode(self, ids: Sequence[int] | NDArray[np.integer]) -> str:
        return self._tokenizer.decode(np.asarray(ids, dtype=np.int64))


def _settled(text: str) -> int:
    # Length of the prefix that no later token can change.
    return len(text) - min(len(text) - len(text.rstrip(_MARK)), _MOST_MARKS)


class StopTexts:
    """Ends a text before the first stop string; none of them is empty."""

    def __init__(self, texts: Sequence[str]) -> None:
        self._texts = list(texts)
        self._held = ""
        self.found: str | None = None

    def add(self, piece: str) -> str:
        """The text that is certainly before any stop string; sets `found` when one occurs."""
        text = self._held + piece
        places = [(place, stop) for stop in self._texts if (place := text.find(stop)) >= 0]
        if places:
            place, self.found = min(places)
            self._held = ""
            return text[:place]
        held = max((_overlap(text, stop) for stop in self._texts), default=0)
        self._held = text[len(text) - held :]
        return text[: len(text) - held]

    def finish(self) -> str:
        """The text held back, after the last piece."""
        held, self._held = self._held, ""
        return held


def _overlap(text: str, stop: str) -> int:
    # Of the longest suffix of `text` that is a proper prefix of `stop`.
    sizes = range(min(len(text), len(stop) - 1), 0, -1)
    return next((size for size in sizes if stop.startswith(text[-size:])), 0)
