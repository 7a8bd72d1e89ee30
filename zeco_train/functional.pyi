"""Every operator as a differentiable function. Made by `lab/functional_stub.py`; do not edit."""

from collections.abc import Sequence

from torch import Tensor

from zeco_train.sp.functions import Ranks as Ranks
from zeco_train.sp.functions import connect as connect

__all__: list[str]

def gla(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    *,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    documents: Sequence[Sequence[int] | Tensor] | None = None,
    bounds: Sequence[int] | None = None,
    ranks: Ranks | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Gated linear attention, a decay for each channel of the keys (Yang et al. 2023, arXiv 2312.06635).

        S_t = exp(g_t) ⊙_K S_{t-1} + k_t v_tᵀ,    o_t = scale · q_tᵀ S_t

    Args:
        q: [B, T, H, K].
        k: [B, T, H, K].
        v: [B, T, H, V].
        g: [B, T, H, K], log-decays, finite and at most 0; fp32 (fp64 for fp64).
        scale: factor of the outputs; None is q.shape[-1] ** -0.5.
        initial_state: [B, H, K, V], the state before the sequence, in fp32 (fp64 for fp64 operands); None is zero. The
            first document continues from it. The same on all ranks, as is its gradient: do not sum it over ranks.
        output_final_state: also return the state after the sequence, the same on all ranks.
        documents: for each of the B sequences the borders of its documents, from 0 to the length of the whole
            sequence; nothing is read across them. None: each sequence is one document.
        bounds: rank r has the tokens [bounds[r], bounds[r + 1]) of each sequence; None: all ranks have as many.
        ranks: the ranks that share the sequences, see `connect`; None: this one has them whole.

    Returns:
        o, shaped as v and in its dtype, and the state after the sequence or None.

    Raises:
        ValueError: a shape, dtype, device or border that does not fit, by name.
    """

def scalar_decay(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    *,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    documents: Sequence[Sequence[int] | Tensor] | None = None,
    bounds: Sequence[int] | None = None,
    ranks: Ranks | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Linear attention with one decay a head and token, as of Mamba-2.

        S_t = exp(g_t) S_{t-1} + k_t v_tᵀ,    o_t = scale · q_tᵀ S_t

    Args:
        q: [B, T, G, K].
        k: [B, T, G, K].
        v: [B, T, H, V].
        g: [B, T, H], log-decays, finite and at most 0; fp32 (fp64 for fp64).
        scale: factor of the outputs; None is q.shape[-1] ** -0.5.
        initial_state: [B, H, K, V], the state before the sequence, in fp32 (fp64 for fp64 operands); None is zero. The
            first document continues from it. The same on all ranks, as is its gradient: do not sum it over ranks.
        output_final_state: also return the state after the sequence, the same on all ranks.
        documents: for each of the B sequences the borders of its documents, from 0 to the length of the whole
            sequence; nothing is read across them. None: each sequence is one document.
        bounds: rank r has the tokens [bounds[r], bounds[r + 1]) of each sequence; None: all ranks have as many.
        ranks: the ranks that share the sequences, see `connect`; None: this one has them whole.

    Returns:
        o, shaped as v and in its dtype, and the state after the sequence or None.

    Raises:
        ValueError: a shape, dtype, device or border that does not fit, by name.
    """

def fixed_decay(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor,
    *,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    documents: Sequence[Sequence[int] | Tensor] | None = None,
    bounds: Sequence[int] | None = None,
    ranks: Ranks | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Linear attention with one decay a head for all tokens, as of RetNet.

        S_t = exp(log_decay) S_{t-1} + k_t v_tᵀ,    o_t = scale · q_tᵀ S_t

    Args:
        q: [B, T, G, K].
        k: [B, T, G, K].
        v: [B, T, H, V].
        log_decay: [H], log-decays as g, of all tokens; constants without gradient.
        scale: factor of the outputs; None is q.shape[-1] ** -0.5.
        initial_state: [B, H, K, V], the state before the sequence, in fp32 (fp64 for fp64 operands); None is zero. The
            first document continues from it. The same on all ranks, as is its gradient: do not sum it over ranks.
        output_final_state: also return the state after the sequence, the same on all ranks.
        documents: for each of the B sequences the borders of its documents, from 0 to the length of the whole
            sequence; nothing is read across them. None: each sequence is one document.
        bounds: rank r has the tokens [bounds[r], bounds[r + 1]) of each sequence; None: all ranks have as many.
        ranks: the ranks that share the sequences, see `connect`; None: this one has them whole.

    Returns:
        o, shaped as v and in its dtype, and the state after the sequence or None.

    Raises:
        ValueError: a shape, dtype, device or border that does not fit, by name.
    """

def short_conv(
    x: Tensor,
    weight: Tensor,
    bias: Tensor,
    *,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    documents: Sequence[Sequence[int] | Tensor] | None = None,
    bounds: Sequence[int] | None = None,
    ranks: Ranks | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Short causal depthwise convolution; the state is the last inputs, [B, 1, W - 1, C].

        o_t = bias + Σ_{j<W} weight[:, 0, j] ⊙ x_{t-(W-1)+j}

    Args:
        x: [B, T, C].
        weight: [C, 1, W], the same on all ranks; its gradient is of this rank's tokens: sum it over ranks.
        bias: [C], the same on all ranks; its gradient is of this rank's tokens: sum it over ranks.
        initial_state: [B, H, K, V], the state before the sequence, in fp32 (fp64 for fp64 operands); None is zero. The
            first document continues from it. The same on all ranks, as is its gradient: do not sum it over ranks.
        output_final_state: also return the state after the sequence, the same on all ranks.
        documents: for each of the B sequences the borders of its documents, from 0 to the length of the whole
            sequence; nothing is read across them. None: each sequence is one document.
        bounds: rank r has the tokens [bounds[r], bounds[r + 1]) of each sequence; None: all ranks have as many.
        ranks: the ranks that share the sequences, see `connect`; None: this one has them whole.

    Returns:
        o, shaped as x and in its dtype, and the state after the sequence or None.

    Raises:
        ValueError: a shape, dtype, device or border that does not fit, by name.
    """

def unmasked(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    scale: float | None = None,
    ranks: Ranks | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Unmasked linear attention: each token reads all tokens (Sun et al. 2025, arXiv 2502.07563).

        o_i = scale · q_iᵀ Σ_j k_j v_jᵀ,    over the whole sequence

    Args:
        q: [B, T, H, K].
        k: [B, T, H, K].
        v: [B, T, H, V].
        scale: factor of the outputs; None is q.shape[-1] ** -0.5.
        ranks: the ranks that share the sequences, see `connect`; None: this one has them whole.

    Returns:
        o, shaped as v and in its dtype, and the state after the sequence or None.

    Raises:
        ValueError: a shape, dtype, device or border that does not fit, by name.
    """

def delta(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    *,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    documents: Sequence[Sequence[int] | Tensor] | None = None,
    bounds: Sequence[int] | None = None,
    ranks: Ranks | None = None,
) -> tuple[Tensor, Tensor | None]:
    """The delta rule of DeltaNet (Yang et al. 2024, arXiv 2406.06484); keys must have norm 1.

        S_t = (I − β_t k_t k_tᵀ) S_{t-1} + β_t k_t v_tᵀ,    o_t = scale · q_tᵀ S_t

    Args:
        q: [B, T, G, K].
        k: [B, T, G, K].
        v: [B, T, H, V].
        beta: [B, T, H], writing strengths, from 0 to 2; fp32 (fp64 for fp64).
        scale: factor of the outputs; None is q.shape[-1] ** -0.5.
        initial_state: [B, H, K, V], the state before the sequence, in fp32 (fp64 for fp64 operands); None is zero. The
            first document continues from it. The same on all ranks, as is its gradient: do not sum it over ranks.
        output_final_state: also return the state after the sequence, the same on all ranks.
        documents: for each of the B sequences the borders of its documents, from 0 to the length of the whole
            sequence; nothing is read across them. None: each sequence is one document.
        bounds: rank r has the tokens [bounds[r], bounds[r + 1]) of each sequence; None: all ranks have as many.
        ranks: the ranks that share the sequences, see `connect`; None: this one has them whole.

    Returns:
        o, shaped as v and in its dtype, and the state after the sequence or None.

    Raises:
        ValueError: a shape, dtype, device or border that does not fit, by name.
    """

def gated_delta(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    *,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    documents: Sequence[Sequence[int] | Tensor] | None = None,
    bounds: Sequence[int] | None = None,
    ranks: Ranks | None = None,
) -> tuple[Tensor, Tensor | None]:
    """The gated delta rule, a decay a head (Yang et al. 2024, arXiv 2412.06464); keys must have norm 1.

        S_t = (I − β_t k_t k_tᵀ) Diag(exp(g_t)) S_{t-1} + β_t k_t v_tᵀ,    o_t = scale · q_tᵀ S_t

    Args:
        q: [B, T, G, K].
        k: [B, T, G, K].
        v: [B, T, H, V].
        g: [B, T, H], log-decays, finite and at most 0; fp32 (fp64 for fp64).
        beta: [B, T, H], writing strengths, from 0 to 2; fp32 (fp64 for fp64).
        scale: factor of the outputs; None is q.shape[-1] ** -0.5.
        initial_state: [B, H, K, V], the state before the sequence, in fp32 (fp64 for fp64 operands); None is zero. The
            first document continues from it. The same on all ranks, as is its gradient: do not sum it over ranks.
        output_final_state: also return the state after the sequence, the same on all ranks.
        documents: for each of the B sequences the borders of its documents, from 0 to the length of the whole
            sequence; nothing is read across them. None: each sequence is one document.
        bounds: rank r has the tokens [bounds[r], bounds[r + 1]) of each sequence; None: all ranks have as many.
        ranks: the ranks that share the sequences, see `connect`; None: this one has them whole.

    Returns:
        o, shaped as v and in its dtype, and the state after the sequence or None.

    Raises:
        ValueError: a shape, dtype, device or border that does not fit, by name.
    """

def kda(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    *,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    documents: Sequence[Sequence[int] | Tensor] | None = None,
    bounds: Sequence[int] | None = None,
    ranks: Ranks | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Kimi Delta Attention, a decay for each channel of the keys (2025, arXiv 2510.26692); keys must have norm 1.

        S_t = (I − β_t k_t k_tᵀ) Diag(exp(g_t)) S_{t-1} + β_t k_t v_tᵀ,    o_t = scale · q_tᵀ S_t

    Args:
        q: [B, T, G, K].
        k: [B, T, G, K].
        v: [B, T, H, V].
        g: [B, T, H, K], log-decays, finite and at most 0; fp32 (fp64 for fp64).
        beta: [B, T, H], writing strengths, from 0 to 2; fp32 (fp64 for fp64).
        scale: factor of the outputs; None is q.shape[-1] ** -0.5.
        initial_state: [B, H, K, V], the state before the sequence, in fp32 (fp64 for fp64 operands); None is zero. The
            first document continues from it. The same on all ranks, as is its gradient: do not sum it over ranks.
        output_final_state: also return the state after the sequence, the same on all ranks.
        documents: for each of the B sequences the borders of its documents, from 0 to the length of the whole
            sequence; nothing is read across them. None: each sequence is one document.
        bounds: rank r has the tokens [bounds[r], bounds[r + 1]) of each sequence; None: all ranks have as many.
        ranks: the ranks that share the sequences, see `connect`; None: this one has them whole.

    Returns:
        o, shaped as v and in its dtype, and the state after the sequence or None.

    Raises:
        ValueError: a shape, dtype, device or border that does not fit, by name.
    """

def hgrn(
    x: Tensor,
    g: Tensor,
    *,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    documents: Sequence[Sequence[int] | Tensor] | None = None,
    bounds: Sequence[int] | None = None,
    ranks: Ranks | None = None,
) -> tuple[Tensor, Tensor | None]:
    """The elementwise recurrence of HGRN (Qin et al. 2023, arXiv 2311.04823); states are [B, H, K, 1].

        h_t = exp(g_t) ⊙ h_{t-1} + x_t,    o_t = h_t

    Args:
        x: [B, T, H, K].
        g: [B, T, H, K], log-decays, finite and at most 0; fp32 (fp64 for fp64).
        initial_state: [B, H, K, V], the state before the sequence, in fp32 (fp64 for fp64 operands); None is zero. The
            first document continues from it. The same on all ranks, as is its gradient: do not sum it over ranks.
        output_final_state: also return the state after the sequence, the same on all ranks.
        documents: for each of the B sequences the borders of its documents, from 0 to the length of the whole
            sequence; nothing is read across them. None: each sequence is one document.
        bounds: rank r has the tokens [bounds[r], bounds[r + 1]) of each sequence; None: all ranks have as many.
        ranks: the ranks that share the sequences, see `connect`; None: this one has them whole.

    Returns:
        o, shaped as x and in its dtype, and the state after the sequence or None.

    Raises:
        ValueError: a shape, dtype, device or border that does not fit, by name.
    """

def gsa(
    q: Tensor,
    k: Tensor,
    s: Tensor,
    g: Tensor,
    *,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    documents: Sequence[Sequence[int] | Tensor] | None = None,
    bounds: Sequence[int] | None = None,
    ranks: Ranks | None = None,
) -> tuple[Tensor, Tensor | None]:
    """The first pass of gated slot attention (Zhang et al. 2024, arXiv 2409.07146); its second pass is `gla`.

        S_t = exp(g_t) ⊙_K S_{t-1} + s_t k_tᵀ,    o_t = scale · S_t q_t

    Args:
        q: [B, T, H, V].
        k: [B, T, H, V].
        s: [B, T, H, K].
        g: [B, T, H, K], log-decays, finite and at most 0; fp32 (fp64 for fp64).
        scale: factor of the outputs; None is q.shape[-1] ** -0.5.
        initial_state: [B, H, K, V], the state before the sequence, in fp32 (fp64 for fp64 operands); None is zero. The
            first document continues from it. The same on all ranks, as is its gradient: do not sum it over ranks.
        output_final_state: also return the state after the sequence, the same on all ranks.
        documents: for each of the B sequences the borders of its documents, from 0 to the length of the whole
            sequence; nothing is read across them. None: each sequence is one document.
        bounds: rank r has the tokens [bounds[r], bounds[r + 1]) of each sequence; None: all ranks have as many.
        ranks: the ranks that share the sequences, see `connect`; None: this one has them whole.

    Returns:
        o, shaped as s and in its dtype, and the state after the sequence or None.

    Raises:
        ValueError: a shape, dtype, device or border that does not fit, by name.
    """

def mamba1(
    x: Tensor,
    dt: Tensor,
    A_log: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor,
    dt_bias: Tensor,
    *,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    documents: Sequence[Sequence[int] | Tensor] | None = None,
    bounds: Sequence[int] | None = None,
    ranks: Ranks | None = None,
) -> tuple[Tensor, Tensor | None]:
    """The selective scan of Mamba (Gu & Dao 2023, arXiv 2312.00752); states are [B, H, K, 1].

        h_t = exp(Δ_t A) ⊙ h_{t-1} + Δ_t x_t B_t,    o_t = Σ_k C_t ⊙ h_t + D ⊙ x_t

    with Δ = softplus(dt + dt_bias) and A = -exp(A_log).

    Args:
        x: [B, T, H].
        dt: [B, T, H].
        A_log: [H, K], the same on all ranks; its gradient is of this rank's tokens: sum it over ranks.
        B: [B, T, K].
        C: [B, T, K].
        D: [H], the same on all ranks; its gradient is of this rank's tokens: sum it over ranks.
        dt_bias: [H], the same on all ranks; its gradient is of this rank's tokens: sum it over ranks.
        initial_state: [B, H, K, V], the state before the sequence, in fp32 (fp64 for fp64 operands); None is zero. The
            first document continues from it. The same on all ranks, as is its gradient: do not sum it over ranks.
        output_final_state: also return the state after the sequence, the same on all ranks.
        documents: for each of the B sequences the borders of its documents, from 0 to the length of the whole
            sequence; nothing is read across them. None: each sequence is one document.
        bounds: rank r has the tokens [bounds[r], bounds[r + 1]) of each sequence; None: all ranks have as many.
        ranks: the ranks that share the sequences, see `connect`; None: this one has them whole.

    Returns:
        o, shaped as x and in its dtype, and the state after the sequence or None.

    Raises:
        ValueError: a shape, dtype, device or border that does not fit, by name.
    """

def softmax_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    scale: float | None = None,
    window: int | None = None,
    documents: Sequence[Sequence[int] | Tensor] | None = None,
    bounds: Sequence[int] | None = None,
    ranks: Ranks | None = None,
) -> Tensor:
    """Causal softmax attention, for hybrids: o_t = Σ_j softmax_j(scale · q_t · k_j) v_j over the tokens j ≤ t.

    Args:
        q: [B, T, H, D], in bf16, fp32 or fp64.
        k: [B, T, G, D]; G divides H, each head serves H / G heads of q in a row.
        v: [B, T, G, V].
        scale: factor of the scores; None is D^-1/2.
        window: keys that a query reads at most, itself among them; None: no limit.
        documents: for each of the B sequences the borders of its documents, from 0 to the length of the whole
            sequence; nothing is read across them. None: each sequence is one document.
        bounds: rank r has the tokens [bounds[r], bounds[r + 1]) of each sequence; needed over several ranks.
        ranks: the ranks that share the sequences, see `connect`; None: this one has them whole.

    Returns:
        o, [B, T, H, V] in the dtype of q.

    Raises:
        ValueError: a shape, dtype, device or border that does not fit, by name.
    """
