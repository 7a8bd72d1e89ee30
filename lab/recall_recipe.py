"""The recipe of `recall_family.py`: models with equal states, settings that they share, and the curriculum."""

from __future__ import annotations

from dataclasses import dataclass

# Equal states: 2 heads of 32 × 32, or 4 of 16 × 32. GLA has no convolution here, but can bind a value to the key before
# it by fast decays: a trial of 200 steps with 2 pairs ended at a loss of 0.02 with a normalizer of 4, of 0.61 with 16.
MODELS = {
    "gla": ("model=gla_tiny", "model.num_heads=2", "model.expand_k=1.0", "model.gate_logit_normalizer=4"),
    "mamba2": ("model=mamba2_tiny", "model.num_heads=4", "model.head_dim=32", "model.state_size=16"),
    "gated_deltanet": ("model=gated_deltanet_tiny", "model.num_heads=2", "model.head_dim=32"),
    "kda": ("model=kda_tiny", "model.num_heads=2", "model.head_dim=32"),
    "softmax": ("model=gla_tiny", "model.num_heads=2", "model.attn.every=1"),
}
# Width, layers, data and optimizer, the same for all.
SHARED = """
    model.hidden_size=64 model.num_layers=2 model.intermediate_size=128 model.initializer_range=0.07
    data=synthetic data.synthetic.task=recall sp=zeco parallel=ddp train.device=cpu
    optim.lr=3e-3 optim.weight_decay=0 sched=wsd sched.warmup_steps=20
    train.log_every=20 train.eval_every=0 train.eval_sequences=0 checkpoint.every=0
"""


@dataclass(frozen=True)
class Stage:
    """One run of the curriculum.

    Attributes:
        length: tokens of a sequence.
        keys: that occur; None: all 64. With two of them, a model first learns to bind a value to the key before it.
    """

    length: int
    batch: int
    steps: int
    pairs: int
    keys: int | None = None


CURRICULUM = (
    Stage(16, 64, 400, 2, keys=2),
    Stage(32, 64, 400, 8),
    Stage(64, 64, 300, 8),
    Stage(128, 32, 200, 16),
    Stage(256, 16, 120, 32),
    Stage(512, 8, 80, 64),
)
LENGTHS = [stage.length for stage in CURRICULUM[2:]]
