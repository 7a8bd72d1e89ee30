"""Token stores: `store.py` reads and checks them, `writer.py` writes them, `documents.py` orders documents."""

from data.store.store import (
    COPY_AGAIN,
    META_FILE,
    PREPARE_HINT,
    VALIDATION_FOLDER,
    StoreMeta,
    TokenStore,
    check_replaceable,
    is_store,
    read_meta,
    shard_name,
    token_dtype,
)

__all__ = [
    "COPY_AGAIN",
    "META_FILE",
    "PREPARE_HINT",
    "VALIDATION_FOLDER",
    "StoreMeta",
    "TokenStore",
    "check_replaceable",
    "is_store",
    "read_meta",
    "shard_name",
    "token_dtype",
]
