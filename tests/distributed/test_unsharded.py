"""FSDP2 over one rank without its copies: the gathered weights and the gradients have the bits of FSDP2's own way."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import ExitStack
from datetime import timedelta
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp._fully_shard import _fsdp_collectives as fsdp_collectives
from torch.distributed.fsdp._fully_shard import _fsdp_param as fsdp_param

from tests.support.distributed import on_ranks, run_distributed
from tests.support.interpreter import patch_bf16
from tests.support.steps import BY_FSDP
from zeco_train.distributed import unsharded
from zeco_train.distributed.config import Strategy
from zeco_train.distributed.mesh import ProcessMesh, init_mesh, world_mesh
from zeco_train.distributed.owned_matrices import local
from zeco_train.distributed.parallelize import begin_micro_batch, num_shards, parallelize
from zeco_train.lifecycle.join import Launch
from zeco_train.ops.operator import Target, assume

pytestmark = pytest.mark.numeric

STEPS = 2


class Block(nn.Module):
    """Parameters of odd shapes, more than the 16 of a launch, and some that only a `full` pass uses."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(7, 7)), nn.Parameter(torch.randn(7))
        self.scales = nn.ParameterList([nn.Parameter(torch.randn(1)) for _ in range(18)])
        self.big = nn.Parameter(torch.randn(1301, 7))

    def forward(self, x: Tensor, full: bool) -> Tensor:
        """[tokens, 7] → [tokens, 7]."""
        y = torch.tanh(x @ self.weight + self.bias)
        if full:
            y = y + (x @ self.big.T).mean(1, keepdim=True)
            for scale in self.scales:
                y = y * (1 + scale / 16)
        return y


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.blocks = nn.Parameter(torch.randn(5, 7)), nn.ModuleList(Block() for _ in range(2))

    def forward(self, ids: Tensor, full: bool = True) -> Tensor:
        """Ids [tokens] → a loss."""
        x = self.embedding[ids]
        for block in self.blocks:
            x = block(x, full)
        return x.float().square().sum()


def _model(device: torch.device) -> Model:
    torch.manual_seed(0)
    return Model().to(device)


def _torch_way(model: Model, mesh: ProcessMesh, dtype: torch.dtype) -> Callable[[bool], None]:
    """Shard by FSDP2 alone; returns what begins a micro-batch."""
    one = world_mesh(mesh.device.type, 1, "shard", mesh.timeout)
    policy = MixedPrecisionPolicy(dtype, reduce_dtype=torch.float32, cast_forward_inputs=False)
    for module in (*model.blocks, model):
        fully_shard(module, mesh=one, mp_policy=policy, reshard_after_forward=False)
    assert isinstance(model, FSDPModule)
    return model.set_requires_gradient_sync


def _train(
    mesh: ProcessMesh,
    strategy: Strategy | None,
    dtype: torch.dtype,
    passes: list[bool],
    between: Callable[[Model], None],
) -> list[Tensor]:
    """Gradients of each step and the weights after the last; a strategy of None is FSDP2's own way.

    `passes` says for each micro-batch of a step whether it is full; `between` is called after each micro-batch.
    """
    model = _model(mesh.device)
    if strategy is None:
        begin = _torch_way(model, mesh, dtype)
    else:
        parallelize(model, list(model.blocks), strategy, dtype, mesh)
        shards = num_shards(model)

        def begin(last: bool) -> None:
            begin_micro_batch(model, strategy, shards, last)

    parameters, found, ids = list(model.parameters()), [], torch.arange(5, device=mesh.device)
    optimizer = torch.optim.SGD(parameters, lr=0.01)
    for step in range(STEPS):
        optimizer.zero_grad()
        for index, full in enumerate(passes):
            begin(index == len(passes) - 1)
            model(ids[step + index % 2 :], full).backward()
            between(model)
        grads = [p.grad for p in parameters]
        found += [torch.tensor([]) if grad is None else local(grad).clone() for grad in grads]
        optimizer.step()
    return found + [local(p.detach()).clone() for p in parameters]


# The compute dtype, and for each micro-batch of a step whether it is full. One that is not leaves out parameters: their
# sums are those of the others.
CASES: list[tuple[torch.dtype, list[bool]]] = [
    (torch.bfloat16, [True, False, True]),
    (torch.bfloat16, [True] * 3),
    (torch.bfloat16, [True]),
    (torch.float32, [True] * 3),
    (torch.bfloat16, [False, True, True, True]),
    (torch.bfloat16, [False, False]),
]


def _check(mesh: ProcessMesh, cases: list[tuple[torch.dtype, list[bool]]], strategies: Iterable[Strategy]) -> None:
    def nothing(model: Model) -> None:
        pass

    for dtype, passes in cases:
        expected = _train(mesh, None, dtype, passes, nothing)
        for strategy in strategies:
            found = _train(mesh, strategy, dtype, passes, nothing)
            for ours, theirs in zip(found, expected, strict=True):
                assert ours.dtype is theirs.dtype
                assert torch.equal(ours, theirs), (strategy, dtype, passes)


def _mesh(device: str) -> ProcessMesh:
    return init_mesh(Launch(0, 1, 0), 1, torch.device(device), timedelta(seconds=30))


@pytest.mark.parametrize("strategies", [[Strategy.zero2], pytest.param(BY_FSDP, marks=pytest.mark.slow)])
@on_ranks(1)
def test_gradients_and_weights_have_the_bits_of_fsdp(rank: int, world_size: int, strategies: list[Strategy]) -> None:
    _check(_mesh("cpu"), CASES, strategies)


def _bits_of_kernels(rank: int, world_size: int) -> None:
    from zeco_train.kernels import pack as launch

    patch_bf16()
    mesh = _mesh("cpu")
    with ExitStack() as stack:
        stack.enter_context(assume(Target("cuda")))
        pack, cast = (
            stack.enter_context(mock.patch.object(launch, name, side_effect=getattr(launch, name)))
            for name in ("pack", "cast")
        )
        _check(mesh, CASES[:2], [Strategy.zero2])
        assert cast.call_count > 0
        assert {call.kwargs["add"] for call in pack.call_args_list} == {False, True}


@pytest.mark.slow  # tests/distributed/test_gradient_packing.py has the kernels alone
def test_kernels_have_the_bits_of_fsdp_under_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    # The interpreter is chosen when Triton is imported, so the kernels run in a separate process.
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    run_distributed(_bits_of_kernels, 1, fresh=True)


@on_ranks(1)
def test_each_weight_is_cast_once_and_gradients_stay_in_place(rank: int, world_size: int) -> None:
    mesh, copies, addresses = _mesh("cpu"), [], []
    whole = sum(p.numel() for p in _model(mesh.device).parameters())
    cast_all, add_next = unsharded.cast_all, unsharded.add_next

    def counted(sources: Any, targets: Any) -> None:
        copies.append(sum(target.numel() for target in targets))
        cast_all(sources, targets)

    def note(model: Model) -> None:
        # Where parameters stay gathered, the module has those.
        states = [module._get_fsdp_state() for module in model.modules() if isinstance(module, FSDPModule)]
        parameters = [p.sharded_param for state in states for p in state._fsdp_param_group.fsdp_params]
        addresses.append({local(p.grad).untyped_storage().data_ptr() for p in parameters})

    for strategy, gathers in ((Strategy.zero2, 1), (Strategy.ddp, 1), (Strategy.zero3, 6)):
        copies.clear()
        addresses.clear()
        with (
            mock.patch("zeco_train.distributed.unsharded.cast_all", counted),
            mock.patch("zeco_train.distributed.unsharded.add_next", side_effect=add_next) as added,
        ):
            _train(mesh, strategy, torch.bfloat16, [True] * 3, note)
        # Three units: a launch and a buffer each.
        assert added.call_count == STEPS * 2 * 3, strategy
        assert all(len(of) == 3 and of == addresses[index // 3 * 3] for index, of in enumerate(addresses)), strategy
        # Once a step, or in each pass of each micro-batch.
        assert sum(copies) == STEPS * gathers * whole, strategy


@on_ranks(1)
def test_resharded_weights_free_their_memory(rank: int, world_size: int) -> None:
    mesh = _mesh("cpu")
    model = _model(mesh.device)
    parallelize(model, list(model.blocks), Strategy.zero3, torch.bfloat16, mesh)
    gathered: list[Tensor] = []
    block = model.blocks[0]
    block.register_forward_pre_hook(lambda module, inputs: gathered.append(module.big))
    for step in range(2):
        model(torch.arange(5)).backward()
        assert gathered[-1].dtype is torch.bfloat16
        assert gathered[-1] is gathered[0]
        assert gathered[-1].untyped_storage().nbytes() == 0, step


def _sharded(mesh: ProcessMesh, dtype: torch.dtype, weights: dict[str, Tensor] | None = None) -> Model:
    model = _model(mesh.device)
    if weights is not None:
        model.load_state_dict(weights)
    parallelize(model, list(model.blocks), Strategy.zero2, dtype, mesh)
    return model


def _gradients(model: Model, micro_batches: int = 3) -> list[Tensor]:
    """Of a step, which keeps none from before."""
    for parameter in model.parameters():
        parameter.grad = None
    for index in range(micro_batches):
        begin_micro_batch(model, Strategy.zero2, 1, index == micro_batches - 1)
        model(torch.arange(5)[index:]).backward()
    return [local(p.grad).clone() for p in model.parameters() if p.grad is not None]


def _agree(found: list[Tensor], expected: list[Tensor]) -> bool:
    return len(found) == len(expected) > 0 and all(map(torch.equal, found, expected))


def _fails_at(number: int, real: Callable[..., Any], *, after: bool) -> Callable[..., Any]:
    """`real`, whose call of this number, counted from 1, fails before or `after` its work."""
    calls = iter(range(1, 1 << 20))

    def call(*args: Any) -> Any:
        fails = next(calls) == number
        found = None if fails and not after else real(*args)
        if fails:
            raise torch.OutOfMemoryError("no memory")
        return found

    return call


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.bfloat16, pytest.param(torch.float32, marks=pytest.mark.slow)], ids=str)
@on_ranks(1)
def test_pass_after_one_that_failed_has_the_right_bits(rank: int, world_size: int, dtype: torch.dtype) -> None:
    mesh = _mesh("cpu")
    expected = _gradients(_sharded(mesh, dtype))
    cases = [(fsdp_collectives, "foreach_reduce_scatter_copy_in", n, after) for n in (1, 3) for after in (False, True)]
    if dtype is torch.bfloat16:
        # Weights in fp32 are not gathered into memory of their own.
        cases += [(fsdp_param, "alloc_storage", number, False) for number in (1, 22)]
    for module, name, number, after in cases:
        model = _sharded(mesh, dtype)
        _gradients(model)
        failing = _fails_at(number, getattr(module, name), after=after)
        with mock.patch.object(module, name, failing), pytest.raises(torch.OutOfMemoryError):
            _gradients(model)
        assert isinstance(model, FSDPModule)
        model._get_fsdp_state()._reset_iter_state()
        assert _agree(_gradients(model), expected), (dtype, name, number, after)


@on_ranks(1)
def test_weights_may_be_replaced_after_a_pass(rank: int, world_size: int) -> None:
    mesh = _mesh("cpu")
    for dtype in (torch.bfloat16, torch.float32):
        model = _sharded(mesh, dtype)
        _gradients(model)
        with torch.no_grad():
            weights = {name: 2 * local(value).detach() for name, value in model.state_dict().items()}
            assigned = {name: 2 * value.detach() for name, value in model.state_dict().items()}
        expected = _gradients(_sharded(mesh, dtype, weights))
        for parameter in model.parameters():
            parameter.grad = None
        model.load_state_dict(assigned, assign=True)
        assert _agree(_gradients(model), expected), dtype


@on_ranks(1)
def test_new_memory_at_an_address_of_sums_is_not_added_to(rank: int, world_size: int) -> None:
    mesh, real = _mesh("cpu"), torch.empty
    expected = _gradients(_sharded(mesh, torch.float32))

    def reused(*args: Any, **kwargs: Any) -> Tensor:
        found = real(*args, **kwargs).fill_(7)
        # As after a copy that failed before it added.
        unsharded.add_next(found)
        return found

    with mock.patch("zeco_train.distributed.unsharded.torch.empty", reused):
        assert _agree(_gradients(_sharded(mesh, torch.float32)), expected)


@pytest.mark.gpu
def test_gradients_and_weights_have_the_bits_of_fsdp_on_a_gpu() -> None:
    mesh = init_mesh(Launch.from_environment(), 1, torch.device("cuda", 0), timedelta(seconds=60))
    _check(mesh, CASES, BY_FSDP)
