"""A trained model as an object: text, losses and logits, in this process alone."""

from __future__ import annotations

import os
from collections.abc import Sequence
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from data.tokenizer import Tokenizer
from models.language_model import LanguageModel
from models.mixer_registry import check_document
from models.spec import spec_of
from zeco_train.distributed.mesh import lone_mesh, pick_device
from zeco_train.errors import ConfigError
from zeco_train.generate.generator import Completion, Generator, Limits
from zeco_train.generate.sampling import Sampling
from zeco_train.hf.trained import Trained, find_trained, load_trained
from zeco_train.ops.operator import Target
from zeco_train.ops.position import SequencePosition, checked_borders
from zeco_train.ops.slow_paths import find_slow_paths, warn_of
from zeco_train.sp.exchange import local_exchange
from zeco_train.training.config import Dtype, TrainConfig

Ids = Tensor | Sequence[int] | Sequence[Sequence[int]]
Documents = Sequence[Sequence[int] | Tensor] | None


def load(
    path: str | os.PathLike[str],
    *,
    device: str | torch.device = "auto",
    dtype: str | torch.dtype | None = None,
) -> Model:
    """Load a trained model into this process; no other rank takes part, also where a process group exists.

    Args:
        path: a run's folder (its newest checkpoint), one of its checkpoints, or a folder in Hugging Face's form.
        device: "auto" (the current GPU if there is one, else the CPU), "cpu", "cuda" or "cuda:N".
        dtype: "bf16", "fp32", "fp64", or torch's; of weights and products. None is that of the run's training, fp32 for
            a folder of another program.

    Raises:
        ZecoError: a one-line message names what is wrong: the path, the device, the dtype, or a damaged file.
    """
    if not isinstance(path, str | os.PathLike):
        raise ConfigError("path", f"{path!r:.100}", "must be a folder's path")
    trained = find_trained(os.fspath(path), "path")
    on, chosen = pick_device(device), _dtype_of(dtype, trained)
    with torch.cuda.device(on if on.type == "cuda" else -1):
        module = load_trained(trained, lone_mesh(on), dtype=chosen, strategy=None)
    spec, compute = spec_of(trained.model), chosen.compute
    calls = [*spec.calls(compute), *(spec.calls(compute, steps=True) if trained.model.causal else ())]
    warn_of(find_slow_paths(calls, Target.of(on)))
    return Model(trained, module, on)


class Model:
    """A trained model, made by `load`.

    Attributes:
        path: folder of its weights.
        step: at which they were saved; None if unknown.
        device, dtype: of its weights.
        vocab_size: every id is below it.
        module: the `torch.nn.Module`, in evaluation mode and without gradients.
    """

    def __init__(self, trained: Trained, module: LanguageModel, device: torch.device) -> None:
        self.path, self.step, self.device, self.module = trained.path, trained.step, device, module
        self.dtype, self.vocab_size = module.model.norm.weight.dtype, trained.model.vocab_size
        self._trained, self._exchange = trained, local_exchange()

    def __repr__(self) -> str:
        return f"Model({str(self.path)!r}, step={self.step}, device={str(self.device)!r}, dtype={self.dtype})"

    def encode(self, text: str) -> Tensor:
        """The ids of a text, [T] int64 on the CPU, as in training: without ids for its beginning and end."""
        if not isinstance(text, str):
            raise ConfigError("text", type(text).__name__, "must be a str")
        return torch.as_tensor(self._tokenizer.encode([text])[0].astype("int64"))

    def decode(self, ids: Tensor | Sequence[int]) -> str:
        """The text of ids [T]."""
        row = self._checked(ids, least=0).flatten()
        # A model's vocabulary may be larger than its tokenizer's; such ids have no text.
        return self._tokenizer.decode(np.asarray(row[row < self._tokenizer.vocab_size]))

    @torch.no_grad()
    def logits(self, ids: Ids, *, documents: Documents = None) -> Tensor:
        """Logits of the token after each: ids [T] or [B, T] → [B, T, vocab_size] in `dtype`, on `device`.

        Args:
            ids: integers from 0 to vocab_size − 1.
            documents: for each of the B sequences the borders of its documents, from 0 to T, at which states restart.
        """
        rows = self._checked(ids)
        return self._run(rows, documents, None)

    @torch.no_grad()
    def loss(self, text_or_ids: str | Ids, *, documents: Documents = None) -> float:
        """Mean cross-entropy in nats a token, of each token given those before it.

        Args:
            text_or_ids: a text, of which every token counts: as in training an end-of-sequence id precedes it. Or ids
                [T] or [B, T], of which the first of each sequence is given only.
            documents: as of `logits`, of ids (a text is one document); labels cross their borders.
        """
        if not self._trained.model.causal:
            raise ConfigError("model.causal", "false", "a model that reads in both directions has no next-token loss")
        if isinstance(text_or_ids, str):
            if documents is not None:
                raise ConfigError("documents", f"{documents!r:.100}", "a text is one document; give ids")
            if not text_or_ids:
                raise ConfigError("text", "", "is empty")
            eos = torch.tensor([self._tokenizer.eos_id])
            text_or_ids = torch.cat([eos, self.encode(text_or_ids)])
        rows = self._checked(text_or_ids, least=2)
        inputs, labels = rows[:, :-1], rows[:, 1:].contiguous()
        if documents is not None:
            # The last token is a label only.
            last = inputs.shape[1]
            documents = [borders.clamp(max=last) for borders in _checked_documents(documents, rows)]
        return float(self._run(inputs, documents, labels)) / labels.numel()

    def generate(
        self,
        prompts: str | Sequence[str],
        *,
        max_tokens: int = 256,
        samples: int = 1,
        temperature: float = 1.0,
        top_k: int = 0,
        top_p: float = 1.0,
        seed: int = 0,
        stop: str | Sequence[str] = (),
        at_eos: bool = True,
    ) -> list[Completion]:
        """Continue prompts; the same call gives the same texts.

        Args:
            prompts: texts; an empty one begins a document.
            max_tokens: of each text, at most.
            samples: texts for each prompt; the n-th draws with `seed` + n.
            temperature: divides the logits; 0 takes the likeliest token each time.
            top_k: only the k likeliest tokens; 0: all.
            top_p: only the likeliest tokens whose probabilities sum to this.
            seed: of the draws.
            stop: texts before which a text ends.
            at_eos: end at the end-of-sequence id.

        Returns:
            Sorted by prompt, then sample.
        """
        if not self._trained.model.causal:
            raise ConfigError("model.causal", "false", "a model that reads in both directions cannot generate")
        texts = [prompts] if isinstance(prompts, str) else prompts
        if not isinstance(texts, Sequence) or not texts or not all(isinstance(text, str) for text in texts):
            shown = " ".join(repr(prompts).split())
            raise ConfigError("prompts", f"{shown:.100}", "must be a text, or several")
        numbers = {"max_tokens": max_tokens, "samples": samples, "top_k": top_k, "seed": seed}
        for name, value in numbers.items():
            if not isinstance(value, int):
                raise ConfigError(name, f"{value!r:.100}", "must be an integer")
        if not isinstance(at_eos, bool):
            raise ConfigError("at_eos", f"{at_eos!r:.100}", "must be True or False")
        if samples < 1:
            raise ConfigError("samples", samples, "must be ≥ 1")
        ids = [self._generator.encode(text) for text in texts]
        self._trained.check_ids(ids)
        sampling = Sampling(temperature, top_k, top_p, seed)
        limits = Limits(max_tokens, (stop,) if isinstance(stop, str) else tuple(stop), at_eos)
        with self._current():
            return self._generator.generate(ids, sampling, limits, samples=samples)

    @property
    def _tokenizer(self) -> Tokenizer:
        return self._trained.tokenizer

    @cached_property
    def _generator(self) -> Generator:
        return Generator(self.module, self._tokenizer, lone_mesh(self.device), self._exchange)

    def _current(self) -> torch.cuda.device:
        # Triton launches on the current device.
        return torch.cuda.device(self.device if self.device.type == "cuda" else -1)

    def _run(self, ids: Tensor, documents: Documents, labels: Tensor | None) -> Any:
        num_tokens = ids.shape[1]
        if documents is not None:
            documents = _checked_documents(documents, ids)
        position = SequencePosition((0, num_tokens), documents=documents, exchange=self._exchange)
        if documents is None:
            check_document(self.module.config, "tokens", num_tokens)
        on = self.device
        with self._current():
            return self.module(ids.to(on), position, None if labels is None else labels.to(on))

    # [B, T] int64.
    def _checked(self, ids: Any, least: int = 1) -> Tensor:
        try:
            found = torch.as_tensor(ids)
        except (TypeError, ValueError, RuntimeError) as error:
            raise ConfigError("ids", f"{ids!r:.100}", "must be integers [T] or [B, T]") from error
        is_integer = not (found.is_floating_point() or found.is_complex() or found.dtype == torch.bool)
        if found.dim() not in (1, 2) or (found.numel() and not is_integer):
            raise ConfigError("ids", f"{list(found.shape)} {found.dtype}", "must be integers [T] or [B, T]")
        shape = [*found.shape]
        found = (found if found.dim() == 2 else found[None]).to(torch.int64)
        if found.shape[1] < least or not len(found):
            problem = f"needs at least {least} tokens of each sequence"
            raise ConfigError("ids", f"a tensor of shape {shape}", problem)
        wrong = found[(found < 0) | (found >= self.vocab_size)]
        if len(wrong):
            raise ConfigError("ids", int(wrong[0]), f"must be from 0 to {self.vocab_size - 1}, the model's vocabulary")
        return found


def _checked_documents(documents: Any, ids: Tensor) -> list[Tensor]:
    batch, num_tokens = ids.shape
    try:
        found = [checked_borders("documents", borders, num_tokens) for borders in documents]
        if len(found) == batch:
            return found
        raise ValueError(f"{len(found)} sequences, not {batch}")
    except (TypeError, ValueError) as error:
        problem = f"must have for each of {batch} sequences borders that rise from 0 to {num_tokens}"
        raise ConfigError("documents", f"{documents!r:.100}", problem) from error


def _dtype_of(dtype: str | torch.dtype | None, trained: Trained) -> Dtype:
    if dtype is None:
        return TrainConfig().dtype if trained.config is None else trained.config.train.dtype
    for one in Dtype:
        if dtype in (one.value, one.compute):
            return one
    raise ConfigError("dtype", dtype, f"must be {', '.join(one.value for one in Dtype)}, or torch's of these")
