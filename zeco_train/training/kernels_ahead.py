"""Triton compiles the kernels of a model's layers in a thread, while the model is built.

One block of each kind goes forward and backward on zeros, of the shapes and dtypes of training: kernels are compiled at
their first launch, and Triton's compiler holds Python's lock for a part of its time only. What training needs beyond
that, such as kernels for segments, is compiled when it is first launched.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from models.config import LanguageModelConfig
from models.parameters import cast
from models.projections import set_matmul
from models.spec import spec_of
from zeco_train.ops.position import SequencePosition
from zeco_train.sp.exchange import local_exchange
from zeco_train.training.config import TrainConfig

logger = logging.getLogger(__name__)

# Most kernels are the same for longer shards: Triton compiles for numbers of tokens, chunks and the like that divide by
# 16 apart from others. A whole number of these tokens has chunks that do.
_MOST_TOKENS, _UNIT = 1 << 15, 1 << 10
# Elements of a token that a block keeps for its backward pass, in widths of the model and its MLP: an estimate, about
# three times what a compiled block of gla_1b keeps.
_WIDTHS, _MLP_WIDTHS = 16, 6


@contextmanager
def kernels_ahead(
    model: LanguageModelConfig, config: TrainConfig, shape: tuple[int, int], documents: bool, device: torch.device
) -> Iterator[None]:
    """Compile meanwhile; nothing to do on CPUs.

    `shape`: sequences and tokens of a micro-batch on this rank; `documents`: states restart at borders of documents.
    """
    if device.type != "cuda":
        yield
        return
    if not _has_room(model, config, shape, device):
        logger.info("kernels are compiled when first launched: too little memory for it while the model is built")
        yield
        return

    def work() -> None:
        try:
            with torch.cuda.stream(torch.cuda.Stream(device)):
                run_blocks(model, config, shape, documents, device)
        except Exception:
            # Training launches the same kernels, and reports what is wrong with them where it can be named.
            logger.debug("kernels were not compiled ahead", exc_info=True)

    thread = threading.Thread(target=work, name="kernels-ahead")
    thread.start()
    try:
        yield
    finally:
        thread.join()
    # Memory cached for the thread's stream is not reused by other streams.
    torch.cuda.synchronize(device)
    torch._C._cuda_clearCublasWorkspaces()
    torch.cuda.empty_cache()


def _has_room(model: LanguageModelConfig, config: TrainConfig, shape: tuple[int, int], device: torch.device) -> bool:
    weights = spec_of(model).num_parameters * config.dtype.master.itemsize
    widths = _WIDTHS * model.hidden_size + _MLP_WIDTHS * model.intermediate_size
    block = _fewer(shape)[0] * _fewer(shape)[1] * widths * config.dtype.master.itemsize
    return 2 * weights + block < torch.cuda.mem_get_info(device)[0]


def _fewer(shape: tuple[int, int]) -> tuple[int, int]:
    batch, tokens = shape
    if batch * tokens <= _MOST_TOKENS:
        return shape
    return batch, min(tokens, max(_UNIT, _MOST_TOKENS // batch // _UNIT * _UNIT))


def run_blocks(
    model: LanguageModelConfig, config: TrainConfig, shape: tuple[int, int], documents: bool, device: torch.device
) -> None:
    """One block of each kind, forward and backward, on zeros; arguments as of `kernels_ahead`."""
    blocks = spec_of(model).one_of_each().model
    cast(blocks.to_empty(device=device), config.dtype.compute)
    set_matmul(blocks, config.matmul)
    with torch.no_grad():
        for parameter in blocks.parameters():
            parameter.zero_()
    batch, tokens = _fewer(shape)
    ids = torch.zeros(batch, tokens, dtype=torch.int64, device=device)
    borders = [torch.tensor([0, tokens])] * batch if documents else None
    # The graph does not keep its exchange.
    position = SequencePosition((0, tokens), documents=borders, exchange=local_exchange())
    x = blocks(ids, position)
    x.backward(torch.zeros_like(x))
