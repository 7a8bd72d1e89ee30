"""A batch of whole sequences, cut into the ranks' parts."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from zeco_train.attach.forward import AttachError
from zeco_train.ops.position import SequencePosition, checked_borders, even_bounds

# The position of a rank's tokens in a batch, a `SlicePosition`.
POSITION = "sequence_position"
IGNORED = -100
# Along tokens.
_BY_TOKEN = ("input_ids", "inputs_embeds")
# Borders of documents.
_BORDERS = ("cu_seq_lens_q", "cu_seq_lens_k", "cu_seqlens")
# What is read here, and need not reach the model.
_READ = (*_BORDERS, "attention_mask", "labels", "max_length_k", "max_length_q", "seq_idx")
_KEPT = (
    "num_items_in_batch",
    "output_hidden_states",
    "output_router_logits",
    "position_ids",
    "return_dict",
    "use_cache",
)

Documents = Tensor | Sequence[int] | Sequence[Sequence[int] | Tensor]


class SlicePosition(SequencePosition):
    """Where a rank's tokens lie in the sequences that they were cut from."""

    whole: Tensor | None = None  # checksum of those, [] int64; None: of no token ids


def checksum(tokens: Tensor) -> Tensor | None:
    """[] int64, on the tokens' device, of token ids [B, T] in their places; None for what else a model may be given."""
    if tokens.is_floating_point():
        return None
    return (tokens.flatten() * torch.arange(1, tokens.numel() + 1, device=tokens.device)).sum()


def cut(
    batch: Mapping[str, Any],
    rank: int,
    size: int,
    documents: Documents | None = None,
    lengths: Sequence[int] | None = None,
) -> dict[str, Any]:
    """This rank's part of a batch that all ranks of a sequence have whole; see `Attached.shard`."""
    known = {*_BY_TOKEN, *_READ, *_KEPT, "shift_labels"}
    if unknown := sorted(name for name in batch if name not in known and batch[name] is not None):
        raise AttachError(f"{unknown[0]}: cannot be cut; known are {', '.join(sorted(known))}")
    batch = {name: value for name, value in batch.items() if value is not None}
    tokens = batch.get("input_ids", batch.get("inputs_embeds"))
    if tokens is None or tokens.dim() < 2:
        raise AttachError("input_ids: a batch needs them, [B, T], or inputs_embeds [B, T, D]")
    rows, seq_len = tokens.shape[:2]
    for name in ("labels", "shift_labels", "position_ids", "seq_idx"):
        shape = tuple(batch[name].shape) if name in batch else (rows, seq_len)
        # Of all rows alike.
        if shape != (rows, seq_len) and (shape != (1, seq_len) or "labels" in name):
            raise AttachError(f"{name}: expected [{rows}, {seq_len}], got {list(shape)}")
    bounds = _bounds(seq_len, size, lengths)
    own = slice(bounds[rank], bounds[rank + 1])
    borders = _documents(batch, documents, rows, seq_len)
    part = {name: batch[name][:, own] for name in _BY_TOKEN if name in batch}
    part |= {name: batch[name] for name in _KEPT if name in batch and name != "position_ids"}
    part["position_ids"] = _positions(batch.get("position_ids"), borders, rows, seq_len, tokens.device)[:, own]
    part[POSITION] = SlicePosition(bounds, rank, documents=borders)
    vars(part[POSITION])["whole"] = checksum(tokens)
    is_token = _tokens(batch.get("attention_mask"), rows, seq_len)
    if is_token is not None:
        part["attention_mask"] = is_token[:, own]
    if "labels" in batch or "shift_labels" in batch:
        shifted = _shifted(batch, borders)
        if is_token is not None and bool((shifted != IGNORED)[~is_token.to(shifted.device)].any()):
            raise AttachError(f"labels: padded tokens must have label {IGNORED}")
        part["shift_labels"] = part["labels"] = shifted[:, own].contiguous()
        part.setdefault("num_items_in_batch", (shifted != IGNORED).sum())
    return part


def _bounds(seq_len: int, size: int, lengths: Sequence[int] | None) -> list[int]:
    bounds = even_bounds(seq_len, size) if lengths is None else [*itertools.accumulate(lengths, initial=0)]
    found = [stop - start for start, stop in itertools.pairwise(bounds)]
    if len(found) != size or bounds[-1] != seq_len or min(found) < 1:
        raise AttachError(f"lengths={found}: expected {size} lengths ≥ 1 that sum to {seq_len}")
    return bounds


# Of each row the borders of its documents; None: each row is one.
def _documents(batch: Mapping[str, Any], documents: Documents | None, rows: int, seq_len: int) -> list[Tensor] | None:
    given = {"documents": documents, **{name: batch.get(name) for name in _BORDERS}}
    found = {name: _checked(name, each, rows, seq_len) for name, each in given.items() if each is not None}
    if "seq_idx" in batch:
        found["seq_idx"] = _borders(batch["seq_idx"].diff(dim=1) != 0, rows, seq_len)
    for name, borders in found.items():
        first = next(iter(found))
        if any(not torch.equal(a.unique(), b.unique()) for a, b in zip(borders, found[first], strict=True)):
            raise AttachError(f"{name}: begins other documents than {first}")
    if found:
        return next(iter(found.values()))
    if (positions := batch.get("position_ids")) is None:
        return None
    restarts = positions.diff(dim=1) != 1
    if not bool(restarts.any()):
        return None
    if bool((positions[:, 1:][restarts] != 0).any()) or bool((positions[:, 0] != 0).any()):
        raise AttachError("position_ids: may only rise by 1, or restart at 0 where a document begins")
    return _borders(restarts, rows, seq_len)


def _checked(name: str, documents: Documents, rows: int, seq_len: int) -> list[Tensor]:
    is_one = isinstance(documents, Tensor) or not len(documents) or isinstance(documents[0], int)
    each = [documents] * rows if is_one else list(documents)
    if len(each) != rows:
        raise AttachError(f"{name}: of {len(each)} rows, the batch has {rows}")
    try:
        return [checked_borders(name, row, seq_len) for row in each]  # type: ignore[arg-type]
    except ValueError as error:
        raise AttachError(str(error)) from error


# Of starts [1 or rows, T − 1] bool: where another document begins than that of the token before.
def _borders(starts: Tensor, rows: int, seq_len: int) -> list[Tensor]:
    ends = torch.tensor([0]), torch.tensor([seq_len])
    return [torch.cat([ends[0], row.nonzero().flatten() + 1, ends[1]]) for row in starts.expand(rows, -1).cpu()]


def _positions(
    given: Tensor | None, borders: list[Tensor] | None, rows: int, seq_len: int, device: torch.device
) -> Tensor:
    if borders is None:
        found = torch.arange(seq_len, device=device)[None] if given is None else given
        return found.expand(rows, -1)
    found = torch.stack([torch.cat([torch.arange(int(n)) for n in row.diff()]) for row in borders]).to(device)
    if given is not None and not torch.equal(given.to(device).expand(rows, -1), found):
        raise AttachError("position_ids: do not restart where the documents do")
    return found


# [B, T] bool, where a token is no padding; None: nowhere is padding.
def _tokens(mask: Tensor | None, rows: int, seq_len: int) -> Tensor | None:
    if mask is None:
        return None
    if mask.dim() != 2 or tuple(mask.shape) != (rows, seq_len):
        raise AttachError(f"attention_mask: expected one of padding, [{rows}, {seq_len}], got {list(mask.shape)}")
    found = mask.bool()
    if bool((found[:, 1:] & ~found[:, :-1]).any()):
        raise AttachError("attention_mask: padding before a token; pad on the right, where it changes no other token")
    return None if bool(found.all()) else found


# The label of each token, the next one's; none of another document.
def _shifted(batch: Mapping[str, Any], borders: list[Tensor] | None) -> Tensor:
    if "shift_labels" in batch:
        return batch["shift_labels"]
    labels = batch["labels"]
    shifted = torch.full_like(labels, IGNORED)
    shifted[:, :-1] = labels[:, 1:]
    for row, ends in enumerate(borders or ()):
        shifted[row, ends[1:].to(labels.device) - 1] = IGNORED
    return shifted
