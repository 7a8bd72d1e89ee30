"""Chunked linear cross-entropy against `torch.nn.functional.cross_entropy` over whole logits."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

from zeco_train.ops.loss import LossParts, linear_cross_entropy, scale_into, token_losses

pytestmark = pytest.mark.numeric

VOCAB, WIDTH = 37, 8


def make_inputs(
    batch: int = 2, tokens: int = 50, dtype: torch.dtype = torch.float64, vocab: int = VOCAB, width: int = WIDTH
) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(batch, tokens, width, generator=generator, dtype=torch.float64).to(dtype)
    weight = torch.randn(vocab, width, generator=generator, dtype=torch.float64).to(dtype)
    labels = torch.randint(vocab, (batch, tokens), generator=generator)
    labels[torch.rand(labels.shape, generator=generator) < 0.2] = -100
    return hidden.requires_grad_(), weight.requires_grad_(), labels


def reference(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy((hidden @ weight.T).flatten(0, -2), labels.flatten(), reduction="sum")


@pytest.mark.parametrize("chunk_tokens", [1, 7, 50, 100, 2048])
def test_loss_and_gradients_equal_unchunked_reference(chunk_tokens: int) -> None:
    hidden, weight, labels = make_inputs()
    # A factor that is neither 1 nor a power of two, like gradient scaling by the token count.
    loss = linear_cross_entropy(hidden, weight, labels, chunk_tokens)
    grads = torch.autograd.grad(loss * 0.37, (hidden, weight))
    expected = reference(hidden, weight, labels)
    expected_grads = torch.autograd.grad(expected * 0.37, (hidden, weight))
    # fp64, sums of at most a hundred terms in another order.
    torch.testing.assert_close(loss, expected, rtol=1e-13, atol=0)
    for name, ours, theirs in zip(("dhidden", "dweight"), grads, expected_grads, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-13, msg=lambda m, name=name: f"{name}: {m}")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_low_precision_stays_within_rounding_of_fp64(dtype: torch.dtype) -> None:
    hidden, weight, labels = make_inputs(dtype=dtype)
    loss = linear_cross_entropy(hidden, weight, labels, 16)
    assert loss.dtype == torch.float32
    grads = torch.autograd.grad(loss, (hidden, weight))
    wide = [t.detach().double().requires_grad_() for t in (hidden, weight)]
    expected = reference(*wide, labels)
    expected_grads = torch.autograd.grad(expected, wide)
    # Logits (|z| < 10) are rounded to the dtype before the softmax, so probabilities err by up to 10 eps; sums of 8
    # (D) to 100 (tokens) such terms follow.
    eps = torch.finfo(dtype).eps
    torch.testing.assert_close(loss.double(), expected, rtol=4 * eps, atol=0)
    for ours, theirs in zip(grads, expected_grads, strict=True):
        assert ours.dtype == dtype
        torch.testing.assert_close(ours.double(), theirs, rtol=8 * eps, atol=8 * eps * theirs.abs().max().item())


def test_only_ignored_labels_give_zero_loss_and_gradients() -> None:
    hidden, weight, labels = make_inputs()
    loss = linear_cross_entropy(hidden, weight, torch.full_like(labels, -100), 16)
    grads = torch.autograd.grad(loss, (hidden, weight))
    assert loss.item() == 0
    assert all(not grad.any() for grad in grads)


@pytest.fixture
def compiled() -> Iterator[LossParts]:
    """Each part compiled as one graph."""
    torch._dynamo.reset()
    yield LossParts.compiled(backend="aot_eager")
    torch._dynamo.reset()


@pytest.mark.few
@pytest.mark.parametrize("want_grad", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_compiled_token_losses_equal_eager(compiled: LossParts, dtype: torch.dtype, want_grad: bool) -> None:
    """The compiled form subtracts the target's 1 by comparison instead of a scatter, and not in place."""
    hidden, weight, labels = make_inputs()
    logits, targets = (hidden.detach() @ weight.detach().T).flatten(0, 1).to(dtype), labels.flatten()
    loss_dtype = torch.float64 if dtype == torch.float64 else torch.float32
    before = logits.clone()
    loss, dlogits = compiled.token_losses(logits, targets, loss_dtype, want_grad)
    assert torch.equal(logits, before)
    expected, expected_dlogits = token_losses(logits.clone(), targets, loss_dtype, want_grad)
    assert (loss.dtype, dlogits.dtype, dlogits.shape) == (loss_dtype, dtype, expected_dlogits.shape)
    # The same operations except for the order of a sum.
    torch.testing.assert_close(loss, expected, rtol=4 * torch.finfo(loss_dtype).eps, atol=0)
    eps = torch.finfo(dtype).eps
    torch.testing.assert_close(dlogits, expected_dlogits, rtol=eps, atol=torch.finfo(loss_dtype).eps)
    if want_grad:
        assert (targets == -100).any()
        assert not dlogits[targets == -100].any()


@pytest.mark.slow
def test_loss_with_compiled_parts_equals_eager(compiled: LossParts) -> None:
    """With a shorter last chunk, a last chunk of one token, and only ignored labels."""
    hidden, weight, labels = make_inputs()
    for chunk_tokens, targets in ((16, labels), (99, labels), (16, torch.full_like(labels, -100))):
        results = []
        for parts in (LossParts(), compiled):
            loss = linear_cross_entropy(hidden, weight, targets, chunk_tokens, parts)
            results.append([loss, *torch.autograd.grad(loss * 0.37, (hidden, weight))])
        for ours, theirs in zip(*results, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-13, atol=1e-14)


class _LargestTensor(TorchDispatchMode):
    """Records the largest number of elements of any tensor that an operation returns."""

    largest = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        sizes = [leaf.numel() for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
        self.largest = max(self.largest, *sizes, 0)
        return result


def test_logits_are_materialised_for_one_chunk_at_a_time() -> None:
    tokens, vocab, chunk_tokens = 1000, 500, 20
    hidden, weight, labels = make_inputs(1, tokens, torch.float32, vocab)
    with _LargestTensor() as whole:
        reference(hidden, weight, labels).backward()
    assert whole.largest == tokens * vocab  # the measurement sees whole logits
    with _LargestTensor() as chunked:
        linear_cross_entropy(hidden, weight, labels, chunk_tokens).backward()
    assert chunked.largest == max(chunk_tokens * vocab, tokens * WIDTH, vocab * WIDTH)


@pytest.mark.parametrize(
    ("grad_enabled", "train_hidden", "train_weight", "products"),
    [(True, True, True, 3), (True, True, False, 2), (True, False, True, 2), (False, True, True, 1)],
)
def test_only_required_gradients_are_computed(
    grad_enabled: bool, train_hidden: bool, train_weight: bool, products: int
) -> None:
    hidden, weight, labels = make_inputs()
    hidden.requires_grad_(train_hidden)
    weight.requires_grad_(train_weight)
    with FlopCounterMode(display=False) as counter, torch.set_grad_enabled(grad_enabled):
        loss = linear_cross_entropy(hidden, weight, labels, 16)
    assert counter.get_total_flops() == products * 2 * labels.numel() * VOCAB * WIDTH
    assert loss.requires_grad == grad_enabled


# Only GPUs round a factor without dimensions.
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("form", ["eager", "compiled"])
def test_gradients_are_scaled_without_rounding_the_factor(form: str, device: str, compiled: LossParts) -> None:
    """1/3 in bf16 is off by 2⁻⁹, which would scale all gradients but the head's."""
    scale = compiled.scale_into if form == "compiled" else scale_into
    source = torch.arange(1.0, 257, device=device).to(torch.bfloat16).view(16, 16)
    factor, expected = torch.tensor(1 / 3, device=device), (source.double() / 3).to(torch.bfloat16)
    other, another = torch.empty_like(source), torch.empty_like(source)
    scale([source, source.float()], factor, [other, another])
    assert torch.equal(other, expected)
    assert torch.equal(another, expected)
    scale([source], factor, [source])
    assert torch.equal(source, expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
@pytest.mark.parametrize("form", ["eager", pytest.param("compiled", marks=pytest.mark.slow)])
def test_inputs_need_not_be_contiguous(form: str, dtype: torch.dtype, compiled: LossParts) -> None:
    parts = compiled if form == "compiled" else LossParts()
    hidden, weight, labels = make_inputs(1, 30, dtype)
    results = []
    for make in (lambda x: x, lambda x: x.mT.contiguous().mT):
        inputs = [make(x.detach()).requires_grad_() for x in (hidden, weight)]
        loss = linear_cross_entropy(*inputs, labels, 16, parts)
        results.append([loss, *torch.autograd.grad(loss * 0.37, inputs)])
    # Products of other strides may add up in another order, and logits are rounded to the dtype.
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(
            ours, theirs, rtol=torch.finfo(dtype).eps * 4, atol=1e-3 if dtype is torch.bfloat16 else 1e-13
        )


@pytest.mark.parametrize("form", ["eager", pytest.param("compiled", marks=pytest.mark.slow)])
def test_second_backward_is_refused(form: str, compiled: LossParts) -> None:
    hidden, weight, labels = make_inputs()
    loss = linear_cross_entropy(hidden, weight, labels, parts=compiled if form == "compiled" else LossParts())
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_mismatched_shapes_and_invalid_labels_are_refused() -> None:
    hidden, weight, labels = make_inputs()
    with pytest.raises(ValueError, match="do not fit"):
        linear_cross_entropy(hidden, weight, labels[:, 1:])
    with pytest.raises(ValueError, match="do not fit"):
        linear_cross_entropy(hidden, weight.T, labels)
    with pytest.raises(ValueError, match="chunk_tokens=0"):
        linear_cross_entropy(hidden, weight, labels, 0)
    for wrong in (VOCAB, -1):
        with pytest.raises((RuntimeError, IndexError), match="out of bounds"):
            linear_cross_entropy(hidden, weight, torch.full_like(labels, wrong))
