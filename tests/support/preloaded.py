"""Imports that all ranks need, done once in the process that they are forked from.

Must not start threads or query CUDA devices: neither survives a fork.
"""

import torch._dynamo
import torch.distributed.checkpoint
import torch.distributed.fsdp  # noqa: F401

import zeco_train.training.trainer  # noqa: F401
from tests.support.training import SMALL
from zeco_train.config.schema import load_config

# The parsers of Hydra and OmegaConf build their tables on first use.
load_config(SMALL)
