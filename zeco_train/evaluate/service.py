"""Lets a harness on rank 0 use the model on all ranks.

lm_eval reads data sets, builds prompts and scores answers on rank 0 alone: many ranks would download the same files at
once, and might disagree. The other ranks wait for rank 0's next batch of requests, process their part of it, and wait
again, until rank 0 is done.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any, TypeVar

import torch.distributed as dist

from models.mixer_registry import check_document
from models.spec import spec_of
from zeco_train.distributed.mesh import host_group
from zeco_train.errors import ZecoError
from zeco_train.evaluate.evaluation import Evaluation
from zeco_train.evaluate.scoring import Score, ScoreRequest, score
from zeco_train.generate.generator import Completion, Generator, Limits
from zeco_train.generate.sampling import Sampling
from zeco_train.hf.trained import load_trained
from zeco_train.ops.operator import Target
from zeco_train.ops.slow_paths import check_kernels, warn_of

T = TypeVar("T")
_END = "end"


class Service:
    """Scoring and generation on all ranks, driven by rank 0. The constructor is collective.

    A rank has at most `batch_tokens` in a forward pass.
    """

    def __init__(self, evaluation: Evaluation, batch_tokens: int) -> None:
        self._evaluation, self._batch_tokens = evaluation, batch_tokens
        self._forward = evaluation.forward
        # A CPU group with an hour's timeout, since rank 0 may be slow between batches, e.g. to download a data set.
        self._group = host_group(evaluation.mesh)
        self._at_work = False

    def run(self, harness: Callable[[], T]) -> T | None:
        """Run `harness` on rank 0, where it may call `score` and `generate`, while the other ranks serve. Collective.

        Returns its result on rank 0, None elsewhere; raises its ZecoErrors on every rank.
        """
        if not self._evaluation.mesh.is_main:
            self._serve()
            return None
        try:
            result = harness()
        except Exception as error:
            if not self._at_work:
                # Release the waiting ranks. An unexpected exception is not sent, but propagates and ends the job.
                self._broadcast(_END, error if isinstance(error, ZecoError) else None)
            raise
        self._broadcast(_END, None)
        return result

    def score(self, requests: Sequence[ScoreRequest]) -> list[Score]:
        """Score requests, from rank 0. Raises ConfigError for a text longer than the model's longest document."""
        longest = max((len(request.tokens) - 1 for request in requests), default=0)
        check_document(self._evaluation.config.model, "tokens of a text", longest)
        return self._work("score", list(requests))

    def generate(self, prompts: Sequence[str], sampling: Sampling, limits: Limits) -> list[Completion]:
        return self._work("generate", (list(prompts), sampling, limits))

    def _work(self, what: str, work: Any) -> Any:
        assert self._evaluation.mesh.is_main
        # Stays set if `_do` raises: the other ranks are then in `_do` as well, and do not wait for a message.
        self._at_work = True
        self._broadcast(what, work)
        result = self._do(what, work)
        self._at_work = False
        return result

    def _serve(self) -> None:
        while True:
            message: list[Any] = [None]
            self._evaluation.enter("waiting for rank 0's next requests")
            dist.broadcast_object_list(message, src=0, group=self._group)
            what, work = message[0]
            if what == _END:
                if work is not None:
                    raise work
                return
            self._do(what, work)

    def _broadcast(self, what: str, work: Any) -> None:
        dist.broadcast_object_list([(what, work)], src=0, group=self._group)

    def _do(self, what: str, work: Any) -> Any:
        if what == "score":
            self._evaluation.enter(f"scoring {len(work)} requests")
            return score(self._forward, work, self._batch_tokens)
        prompts, sampling, limits = work
        self._evaluation.enter(f"generating after {len(prompts)} prompts")
        return self._generator.generate([self._generator.encode(text) for text in prompts], sampling, limits)

    @cached_property
    def _generator(self) -> Generator:
        # Of a copy of the model on every rank, as decode steps need. The first use is collective.
        evaluation, train = self._evaluation, self._evaluation.config.train
        steps = spec_of(evaluation.trained.model).calls(train.dtype.compute, steps=True)
        slow = check_kernels("train.kernels", train.kernels, steps, Target.of(evaluation.mesh.device))
        if evaluation.mesh.is_main:
            warn_of(slow)
        model = load_trained(evaluation.trained, evaluation.mesh, dtype=train.dtype, strategy=None)
        tokenizer = evaluation.trained.tokenizer
        return Generator(model, tokenizer, evaluation.mesh, evaluation.exchange, prefill_tokens=self._batch_tokens)
