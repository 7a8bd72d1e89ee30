"""Rules between a task and its model: a causal model reads earlier tokens, an unmasked one the whole sequence."""

from __future__ import annotations

from data.config import DataConfig, DataKind
from data.loader.masking import TaskConfig
from models.config import LanguageModelConfig
from models.registry import unmasked_mixers
from zeco_train.errors import ConfigError


def check_task(task: TaskConfig, model: LanguageModelConfig, data: DataConfig, segments: int) -> None:
    """Check that the model reads exactly what its task lets it read, and that nothing cuts an unmasked sequence.

    Args:
        task: what the model learns.
        model: its shape.
        data: the sequences.
        segments: `train.segments`.

    Raises:
        ConfigError: names the first setting that does not fit.
    """
    if task.is_masked:
        if model.causal:
            problem = "a causal model would not read the tokens after a mask; set model.causal=false"
            raise ConfigError("task", "mlm", problem)
        if data.kind is DataKind.synthetic:
            raise ConfigError("task", "mlm", "data=synthetic has labels of its own; take another data=")
    if model.causal:
        return
    able = unmasked_mixers()
    if (decaying := next((name for name in model.mixer_counts() if name not in able), None)) is not None:
        allowed = f"the decays of {decaying} need an order; mixers without: {', '.join(able) or 'none yet'}"
        raise ConfigError("model.causal", "false", allowed)
    if not task.is_masked:
        raise ConfigError("model.causal", "false", "the model would read the token to predict; take task=mlm")
    if segments > 1:
        problem = "an unmasked model reads the whole sequence at once; must be 1 with model.causal=false"
        raise ConfigError("train.segments", segments, problem)
    if data.reset_state_at_document:
        problem = "an unmasked model reads the whole sequence; must be false with model.causal=false"
        raise ConfigError("data.reset_state_at_document", "true", problem)
    if not data.has_labels_across:
        problem = "labels of task=mlm are the tokens themselves; must be true or null"
        raise ConfigError("data.labels_across_documents", "false", problem)
