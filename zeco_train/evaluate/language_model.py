"""lm_eval's model interface for a trained model: log-likelihoods and generation. Imports lm_eval; for rank 0."""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM
from lm_eval.tasks import TaskManager

from data.tokenizer import Tokenizer
from zeco_train.errors import ConfigError, DataError
from zeco_train.evaluate.scoring import ScoreRequest
from zeco_train.evaluate.service import Service
from zeco_train.generate.generator import Limits
from zeco_train.generate.sampling import Sampling

# Silence its progress messages.
logging.getLogger("lm_eval").setLevel(logging.ERROR)
# Supported generation settings of tasks; others are rejected rather than ignored.
_GENERATION = {"until", "max_gen_toks", "max_tokens", "max_new_tokens", "do_sample", "temperature", "top_k", "top_p"}
_MAX_NEW_TOKENS = 256


class Tasks(TaskManager):
    """lm_eval's task manager; loading errors become one-line DataErrors."""

    def load(self, task_list: Any) -> Any:
        """Create tasks, which loads their data sets. Raises DataError for one that cannot be loaded."""
        try:
            return super().load(task_list)
        except Exception as error:
            # Tasks and data sets run their own code, which may raise anything.
            reason = " ".join(f"{type(error).__name__}: {error}".split())[:300]
            remedy = "data sets have to be on this machine (HF_HOME), or the hub within reach"
            raise DataError(f"--tasks {','.join(map(str, task_list))}", f"lm_eval: {reason}", remedy) from error


class EvaluatedModel(TemplateLM):
    """The interface of lm_eval to the trained model; `seed` is of sampled texts."""

    def __init__(self, service: Service, tokenizer: Tokenizer, seed: int) -> None:
        super().__init__()
        self._service, self._tokenizer, self._seed = service, tokenizer, seed

    @property
    def eot_token_id(self) -> int:
        """Prefix of a text without context: the end-of-sequence id, which precedes documents in training."""
        return self._tokenizer.eos_id

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **kwargs: Any) -> list[int]:
        ids: list[int] = self._tokenizer.encode([string])[0].tolist()
        return ids

    def _loglikelihood_tokens(
        self, requests: list[tuple[tuple[str, str], list[int], list[int]]], **kwargs: Any
    ) -> list[tuple[float, bool]]:
        # lm_eval moves trailing blanks of a context to the continuation, so a blank context has no tokens.
        pairs = [(context or [self.prefix_token_id], continuation) for _, context, continuation in requests]
        work = [ScoreRequest(np.array(before + after, dtype=np.int64), len(before)) for before, after in pairs]
        scores = [(score.log_likelihood, score.is_greedy) for score in self._service.score(work)]
        for (texts, *_), found in zip(requests, scores, strict=True):
            self.cache_hook.add_partial("loglikelihood", texts, found)
        return scores

    def loglikelihood_rolling(self, requests: list[Instance], disable_tqdm: bool = False) -> list[float]:
        """Log-likelihoods of whole texts, each as one sequence of full length."""
        texts = ([self.eot_token_id, *self.tok_encode(request.args[0])] for request in requests)
        work = [ScoreRequest(np.array(ids, dtype=np.int64), 1) for ids in texts]
        return [score.log_likelihood for score in self._service.score(work)]

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        """Generate texts; requests with equal settings are batched, sorted by length."""
        alike: dict[tuple[Sampling, Limits], list[int]] = defaultdict(list)
        for number, request in enumerate(requests):
            alike[self._settings(request.args[1])].append(number)
        texts = [""] * len(requests)
        for (sampling, limits), numbers in alike.items():
            numbers.sort(key=lambda number: -len(requests[number].args[0]))
            prompts = [requests[number].args[0] for number in numbers]
            for completion in self._service.generate(prompts, sampling, limits):
                texts[numbers[completion.prompt]] = completion.text
        return texts

    def _settings(self, wanted: Mapping[str, Any]) -> tuple[Sampling, Limits]:
        if unknown := sorted({*wanted} - _GENERATION):
            allowed = f"generation has no such setting; allowed: {', '.join(sorted(_GENERATION))}"
            raise ConfigError("generation_kwargs", unknown[0], allowed)
        until: str | Sequence[str] = wanted.get("until") or ()
        stops = (until,) if isinstance(until, str) else tuple(until)
        lengths = (wanted.get(name) for name in ("max_gen_toks", "max_new_tokens", "max_tokens"))
        limits = Limits(int(next((x for x in lengths if x is not None), _MAX_NEW_TOKENS)), stops)
        temperature = float(wanted.get("temperature") or 0.0)
        if wanted.get("do_sample") is False:
            temperature = 0.0
        elif wanted.get("do_sample") and not temperature:
            temperature = 1.0
        top_k, top_p = int(wanted.get("top_k") or 0), float(wanted.get("top_p") or 1.0)
        return Sampling(temperature, top_k, top_p, self._seed), limits
