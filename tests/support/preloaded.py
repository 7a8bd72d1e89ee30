"""What ranks need first and always, done once in the process that they are forked from.

It must leave neither threads nor a look at CUDA devices behind: both are lost, or worse, in a fork.
"""

import torch._dynamo
import torch.distributed.checkpoint
import torch.distributed.fsdp  # noqa: F401

import zeco_train.training.trainer  # noqa: F401
from tests.support.training import SMALL
from zeco_train.config.schema import load_config

# The parsers of Hydra and OmegaConf build their tables at their first use.
load_config(SMALL)
