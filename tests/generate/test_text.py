"""Streamed decoding, stop texts, and sampling of tokens."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
import torch
from tokenizers import Regex, decoders, models, pre_tokenizers
from torch import Tensor

from data.tokenizer import ByteTokenizer, Tokenizer, load_tokenizer
from zeco_train.errors import ConfigError
from zeco_train.generate.generator import Completion, Limits, StopTexts, TextStream, _Key, _Row
from zeco_train.generate.sampling import Sampler, Sampling, probabilities

BYTES = ByteTokenizer()
CPU = torch.device("cpu")
TEXT = "naïve → 日本語 😀 e\u0301 end" * 9


def streamed(ids: list[int], context: list[int] | None = None) -> list[str]:
    stream = TextStream(BYTES, context or [])
    return [*(stream.add(token) for token in ids), stream.finish()]


def decode(ids: list[int]) -> str:
    return BYTES.decode(np.asarray(ids))


def test_only_complete_characters_are_shown() -> None:
    ids = BYTES.encode([TEXT])[0].tolist()
    pieces = streamed(ids)
    assert "".join(pieces) == TEXT
    # A token that does not complete a character gives an empty piece; replacement characters never appear.
    assert pieces.count("") > TEXT.count("日") * 2
    assert all("\ufffd" not in piece for piece in pieces)


@pytest.mark.parametrize("seed", range(8))
def test_pieces_of_any_bytes_join_to_decoded_text(seed: int) -> None:
    """Also broken UTF-8 with special tokens in it, and texts much longer than the decoding window."""
    random = np.random.default_rng(seed)
    high = random.integers(0, 2) * 128
    ids = random.integers(high, 259, 300).tolist()
    ids[50:50] = BYTES.encode([TEXT])[0].tolist()
    assert "".join(streamed(ids)) == decode(ids)


def test_context_is_not_repeated() -> None:
    ids = BYTES.encode(["before ", "after"])
    assert "".join(streamed(ids[1].tolist(), ids[0].tolist())) == "after"


class WordTokenizer:
    """Like a sentencepiece model: the first word of a text loses its leading space, later words keep theirs."""

    vocab_size, eos_id, open_ids, control_ids, info = 3, 0, (), {}, {"kind": "words"}
    words = ("", "one", "two")

    def encode(self, texts: list[str], *, control: bool = False) -> list[np.ndarray]:
        return [np.asarray([self.words.index(word) for word in text.split()]) for text in texts]

    def decode(self, ids: np.ndarray) -> str:
        return " ".join(self.words[token] for token in ids)

    def save(self, folder: object) -> None: ...


def test_space_after_prompt_is_kept() -> None:
    stream = TextStream(WordTokenizer(), [1, 1, 2])  # type: ignore[arg-type]
    pieces = [stream.add(token) for token in [2, 1] * 60]
    assert "".join(pieces) == " two one" * 60


WORDS = ["<unk>", "<s>", "</s>", "▁", "▁a", "b", "##c", "d</w>", "é", "日", "\ufffd", "", " ", " do not", "|"]
LLAMA = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
DECODERS = {
    "none": None,
    "byte level": decoders.ByteLevel(),
    "llama": decoders.Sequence(LLAMA),
    "gemma": decoders.Sequence(LLAMA[:3]),
    "tipsv2": decoders.Sequence([decoders.Metaspace(), *LLAMA[1:3]]),
    "strip 3": decoders.Sequence([*LLAMA[:3], decoders.Strip(" ", 3, 0)]),
    "metaspace": decoders.Metaspace(),
    "word piece": decoders.WordPiece(),
    "bpe": decoders.BPEDecoder(),
    "ctc": decoders.CTC(pad_token="<unk>"),
    "pattern in joined text": decoders.Sequence([*LLAMA[:3], decoders.Replace(Regex("a +b"), "x")]),
    "bytes of joined text": decoders.Sequence([decoders.Fuse(), decoders.ByteLevel()]),
}


def of_decoder(name: str, folder: Path) -> tuple[Tokenizer, dict[str, int]]:
    """A tokenizer of some words, all bytes by name and the alphabet of bytes; and its vocabulary."""
    tokens = [*WORDS, *(f"<0x{byte:02X}>" for byte in range(256)), *sorted(pre_tokenizers.ByteLevel.alphabet())]
    vocabulary = {token: number for number, token in enumerate(dict.fromkeys(tokens))}
    raw = tokenizers.Tokenizer(models.BPE(vocab=vocabulary, merges=[], unk_token="<unk>", byte_fallback=True))
    if (decoder := DECODERS[name]) is not None:
        raw.decoder = decoder
    raw.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text('{"tokenizer_class": "TokenizersBackend", "eos_token": "</s>"}')
    return load_tokenizer(str(folder)), vocabulary


@pytest.mark.few(quick=6)
@pytest.mark.parametrize("name", DECODERS)
def test_pieces_join_to_decoded_text_of_any_decoder(name: str, tmp_path: Path) -> None:
    """After any context: runs of bytes, whole characters or not, between words and within the window's borders."""
    tokenizer, vocabulary = of_decoder(name, tmp_path)
    random = np.random.default_rng(0)
    characters = [[vocabulary[f"<0x{byte:02X}>"] for byte in text.encode()] for text in ("é", "日", "日本語👍")]
    words = [[vocabulary[word]] for word in WORDS]
    for _ in range(12):
        ids: list[int] = []
        for kind in random.integers(0, 8, random.integers(2, 120)):
            if kind < 4:
                ids += words[random.integers(len(words))]
            elif kind < 6:
                ids += characters[random.integers(len(characters))] * int(random.integers(1, 5))
            else:
                ids += [int(random.integers(len(vocabulary)))] * int(random.choice([1, 1, 12]))
        cut = int(random.integers(0, min(len(ids), 30)))
        stream = TextStream(tokenizer, ids[:cut])
        pieces = [*(stream.add(token) for token in ids[cut:]), stream.finish()]
        whole, before = (tokenizer.decode(np.asarray(part, dtype=np.int64)) for part in (ids, ids[:cut]))
        assert "".join(pieces) == whole[len(before) :]


def test_text_of_bytes_is_given_and_stops_as_soon_as_it_is_certain(tmp_path: Path) -> None:
    """A later byte can make a mark of every byte of a run, so its text is certain at the first other token."""
    tokenizer, vocabulary = of_decoder("llama", tmp_path)
    run = [vocabulary[f"<0x{byte:02X}>"] for byte in "日本語".encode()]
    ids = [vocabulary["▁a"], *run, vocabulary["b"], vocabulary["b"]]
    stream = TextStream(tokenizer, [vocabulary["b"]])
    assert [stream.add(token) for token in ids] == [" a", *[""] * 9, "日本語b", "b"]

    def completed(ids: list[int], **limits: Any) -> Completion:
        row = _Row(_Key(0, 0), Limits(**limits), tokenizer, torch.tensor([2]))
        for token in ids:
            if not row.ended_by:
                row.add(token)
        return row.completion()

    stopped = completed(ids, stops=("本",))
    assert (stopped.text, stopped.ended_by, len(stopped.tokens)) == (" a日", "stop", 11)
    # Also where only the end shows that the stop text is there.
    for end in (completed(ids[:10], stops=("本",), max_tokens=10), completed([*ids[:10], 2], stops=("本",))):
        assert (end.text, end.ended_by) == (" a日", "stop")


@pytest.mark.parametrize(
    ("pieces", "shown", "found"),
    [
        (["abc", "\nUs", "er: x"], "abc", "\nUser:"),
        (["abc\nUse", "ful"], "abc\nUseful", None),
        (["a\n", "\n", "\nUser:"], "a\n\n", "\nUser:"),
        (["x END \nUser:"], "x ", "END"),
        (["aab"], "", "aab"),
        (["aaa", "b"], "a", "aab"),
    ],
)
def test_stop_texts_across_pieces_are_found(pieces: list[str], shown: str, found: str | None) -> None:
    stops = StopTexts(["\nUser:", "END", "aab"])
    text = ""
    for piece in pieces:
        text += stops.add(piece)
        if stops.found:
            break
    assert stops.found == found
    assert text + stops.finish() == shown


LOGITS = torch.tensor([[0.0, 3.0, 1.0, 2.0, -1.0]])


def draws(sampling: Sampling, logits: Tensor, count: int = 1000) -> Tensor:
    sampler = Sampler(sampling, [sampling.seed], CPU)
    return torch.cat([sampler.draw(logits) for _ in range(count)])


def test_greedy_settings_draw_likeliest_token() -> None:
    assert draws(Sampling(temperature=0), LOGITS, 3).tolist() == [1, 1, 1]
    assert draws(Sampling(top_k=1), LOGITS, 3).tolist() == [1, 1, 1]
    assert draws(Sampling(top_p=1e-9), LOGITS, 3).tolist() == [1, 1, 1]


@pytest.mark.few(quick=3)
@pytest.mark.parametrize(
    ("sampling", "allowed"),
    [
        (Sampling(), {0, 1, 2, 3, 4}),
        (Sampling(temperature=3.0), {0, 1, 2, 3, 4}),
        (Sampling(top_k=3), {1, 2, 3}),
        # Probabilities 0.64, 0.23, 0.086, …: the first two reach 0.8, the first three 0.9.
        (Sampling(top_p=0.8), {1, 3}),
        (Sampling(top_p=0.9, top_k=4), {1, 2, 3}),
        (Sampling(top_k=99), {0, 1, 2, 3, 4}),
    ],
)
def test_draws_follow_the_probabilities(sampling: Sampling, allowed: set[int]) -> None:
    found = draws(sampling, LOGITS)
    assert set(found.tolist()) == allowed
    expected = (LOGITS[0] / sampling.temperature).softmax(-1)
    expected[[token not in allowed for token in range(5)]] = 0
    expected /= expected.sum()
    torch.testing.assert_close(probabilities(LOGITS, sampling)[0], expected)
    # Four standard deviations of 1000 draws are at most 0.064.
    assert (found.bincount(minlength=5) / len(found) - expected).abs().max() < 0.064


def test_filters_equal_those_of_transformers() -> None:
    from transformers.generation.logits_process import (
        TemperatureLogitsWarper,
        TopKLogitsWarper,
        TopPLogitsWarper,
    )

    logits = torch.randn(50, 200, generator=torch.Generator().manual_seed(0))
    theirs = TemperatureLogitsWarper(0.7)(None, logits)  # type: ignore[arg-type]
    theirs = TopPLogitsWarper(0.9)(None, TopKLogitsWarper(40)(None, theirs)).softmax(-1)  # type: ignore[arg-type]
    torch.testing.assert_close(probabilities(logits, Sampling(0.7, 40, 0.9)), theirs)
    # Draws are equal too for the same seed.
    torch.manual_seed(5)
    expected = [torch.multinomial(theirs[:1], 1).item() for _ in range(20)]
    assert draws(Sampling(0.7, 40, 0.9, seed=5), logits[:1], 20).tolist() == expected


def test_rows_have_independent_random_streams() -> None:
    sampling, logits = Sampling(seed=7), torch.randn(3, 50, generator=torch.Generator().manual_seed(1))
    together = Sampler(sampling, [7, 8, 7], CPU)
    first = together.draw(logits)
    together.keep([2, 1])
    second = together.draw(logits[[2, 1]])
    for row, seed in enumerate([7, 8, 7]):
        alone = Sampler(sampling, [seed], CPU)
        assert alone.draw(logits[row : row + 1]).item() == first[row]
        if row:
            assert alone.draw(logits[row : row + 1]).item() == second[2 - row]


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(temperature=0)])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_nonfinite_rows_are_marked(sampling: Sampling, value: float) -> None:
    logits = torch.zeros(3, 8)
    logits[1, 2] = value
    tokens = Sampler(sampling, [0, 0, 0], CPU).draw(logits).tolist()
    assert tokens[1] == -1
    assert min(tokens[0], tokens[2]) >= 0


@pytest.mark.parametrize(
    "wrong", [{"temperature": -1.0}, {"temperature": float("nan")}, {"top_k": -1}, {"top_p": 0.0}, {"seed": -1}]
)
def test_values_out_of_range(wrong: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        Sampling(**wrong).validate()  # type: ignore[arg-type]
