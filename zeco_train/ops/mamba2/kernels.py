"""The kernels of a Mamba-2 layer's elementwise parts (`zeco_train.ops.mamba2`), each one pass over its tensors.

N are the tokens of all sequences. A tile is [tokens, heads, channels of a head], so that numbers of a head are read
once for its channels.
"""

from __future__ import annotations

import torch
import triton.language as tl
from torch import Tensor

from zeco_train.kernels import cdiv, jit, next_power_of_2


@jit
def _sigmoid(x):
    return 1.0 / (1.0 + tl.exp(-x))


@jit
def _slope(x, sigmoid):
    """The derivative of x σ(x)."""
    return sigmoid * (1.0 + x * (1.0 - sigmoid))


@jit
def softplus(x):
    """log(1 + exp(x)), to the last digits of a small one."""
    y = tl.exp(-tl.abs(x))
    total = 1.0 + y
    log = tl.where(total == 1.0, y, tl.log(total) * (y / tl.where(total == 1.0, 1.0, total - 1.0)))
    return tl.maximum(x, 0.0) + log


@jit
def _load(tensor, place, inside):
    return tl.load(tensor + place, mask=inside, other=0.0).to(tl.float32)


@jit
def _steps(logits, decay, row, head, inside, logits_n, least, most, H: tl.constexpr):
    """Logits l + dt_bias, their softplus, dt, and −exp(A_log): [BR, BH], and [1, BH]."""
    shifted = _load(logits, row.to(tl.int64)[:, None] * logits_n + head, inside)
    shifted += _load(decay, head, head < H)[None, :]
    raw = softplus(shifted)
    rate = -tl.exp(_load(decay, H + head, head < H))[None, :]
    return shifted, raw, tl.minimum(tl.maximum(raw, least), most), rate


@jit
def operands_kernel(
    u,  # [N, H·V + 2·GK], elements of a row side by side, as those of logits
    logits,  # [N, H]
    decay,  # [3, H] fp32: dt_bias, A_log, D
    queries,  # [N, GK], written, as are the next
    keys,
    values,  # [N, H, V]
    g,  # [N, H] fp32
    rows,  # N
    u_n,  # from n to n + 1, of each
    logits_n,
    least,
    most,
    H: tl.constexpr,
    V: tl.constexpr,
    GK: tl.constexpr,
    BR: tl.constexpr,
    BH: tl.constexpr,
    BV: tl.constexpr,
    BC: tl.constexpr,
    HEAD_BLOCKS: tl.constexpr,
    COLUMN_BLOCKS: tl.constexpr,
):
    """A program computes BR tokens of BH heads, or of BC columns of keys or queries."""
    block = tl.program_id(0) % (HEAD_BLOCKS + 2 * COLUMN_BLOCKS)
    row = tl.program_id(0) // (HEAD_BLOCKS + 2 * COLUMN_BLOCKS) * BR + tl.arange(0, BR)
    n = row.to(tl.int64)
    if block < HEAD_BLOCKS:
        head = block * BH + tl.arange(0, BH)
        inside = (row < rows)[:, None] & (head < H)
        _, _, dt, rate = _steps(logits, decay, row, head, inside, logits_n, least, most, H)
        tl.store(g + n[:, None] * H + head, rate * dt, mask=inside)
        column = tl.arange(0, BV)
        channel = head[:, None] * V + column
        all_inside = inside[:, :, None] & (column < V)
        x = _load(u, n[:, None, None] * u_n + channel, all_inside)
        tl.store(values + n[:, None, None] * (H * V) + channel, x * _sigmoid(x) * dt[:, :, None], mask=all_inside)
    else:
        part = (block - HEAD_BLOCKS) // COLUMN_BLOCKS
        key = (block - HEAD_BLOCKS) % COLUMN_BLOCKS * BC + tl.arange(0, BC)
        is_key = (row < rows)[:, None] & (key < GK)
        x_key = _load(u, n[:, None] * u_n + H * V + part * GK + key, is_key)
        target = n[:, None] * GK + key
        if part == 0:
            tl.store(keys + target, x_key * _sigmoid(x_key), mask=is_key)
        else:
            tl.store(queries + target, x_key * _sigmoid(x_key), mask=is_key)


@jit
def operand_grads_kernel(
    dq,  # [N, GK], as is the next
    dk,
    dv,  # [N, H, V], as is ds
    dg,  # [N, H] fp32
    ds,
    u,  # [N, H·V + 2·GK], elements of a row side by side, as those of logits
    logits,  # [N, H]
    decay,  # [3, H] fp32: dt_bias, A_log, D
    du,  # [N, H·V + 2·GK], written, as are the next
    dlogits,  # [N, H]
    sums,  # [runs, 3, H] fp32: gradients of `decay`, of each run's tokens
    rows,  # N
    run,  # tokens of a program, a multiple of BR
    u_n,  # from n to n + 1, of each
    logits_n,
    least,
    most,
    H: tl.constexpr,
    V: tl.constexpr,
    GK: tl.constexpr,
    BR: tl.constexpr,
    BH: tl.constexpr,
    BV: tl.constexpr,
    BC: tl.constexpr,
    HEAD_BLOCKS: tl.constexpr,
    COLUMN_BLOCKS: tl.constexpr,
):
    """A program walks over its tokens, BR at a time, of BH heads, or of BC columns of keys or queries."""
    block = tl.program_id(0) % (HEAD_BLOCKS + 2 * COLUMN_BLOCKS)
    index = tl.program_id(0) // (HEAD_BLOCKS + 2 * COLUMN_BLOCKS)
    first, end = index * run, tl.minimum(index * run + run, rows)
    width = H * V + 2 * GK
    if block < HEAD_BLOCKS:
        head = block * BH + tl.arange(0, BH)
        column = tl.arange(0, BV)
        channel = head[:, None] * V + column
        skips = _load(decay, 2 * H + head, head < H)[None, :, None]
        # Added up over rows at the end: threads that hold different rows would have to meet in each turn.
        of_bias = tl.zeros([BR, BH], tl.float32)
        of_rates = tl.zeros([BR, BH], tl.float32)
        of_skips = tl.zeros([BR, BH], tl.float32)
        for start in range(first, end, BR):
            row = start + tl.arange(0, BR)
            n = row.to(tl.int64)
            inside = (row < rows)[:, None] & (head < H)
            all_inside = inside[:, :, None] & (column < V)
            own = n[:, None, None] * (H * V) + channel
            x = _load(u, n[:, None, None] * u_n + channel, all_inside)
            of_values = _load(dv, own, all_inside)
            of_outputs = _load(ds, own, all_inside)
            of_decays = _load(dg, n[:, None] * H + head, inside)
            shifted, raw, dt, rate = _steps(logits, decay, row, head, inside, logits_n, least, most, H)
            sigmoid = _sigmoid(x)
            grads = (of_values * dt[:, :, None] + of_outputs * skips) * _slope(x, sigmoid)
            tl.store(du + n[:, None, None] * width + channel, grads, mask=all_inside)
            x *= sigmoid
            of_skips += tl.sum(of_outputs * x, axis=2)
            of_rates += of_decays * rate * dt
            of_steps = tl.sum(of_values * x, axis=2) + of_decays * rate
            of_steps = tl.where(inside & (raw >= least) & (raw <= most), of_steps * _sigmoid(shifted), 0.0)
            of_bias += of_steps
            tl.store(dlogits + n[:, None] * H + head, of_steps, mask=inside)
        target = sums + index * (3 * H) + head
        tl.store(target, tl.sum(of_bias, axis=0), mask=head < H)
        tl.store(target + H, tl.sum(of_rates, axis=0), mask=head < H)
        tl.store(target + 2 * H, tl.sum(of_skips, axis=0), mask=head < H)
    else:
        part = (block - HEAD_BLOCKS) // COLUMN_BLOCKS
        key = (block - HEAD_BLOCKS) % COLUMN_BLOCKS * BC + tl.arange(0, BC)
        place = H * V + part * GK + key
        for start in range(first, end, BR):
            token = start + tl.arange(0, BR)
            is_key = (token < rows)[:, None] & (key < GK)
            first_key = token.to(tl.int64)[:, None]
            x_key = _load(u, first_key * u_n + place, is_key)
            if part == 0:  # noqa: SIM108 - a choice between pointers would be one of tensors
                of_key = _load(dk, first_key * GK + key, is_key)
            else:
                of_key = _load(dq, first_key * GK + key, is_key)
            tl.store(du + first_key * width + place, of_key * _slope(x_key, _sigmoid(x_key)), mask=is_key)


@jit
def output_kernel(
    o,  # [N, H·V], elements of a row side by side, as are those of u and z
    u,  # [N, H·V + …]
    z,  # [N, H·V]
    decay,  # [3, H] fp32: dt_bias, A_log, D
    weight,  # [H·V]
    y,  # [N, H·V], written
    rstd,  # [N, G] fp32, written: r
    rows,  # N
    u_n,  # from n to n + 1, of each
    z_n,
    eps,
    H: tl.constexpr,
    V: tl.constexpr,
    G: tl.constexpr,
    BR: tl.constexpr,
    BH: tl.constexpr,
    BV: tl.constexpr,
):
    """A program computes one group of BR tokens; BH heads hold it."""
    group = tl.program_id(0) % G
    row = tl.program_id(0) // G * BR + tl.arange(0, BR)
    n = row.to(tl.int64)[:, None, None]
    own, column = tl.arange(0, BH), tl.arange(0, BV)
    head = group * (H // G) + own
    channel = head[:, None] * V + column
    in_group = (own < H // G)[:, None] & (column < V)
    inside = (row < rows)[:, None, None] & in_group
    skips = _load(decay, 2 * H + head, own < H // G)[None, :, None]
    values = _load(o, n * (H * V) + channel, inside)
    x = _load(u, n * u_n + channel, inside)
    gate = _load(z, n * z_n + channel, inside)
    factors = _load(weight, channel, in_group)
    gated = (values + skips * x * _sigmoid(x)) * gate * _sigmoid(gate)
    scale = tl.rsqrt(tl.sum(tl.sum(gated * gated, axis=2), axis=1) / (H // G * V) + eps)
    tl.store(rstd + row.to(tl.int64) * G + group, scale, mask=row < rows)
    tl.store(y + n * (H * V) + channel, gated * scale[:, None, None] * factors, mask=inside)


@jit
def output_grads_kernel(
    dy,  # [N, H·V], elements of a row side by side, as are those of o, u and z
    o,  # [N, H·V]
    u,  # [N, H·V + …]
    z,  # [N, H·V]
    decay,  # [3, H] fp32: dt_bias, A_log, D
    weight,  # [H·V]
    rstd,  # [N, G] fp32: r
    do,  # [N, H·V], written, as is the next
    dz,
    dweights,  # [runs, H·V] fp32, written: the sums of each run's tokens
    rows,  # N
    run,  # tokens of a program, a multiple of BR
    dy_n,  # from n to n + 1, of each
    u_n,
    z_n,
    H: tl.constexpr,
    V: tl.constexpr,
    G: tl.constexpr,
    BR: tl.constexpr,
    BH: tl.constexpr,
    BV: tl.constexpr,
):
    """A program walks over one group of its tokens, BR at a time; BH heads hold it."""
    group = tl.program_id(0) % G
    index = tl.program_id(0) // G
    own, column = tl.arange(0, BH), tl.arange(0, BV)
    head = group * (H // G) + own
    channel = head[:, None] * V + column
    in_group = (own < H // G)[:, None] & (column < V)
    skips = _load(decay, 2 * H + head, own < H // G)[None, :, None]
    # Added up over rows at the end: threads that hold different rows would have to meet in each turn.
    sums = tl.zeros([BR, BH, BV], tl.float32)
    for start in range(index * run, tl.minimum(index * run + run, rows), BR):
        row = start + tl.arange(0, BR)
        n = row.to(tl.int64)[:, None, None]
        inside = (row < rows)[:, None, None] & in_group
        grads = _load(dy, n * dy_n + channel, inside)
        values = _load(o, n * (H * V) + channel, inside)
        x = _load(u, n * u_n + channel, inside)
        gate = _load(z, n * z_n + channel, inside)
        scale = tl.load(rstd + row.to(tl.int64) * G + group, mask=row < rows, other=0.0)[:, None, None]
        values += skips * x * _sigmoid(x)
        sigmoid = _sigmoid(gate)
        normed = values * gate * sigmoid * scale
        sums += grads * normed
        grads *= _load(weight, channel, in_group)
        projection = tl.sum(tl.sum(grads * normed, axis=2), axis=1)[:, None, None] / (H // G * V)
        grads = (grads - normed * projection) * scale
        tl.store(do + n * (H * V) + channel, grads * gate * sigmoid, mask=inside)
        tl.store(dz + n * (H * V) + channel, grads * values * _slope(gate, sigmoid), mask=inside)
    tl.store(dweights + index.to(tl.int64) * (H * V) + channel, tl.sum(sums, axis=0), mask=in_group)


# Elements of a tile of four warps, and channels of it that lie side by side.
_TILE, _CHANNELS = 2048, 512
# About as many walk over the tokens in a backward pass, on every device, so that sums are the same.
_RUNS, _NORM_RUNS = 1024, 528


def launch_operands(
    u: Tensor, logits: Tensor, decay: Tensor, value_dim: int, groups: int, least: float, most: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """q, k, v and g of `zeco_train.ops.mamba2.operands`, which has the shapes."""
    heads = decay.shape[1]
    columns = (u.shape[-1] - heads * value_dim) // 2
    q, k = (u.new_empty(*u.shape[:2], groups, columns // groups) for _ in range(2))
    v = u.new_empty(*u.shape[:2], heads, value_dim)
    g = torch.empty(*u.shape[:2], heads, dtype=torch.float32, device=u.device)
    u, logits, decay = _matrix(u), _matrix(logits), decay.contiguous()
    sizes = _block_sizes(heads, value_dim, columns)
    if rows := u.shape[0]:
        operands_kernel[(cdiv(rows, sizes["BR"]) * _blocks(sizes),)](
            u, logits, decay, q, k, v, g, rows, u.stride(0), logits.stride(0), least, most,
            H=heads, V=value_dim, GK=columns, **sizes, num_warps=4,
        )  # fmt: skip
    return q, k, v, g


def launch_operand_grads(
    dq: Tensor, dk: Tensor, dv: Tensor, dg: Tensor, ds: Tensor, u: Tensor, logits: Tensor, decay: Tensor,
    least: float, most: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """du, dlogits, and of `decay` [3, H], from the gradients of what `zeco_train.ops.mamba2.operands` returns."""
    (heads, value_dim), columns = dv.shape[2:], dk.shape[2:].numel()
    du, dlogits = (torch.empty_like(x, memory_format=torch.contiguous_format) for x in (u, logits))
    dq, dk, dv, dg, ds = (x.contiguous() for x in (dq, dk, dv, dg, ds))
    u, logits = _matrix(u), _matrix(logits)
    sizes = _block_sizes(heads, value_dim, columns)
    rows, run, runs = _runs(u.shape[0], _RUNS, sizes["BR"])
    sums = torch.empty(runs, 3, heads, dtype=torch.float32, device=u.device)
    if runs:
        operand_grads_kernel[(runs * _blocks(sizes),)](
            dq, dk, dv, dg, ds, u, logits, decay.contiguous(), du, dlogits, sums, rows, run, u.stride(0),
            logits.stride(0), least, most, H=heads, V=value_dim, GK=columns, **sizes, num_warps=4,
        )  # fmt: skip
    return du, dlogits, sums.sum(dim=0).to(decay.dtype)


def launch_output(
    o: Tensor, u: Tensor, z: Tensor, decay: Tensor, weight: Tensor, groups: int, eps: float
) -> tuple[Tensor, Tensor]:
    """Compute y [B, T, H·V] and r [B, T, G] fp32 of `zeco_train.ops.mamba2.output`."""
    (heads, value_dim), rows = o.shape[2:], o.shape[:2].numel()
    y = o.new_empty(z.shape)
    rstd = torch.empty(*z.shape[:2], groups, dtype=torch.float32, device=o.device)
    o, u, z = o.contiguous(), _matrix(u), _matrix(z)
    sizes = _group_sizes(heads // groups, value_dim)
    if rows:
        output_kernel[(cdiv(rows, sizes["BR"]) * groups,)](
            o, u, z, decay.contiguous(), weight.contiguous(), y, rstd, rows, u.stride(0), z.stride(0), eps,
            H=heads, V=value_dim, G=groups, **sizes,
        )  # fmt: skip
    return y, rstd


def launch_output_grads(
    dy: Tensor, o: Tensor, u: Tensor, z: Tensor, decay: Tensor, weight: Tensor, rstd: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients do [B, T, H, V], dz [B, T, H·V], dweight [H·V] fp32; rstd [B, T, G] is that of `launch_output`."""
    (heads, value_dim), groups = o.shape[2:], rstd.shape[-1]
    do, dz = (torch.empty_like(x, memory_format=torch.contiguous_format) for x in (o, z))
    dy, o, u, z = _matrix(dy), o.contiguous(), _matrix(u), _matrix(z)
    sizes = _group_sizes(heads // groups, value_dim)
    rows, run, runs = _runs(u.shape[0], max(1, _NORM_RUNS // groups), sizes["BR"])
    dweights = torch.empty(runs, heads * value_dim, dtype=torch.float32, device=o.device)
    if runs:
        output_grads_kernel[(runs * groups,)](
            dy, o, u, z, decay.contiguous(), weight.contiguous(), rstd.contiguous(), do, dz, dweights, rows, run,
            dy.stride(0), u.stride(0), z.stride(0), H=heads, V=value_dim, G=groups, **sizes,
        )  # fmt: skip
    return do, dz, dweights.sum(dim=0)


def _block_sizes(heads: int, value_dim: int, columns: int) -> dict[str, int]:
    width = next_power_of_2(value_dim)
    of_heads = min(next_power_of_2(heads), max(1, _CHANNELS // width))
    of_columns = min(next_power_of_2(columns), 256)
    return {
        "BR": max(1, _TILE // (of_heads * width)),
        "BH": of_heads,
        "BV": width,
        "BC": of_columns,
        "HEAD_BLOCKS": cdiv(heads, of_heads),
        "COLUMN_BLOCKS": cdiv(columns, of_columns),
    }


def _blocks(sizes: dict[str, int]) -> int:
    return sizes["HEAD_BLOCKS"] + 2 * sizes["COLUMN_BLOCKS"]


def _group_sizes(heads: int, value_dim: int) -> dict[str, int]:
    # A thread has 16 elements, more only where 16 warps are too few.
    of_heads, width = next_power_of_2(heads), next_power_of_2(value_dim)
    return {
        "BR": max(1, _TILE // (of_heads * width)),
        "BH": of_heads,
        "BV": width,
        "num_warps": max(4, min(of_heads * width // 512, 16)),
    }


# Tokens; those of a run, a multiple of a tile's; and the number of runs.
def _runs(rows: int, runs: int, tile: int) -> tuple[int, int, int]:
    run = cdiv(cdiv(rows, runs), tile) * tile
    return rows, run, cdiv(rows, run) if rows else 0


# [B, T, D] as [N, D], a view if elements of a row are side by side and sequences follow one another.
def _matrix(x: Tensor) -> Tensor:
    return (x if x.stride(-1) == 1 else x.contiguous()).flatten(0, 1)
