"""Random operands of every operator in fp64, its recurrence over them, and its passes on simulated ranks."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.nn.functional import normalize

from tests.support.recurrence import recurrence
from zeco_train.ops.operator import WIDE, Kind
from zeco_train.ops.operator_registry import OPERATORS

# Unmasked attention, which reads whole sequences, has tests of its own in tests/sp.
NAMES = tuple(name for name, operator in OPERATORS.items() if not operator.reads_whole)
SIZES = {"B": 1, "H": 4, "G": 2, "K": 6, "V": 5, "C": 7, "W": 4, "1": 1}
DECAYS = ("mixed", "none", "weak", "strong", "underflow", "mild")
# Beside the operands.
ENDS = ("do", "carry_in", "dcarry_out")


def log_decays(decay: str, shape: Sequence[int], generator: torch.Generator) -> Tensor:
    """Of a kind in `DECAYS`, uniform below a bound."""
    strength = torch.rand(*shape, generator=generator, dtype=torch.float64)
    match decay:
        case "none":
            return torch.zeros_like(strength)
        case "weak":
            return -0.02 * strength
        case "mild":
            return -strength
        case "strong":
            return -50.0 * strength
        case "underflow":  # about every third decay is 0 in fp64
            return -0.1 * strength - 2000.0 * (strength < 0.3)
        case _:  # from none through e^-50 a token, another strength for every head or channel
            rates = torch.tensor([0.0, 0.05, 1.0, 50.0, 0.3, 2.0], dtype=torch.float64)
            return -rates[torch.arange(shape[-1]) % 6] * strength


def make(name: str, tokens: int, decay: str = "mixed", **sizes: int) -> dict[str, Tensor]:
    """The operands by name, keys of norm 1; do, carry_in and dcarry_out."""
    generator, operator = torch.Generator().manual_seed(tokens), OPERATORS[name]
    known = SIZES | sizes | {"T": tokens}

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    changes: dict[str, Callable[[Tensor], Tensor]] = {
        "k": lambda x: normalize(x, dim=-1),
        "g": lambda x: log_decays(decay, x.shape, generator),
        "log_decay": lambda x: log_decays(decay, x.shape, generator),
        "beta": lambda x: 2 * x.sigmoid(),
        # Rates of mamba1's decays, at time steps of about 1.
        "A_log": lambda x: (-log_decays(decay, x.shape, generator)).clamp(min=1e-30).log(),
    }
    found = {}
    for key, dims in operator.dims_of.items():
        drawn = random(*(known[dim] for dim in dims))
        found[key] = changes.get(key, lambda x: x)(drawn)
    operands = [*found.values()]
    state = operator.state_shape(operands)
    ends = random(*operands[operator.output].shape), random(*state), random(*state)
    return {**found, **dict(zip(ENDS, ends, strict=True))}


def operands_of(name: str, values: dict[str, Tensor]) -> dict[str, Tensor]:
    """Without what is beside them."""
    return {key: values[key] for key in OPERATORS[name].operands}


def has_tokens(name: str, key: str) -> bool:
    """Whether an operand, or do, has a row for each token."""
    return "T" in OPERATORS[name].dims_of.get(key, "T")


def dims_of(name: str, key: str) -> str:
    """Dimensions of an operand, or of a result or gradient under the names of `recurrence`."""
    operator = OPERATORS[name]
    if key in ("o", "do"):
        return operator.dims[operator.output]
    return (
        "BHKV"
        if key in (*ENDS[1:], "carry_out", "dcarry_in")
        else operator.dims_of[key if key in operator.operands else key[1:]]
    )


def own_tokens(name: str, values: dict[str, Tensor], tokens: slice) -> dict[str, Tensor]:
    """Of some tokens, what has tokens."""
    return {key: x[:, tokens] if "T" in dims_of(name, key) else x for key, x in values.items()}


def in_dtype(name: str, values: dict[str, Tensor], dtype: torch.dtype) -> dict[str, Tensor]:
    """States and decays in fp32."""
    tokens = {"do", *OPERATORS[name].operands} - WIDE.keys()
    return {key: x.to(dtype if key in tokens else torch.float32) for key, x in values.items()}


def tokens_of(name: str, values: dict[str, Tensor], start: int, stop: int) -> list[Tensor]:
    return [x[:, start:stop] if has_tokens(name, key) else x for key, x in operands_of(name, values).items()]


def doc_ids_of(starts: Sequence[int] | None, start: int, stop: int) -> Tensor | None:
    """Of the tokens [start, stop) of a sequence whose state restarts before the tokens `starts`; None: one document."""
    if starts is None:
        return None
    restarts = torch.zeros(stop - start, dtype=torch.int32)
    restarts[[border - start for border in starts if start <= border < stop]] = 1
    return restarts.cumsum(0, dtype=torch.int32)


def expected(name: str, values: dict[str, Tensor], starts: Sequence[int] | None = None) -> dict[str, Tensor]:
    """The recurrence over the whole sequence, in fp64."""
    wide = {key: x.double() for key, x in values.items()}
    return recurrence(name, operands_of(name, wide), wide["do"], starts or (), wide["carry_in"], wide["dcarry_out"])


def expected_of_rows(
    name: str, values: dict[str, Tensor], starts: Sequence[Sequence[int]], *, carry_in: bool, carry_out: bool
) -> dict[str, Tensor]:
    """o, carry_out and all gradients, each sequence by itself; gradients that sequences share are summed.

    `starts`: of each sequence, where documents begin; those outside of it do not count. `carry_in`, `carry_out`:
    whether there is the one, and a gradient of the other.
    """
    rows = []
    # At once where all are alike.
    together = len({*map(tuple, starts)}) == 1
    for row, own in enumerate(starts[:1] if together else starts):
        part = slice(None) if together else slice(row, row + 1)
        of_row = {key: x[part] if "B" in dims_of(name, key) else x for key, x in values.items()}
        do, *states = (of_row.pop(key) for key in ENDS)
        before, dafter = (x if given else None for x, given in zip(states, (carry_in, carry_out), strict=True))
        inside = [start for start in own if start < do.shape[1]]
        rows.append(recurrence(name, of_row, do, inside, before, dafter))
    return {
        key: torch.cat([row[key] for row in rows]) if "B" in dims_of(name, key) else sum(row[key] for row in rows)
        for key in rows[0]
    }


def sharded(
    name: str, values: dict[str, Tensor], edges: Sequence[int], starts: Sequence[int] | None = None
) -> dict[str, Tensor]:
    """The same by the passes, on simulated ranks: rank p has the tokens from edges[p] to edges[p + 1]."""
    operator, is_matrix = OPERATORS[name], OPERATORS[name].kind is Kind.matrix
    shards = [
        (tokens_of(name, values, a, b), values["do"][:, a:b], doc_ids_of(starts, a, b))
        for a, b in itertools.pairwise(edges)
    ]
    passes, scale = operator.select(shards[0][0]), operator.scale_of(shards[0][0], None)
    state, received, transitions, o, saved = values["carry_in"], [], [], [], []
    for operands, _, doc_ids in shards:
        forward = passes.forward(operands, scale, doc_ids)
        own, transition = forward.state.clone(), forward.transition.clone()
        assert forward.state.is_contiguous()
        assert forward.transition.is_contiguous()
        assert (*own.shape,) == operator.state_shape(operands)
        assert (*transition.shape,) == operator.transition_shape(operands)
        forward.overlap()
        o.append(forward.outputs(state))
        saved.append(forward.saved)
        # A scan may still read them.
        assert torch.equal(forward.state, own)
        assert torch.equal(forward.transition, transition)
        received.append(state)
        transitions.append(transition if is_matrix else torch.diag_embed(transition.exp()))
        state = transitions[-1] @ state + own
    grad, grads = values["dcarry_out"], []
    kept = zip(shards, saved, received, transitions, strict=True)
    for (operands, do, doc_ids), of_forward, incoming, transition in reversed([*kept]):
        backward = passes.backward(operands, do, of_forward, incoming, scale, doc_ids)
        own = backward.state_grad.clone()
        backward.overlap()
        grads.append(backward.operand_grads(grad))
        assert torch.equal(backward.state_grad, own)
        for x, dx in zip(operands, grads[-1], strict=True):
            assert (dx.shape, dx.dtype) == (x.shape, x.dtype)
        grad = transition.mT @ grad + own
    results = {"o": torch.cat(o, 1), "carry_out": state, "dcarry_in": grad}
    for key, parts in zip(operator.operands, zip(*grads[::-1], strict=True), strict=True):
        results[f"d{key}"] = torch.cat(parts, 1) if has_tokens(name, key) else torch.stack(parts).sum(0)
    return results


def errors(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> dict[str, float]:
    """The largest of each result, relative to its largest element.

    That of dg to 1 % of dq's if that is larger: where all decays are e^-50, only the rounding of its terms is left.
    """
    assert found.keys() == wanted.keys()
    relative = {}
    for key, x in wanted.items():
        assert found[key].shape == x.shape, key
        largest = max(
            float(x.abs().max()), 0.1 * float(wanted["dq"].abs().max()) if key == "dg" and "dq" in wanted else 0.0
        )
        off = float((found[key].double() - x).abs().max())
        # Written so that a NaN is an error, too.
        relative[key] = off / max(largest, 1e-280) if off == off else float("inf")
    return relative
