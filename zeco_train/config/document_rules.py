"""Rules between a model and the lengths of its documents: some mixers are defined up to a length only."""

from __future__ import annotations

from collections.abc import Iterable

from data.config import DataConfig
from data.store import TokenStore
from models.config import LanguageModelConfig
from models.registry import check_document, longest_document


def check_documents(
    model: LanguageModelConfig,
    data: DataConfig,
    seq_len: int,
    stores: Iterable[TokenStore],
    field: str = "data.seq_len",
) -> None:
    """Check that the model is defined for all documents of sequences of this length.

    All documents of the stores count, so all ranks find the same: in a batch only the rank with a document's end knows
    its length, and the others would wait for it in a scan.

    Args:
        model: its shape.
        data: whether documents are separate.
        seq_len: tokens of a sequence; no document continues from one sequence to the next.
        stores: that the sequences are of.
        field: the setting that holds the length, for messages.

    Raises:
        ConfigError: names the sequence length, or the store with a document that is too long.
    """
    limit = longest_document(model)
    if limit is None or seq_len <= limit:
        return
    if not data.reset_state_at_document:
        check_document(model, field, seq_len)
    for store in stores:
        within = f"tokens of the longest document of {store.path} within {field}={seq_len}"
        check_document(model, within, min(store.longest_document(), seq_len))
