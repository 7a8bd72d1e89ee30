"""Tokenizers of exports: whatever the model, transformers encodes with them by default as training did."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from data.tokenizer import ByteTokenizer, HuggingFaceTokenizer
from models.formats.format_registry import FORMATS
from tests.data.test_tokenizer import LINES, TEXT, byte_pairs, folder_of
from zeco_train.errors import DataError
from zeco_train.hf.folder import tokenizer_info, write_tokenizer


@pytest.mark.few(3)
@pytest.mark.parametrize("model_type", [one.model_type for one in FORMATS])
def test_any_export_encodes_by_default_as_training_did(model_type: str, tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    hub = folder_of(byte_pairs(*LINES), tmp_path / "hub", tokenizer_class="GPT2Tokenizer", add_bos_token=True)
    for number, tokenizer in enumerate((ByteTokenizer(), HuggingFaceTokenizer(str(hub)))):
        out = tmp_path / str(number)
        out.mkdir()
        (out / "config.json").write_text(json.dumps({"model_type": model_type}))
        write_tokenizer(tokenizer, out)
        loaded = AutoTokenizer.from_pretrained(out)
        for text in ("", TEXT, "naïve 日本語 👍\u200d \x00\x7f\xad"):
            ids = tokenizer.encode([text])[0]
            assert loaded(text)["input_ids"] == ids.tolist()
            assert loaded.decode(ids.tolist()) == text == tokenizer.decode(ids)
        assert (loaded.eos_token_id, len(loaded)) == (tokenizer.eos_id, tokenizer.vocab_size)
        assert (tokenizer_info(out) or {})["kind"] == tokenizer.info["kind"]


def test_bytes_in_transformers_are_ours(tmp_path: Path) -> None:
    """Names of special tokens are text, any bytes decode alike, and a folder as 0.2 wrote it is known."""
    from transformers import AutoTokenizer

    write_tokenizer(ByteTokenizer(), tmp_path)
    loaded, text = AutoTokenizer.from_pretrained(tmp_path), "<pad> </s>a<unk>"
    assert loaded(text)["input_ids"] == ByteTokenizer().encode([text])[0].tolist()
    assert (loaded.pad_token_id, loaded.eos_token_id, loaded.unk_token_id) == (0, 1, 2)
    ids = np.random.default_rng(0).integers(3, 259, 999)
    assert loaded.decode(ids.tolist()) == ByteTokenizer().decode(ids)

    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "ByT5Tokenizer", "extra_ids": 0}')
    (tmp_path / "tokenizer.json").rename(tmp_path / "kept")
    assert tokenizer_info(tmp_path) == {"kind": "bytes"}
    (tmp_path / "tokenizer.json").write_text((tmp_path / "kept").read_text().replace('"a": 100', '"a": 300'))
    assert (tokenizer_info(tmp_path) or {})["kind"] == "huggingface"


def test_tokenizer_that_no_file_can_hold_is_refused(tmp_path: Path) -> None:
    """One written in Python, which adds </s> to every text."""
    from transformers import ByT5Tokenizer

    ByT5Tokenizer(extra_ids=0).save_pretrained(tmp_path / "hub")
    (tmp_path / "out").mkdir()
    with pytest.raises(DataError, match="transformers builds a tokenizer that encodes otherwise by default"):
        write_tokenizer(HuggingFaceTokenizer(str(tmp_path / "hub")), tmp_path / "out")
