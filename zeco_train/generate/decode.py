"""The decode step: tokens and states in, logits out. Memory: the states and caches, allocated beforehand."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import torch
from torch import Tensor

from models.language_model import LanguageModel


class Decoder:
    """Decodes a batch of sequences token by token.

    Args:
        model: replicated on this rank.
        states: after the tokens so far (`LanguageModel.zero_states`); owned by the decoder, updated in place.
        positions: [B] int64, of the next tokens in their sequences.
        cuda_graph: on CUDA, capture a step as a CUDA graph: a step has about a dozen small kernels per layer, which
            take longer to launch than to run.
    """

    def __init__(
        self, model: LanguageModel, states: Sequence[Tensor], positions: Tensor, cuda_graph: bool = True
    ) -> None:
        self._model, self._states, self._positions = model, list(states), positions.clone()
        has_graphs = positions.device.type == "cuda"
        self._graph = _GraphedStep(model, self._states, self._positions) if cuda_graph and has_graphs else None

    def step(self, tokens: Tensor) -> Tensor:
        """Logits [B, vocab] after these tokens, [B] int64; valid until the next step."""
        if self._graph is not None:
            return self._graph.step(tokens)
        logits = self._model.step(tokens, self._states, self._positions)
        self._positions += 1
        return logits

    def keep(self, rows: Sequence[int]) -> None:
        """Keep only these rows, in this order."""
        index = torch.tensor(rows, device=self._positions.device)
        # A graph is bound to the addresses and shapes of its buffers.
        is_graphed, self._graph = self._graph is not None, None
        # One by one: caches may be too large to be there twice.
        for place, state in enumerate(self._states):
            self._states[place] = state[index]
        self._positions = self._positions[index]
        if is_graphed:
            self._graph = _GraphedStep(self._model, self._states, self._positions)


class _GraphedStep:
    # `model.step` with static buffers for tokens, states, positions and logits.

    def __init__(self, model: LanguageModel, states: Sequence[Tensor], positions: Tensor) -> None:
        device = positions.device
        self._tokens = torch.zeros_like(positions)
        # Warm up before capture: the first run compiles, autotunes and allocates. It also changes the states, so
        # restore them afterwards; but not caches, where it writes only what the first step replaces.
        changed = [state for state, kind in zip(states, model.states, strict=True) if not kind.is_cache]
        before = [state.clone() for state in changed]
        stream = _recording_stream(device)
        stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(stream):
            for _ in range(2):
                model.step(self._tokens, states, positions)
        torch.cuda.current_stream(device).wait_stream(stream)
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph, stream=stream):
            self._logits = model.step(self._tokens, states, positions)
            positions += 1
        for state, value in zip(changed, before, strict=True):
            state.copy_(value)

    def step(self, tokens: Tensor) -> Tensor:
        self._tokens.copy_(tokens)
        self._graph.replay()
        return self._logits


@cache
def _recording_stream(device: torch.device) -> torch.cuda.Stream:
    # One per device: cuBLAS keeps a workspace (32 MiB on Hopper) for each stream.
    return torch.cuda.Stream(device)
