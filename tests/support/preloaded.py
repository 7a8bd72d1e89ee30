"""Imports that all ranks need, done once in the process that they are forked from.

Must not start threads or query CUDA devices: neither survives a fork.
"""

import functools
import gc
import sys

import pytest  # noqa: F401 - by the modules of tests, which the ranks' functions lie in
import torch._dynamo
import torch.distributed.checkpoint
import torch.distributed.fsdp  # noqa: F401

import zeco_train.training.build
import zeco_train.training.checks
import zeco_train.training.opening  # noqa: F401
from data.sources import corpora
from tests.support.training import SMALL
from zeco_train.config.schema import load_config

# Foreign models take each rank 3 s; without fla, whose kernels they would call, which no CPU runs.
sys.modules["fla"] = None  # type: ignore[assignment]
import transformers.models.qwen3_next.modeling_qwen3_next  # noqa: E402, F401

del sys.modules["fla"]

# The parsers of Hydra and OmegaConf build their tables on first use.
load_config(SMALL)

# Each run reads all sources of the standard library to name its corpus, which takes a rank 0.1 s.
corpora.standard_library_documents = functools.cache(corpora.standard_library_documents)
corpora.standard_library_documents()

# The ranks share these objects' memory; a collection in a rank would visit, and so copy, all of it.
gc.collect()
gc.freeze()
