"""`attach`: losses and all gradients of foreign models over ranks are those of one device, or they are refused."""

from __future__ import annotations

import copy
import inspect
import math
import subprocess
import sys
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests.support import attach_models
from tests.support.attach_models import VOCABULARY, InDouble, build, build_fla, compare, make_batch, padded
from tests.support.commands import REPOSITORY
from tests.support.distributed import on_ranks, run_distributed
from zeco_train.attach import AttachError, attach, verify
from zeco_train.attach import attached as attached_module
from zeco_train.attach.inline import _REPLACED, digest_of
from zeco_train.attach.layers import find_layers
from zeco_train.attach.linear import REPLACEMENTS
from zeco_train.attach.proof import prove
from zeco_train.attach.trainers import of_slice
from zeco_train.errors import CommunicationError, ZecoError

pytestmark = pytest.mark.numeric

TOKENS = 100
# Of each of two rows: within a rank, of one token, over an edge.
DOCUMENTS = [[0, 5, 6, TOKENS], [0, 70, TOKENS]]
# Of fp64, after two layers of each kind; the classes' own matrix is `lab/campaigns/attach_matrix.py`.
TOLERANCE = 1e-12

QWEN = {"num_hidden_layers": 3, "layer_types": ["linear_attention", "full_attention", "linear_attention"]}
# Of transformers: by the mechanism that a class stands for.
MECHANISMS: dict[str, tuple[str, dict[str, Any]]] = {
    "delta rule, shared key heads, experts, balancing loss": ("qwen3_next", QWEN | {"output_router_logits": True}),
    "state space, groups": ("mamba2", {"num_hidden_layers": 2}),
    "a decay a channel, narrow values": ("kimi_linear", QWEN | {"mlp_layer_types": ["dense", "sparse", "dense"]}),
    "own code": ("minimax", {"num_hidden_layers": 2}),
    "convolutions only": ("lfm2", {"num_hidden_layers": 2, "layer_types": ["conv", "full_attention"]}),
    "windows over ranks": ("qwen3_window", {"num_hidden_layers": 2, "layer_types": ["sliding_attention"] * 2}),
    "learned positions": ("gpt2", {}),
}


def check(
    name: str, make: Callable[[], nn.Module], batches: int = 1, padding: int | None = None, **options: Any
) -> None:
    batch = make_batch(2, TOKENS) if padding is None else padded(make_batch(2, TOKENS), padding)
    errors = compare(make, [batch] * batches, **options)
    assert max(errors[:2]) <= TOLERANCE, f"{name}, {options}: {errors}"


@on_ranks(3)
def test_a_class_of_each_mechanism_is_exact(rank: int, size: int) -> None:
    """Packed samples of both rows over uneven ranks, one of which has a token."""
    attach_models.hide_fla()
    for name, (kind, changes) in MECHANISMS.items():
        changes = {key: x for key, x in changes.items() if key != "output_router_logits"}
        check(name, lambda kind=kind, changes=changes: build(kind, **changes), documents=DOCUMENTS, lengths=[50, 1, 49])


@on_ranks(2)
def test_whole_rows_methods_and_balancing_losses(rank: int, size: int) -> None:
    attach_models.hide_fla()
    for kind, changes in (MECHANISMS[name] for name in list(MECHANISMS)[:2]):
        check(kind, lambda kind=kind, changes=changes: derived(build(kind, **changes)), padding=TOKENS - 60)
    for attention in ("ring", "ulysses", "all_gather"):
        check(attention, lambda: build("qwen3", num_hidden_layers=1), attention=attention)
    dropped = compare(lambda: build("mamba2"), [make_batch(1, 40)], prepare=attach_models.drop_a_state)
    assert dropped.gradient > 1e-3


def derived(model: nn.Module) -> nn.Module:
    """The layers as classes of a user, which call the forward functions of their bases."""
    for kind, module in [(type(layer.module), layer.module) for layer in find_layers(model)]:
        forward = {"forward": lambda self, *args, kind=kind, **kwargs: kind.forward(self, *args, **kwargs)}
        module.__class__ = type("Own", (kind,), forward)
    return model


@on_ranks(2)
def test_checkpoints_replay_the_batch_of_their_own_forward_pass(rank: int, size: int) -> None:
    """Both kinds of checkpoints, of two batches whose backward passes come after both forward passes."""
    attach_models.hide_fla()

    for reentrant in (False, True):
        launches: list[int] = []

        def prepare(attached: Any, launches: list[int] = launches, reentrant: bool = reentrant) -> None:
            attach_models.checkpoint_in_double(attached.model, reentrant=reentrant)
            for scan in (attached._over.exchange.states, attached._over.exchange.halo):
                launch = scan.launch
                scan.launch = lambda request, launch=launch: (launches.append(request.reverse), launch(request))[1]

        check("checkpoint", lambda: build("qwen3_next", **QWEN), 2, documents=DOCUMENTS, prepare=prepare)
        # A convolution and a delta rule, of two layers and two batches: none again for the recomputation.
        assert launches.count(False) == launches.count(True) == 2 * 2 * 2


@on_ranks(2)
def test_layers_of_fla_are_exact(rank: int, size: int) -> None:
    """By fla's plain functions on one device: delta rule, rotations, no heads, own code."""
    with pytest.MonkeyPatch.context() as patch:
        attach_models.use_plain_fla(patch)
        for name in ("GatedDeltaNet", "RetNet", "HGRN", "Mamba2"):
            check(name, lambda name=name: build_fla(name, num_hidden_layers=1), documents=DOCUMENTS, lengths=[62, 38])
        model: Any = build_fla("HGRN", num_hidden_layers=1)
        part = attach(model).shard(make_batch(1, 20))
        twin = copy.deepcopy(model)
        twin.lm_head.weight.data.zero_()
        share = float((part["labels"] != -100).sum() / part["num_items_in_batch"])
        assert float(twin(**part).loss) == pytest.approx(share * math.log(VOCABULARY))
        assert float(model(**part).loss) != pytest.approx(share * math.log(VOCABULARY))


def unmodified_layers_of_fla(rank: int, size: int) -> None:
    """In fp32, with all kernels, beside fla's plain functions in fp64."""
    fused = {"fuse_norm": True, "fuse_swiglu": True, "fuse_cross_entropy": True}
    batch, documents = make_batch(1, 300), [[0, 1, 130, 170, 300]]
    errors = {}
    for name, sizes in attach_models.FLA_MODELS.items():
        # At least 16 channels a head.
        changes = {"hidden_size": 128, "num_hidden_layers": 1}
        changes |= {key: 32 for key in ("head_dim", "expand_ratio", "state_size") if key in sizes}
        with pytest.MonkeyPatch.context() as patch, InDouble():
            attach_models.use_plain_fla(patch)
            alone = build_fla(name, **changes)  # it looks its activations up
            wanted = attach_models.run_alone(alone, batch, documents)
        model = build_fla(name, **changes, **fused).float().cuda()
        attached = attach(model)
        part = attached.shard({key: x.cuda() for key, x in batch.items()}, documents)
        loss = model(**part).loss
        loss.backward()
        attached.reduce_gradients()
        total = loss.detach()
        dist.all_reduce(total)
        errors[name] = attach_models.errors_of(model, float(total), alone, wanted)
        print(rank, name, errors[name], flush=True)
    assert all(max(error[:2]) < 1e-3 for error in errors.values()), errors


@pytest.mark.gpu
def test_unmodified_layers_of_fla_on_two_gpus_are_right() -> None:
    pytest.importorskip("fla")
    if torch.cuda.device_count() < 2:
        pytest.skip("needs 2 GPUs")
    run_distributed(unmodified_layers_of_fla, 2, backend="cpu:gloo,cuda:nccl")


def test_adapters_of_peft_are_exact() -> None:
    pytest.importorskip("peft")
    run_distributed(adapters_are_exact, 2)


def adapters_are_exact(rank: int, size: int) -> None:
    attach_models.hide_fla()
    import peft

    def make() -> Any:
        config = peft.LoraConfig(target_modules=["q_proj", "in_proj_qkvz"], r=2, init_lora_weights=False)
        torch.manual_seed(3)
        model = peft.get_peft_model(build("qwen3_next", **QWEN), config).double()
        attach_models.fill(model)
        return model

    check("LoRA", make, documents=DOCUMENTS)


@on_ranks(2)
def test_dropout_is_another_on_each_rank_and_leaves_generators_alike(rank: int, size: int) -> None:
    attach_models.hide_fla()
    model = build("gpt2", n_layer=1, embd_pdrop=0.5)
    attached = attach(model)
    ids = torch.full((1, 2), 7).repeat(1, size)
    dropped: list[Tensor] = []
    model.transformer.drop.register_forward_hook(lambda *found: dropped.append(found[2] == 0))
    torch.manual_seed(5)
    model(**attached.shard({"input_ids": ids}))
    masks = [torch.zeros_like(dropped[0]) for _ in range(size)]
    dist.all_gather(masks, dropped[0])
    assert not torch.equal(masks[0], masks[1])
    following = [torch.zeros(3) for _ in range(size)]
    dist.all_gather(following, torch.rand(3))
    assert torch.equal(following[0], following[1])


@on_ranks(2)
def test_off_detach_and_copies(rank: int, size: int) -> None:
    attach_models.hide_fla()
    model, whole = build("minimax"), make_batch(1, 20)
    space = vars(sys.modules[type(model).__module__])
    before = {name: space[name] for name in ("load_balancing_loss_func",)}
    settings = model.config._attn_implementation, model.config.use_cache
    with torch.no_grad(), InDouble():
        wanted = model(**whole, use_cache=False).logits
        attached = attach(model)
        assert (attached.rank, attached.size) == (rank, size)
        assert [len(names) for names in attached.layers.values()] == [2, 2]
        part = attached.shard(whole)
        own = model(**part).logits
        # A copy has its own weights and the same ranks.
        twin = copy.deepcopy(model)
        twin.model.layers[1].self_attn.out_proj.weight.zero_()
        assert not torch.allclose(twin(**part).logits, own)
        with attached.off():
            assert torch.equal(model(**whole, use_cache=False).logits, wanted)
            model.model.layers[0].mlp.eval()
            modes = [module.training for module in model.modules()]
            assert attached.audit(whole) == []
            assert [module.training for module in model.modules()] == modes
            with attached.off():
                pass
            assert torch.equal(model(**whole, use_cache=False).logits, wanted)
            # Unseen by `attach`, seen by the control.
            mlp = model.model.layers[1].mlp
            hook = mlp.register_forward_hook(lambda module, args, out: out.roll(1, 1))
            assert attached.audit(whole) == [f"model.layers.1.mlp ({type(mlp).__name__})"]
            hook.remove()
        assert torch.equal(model(**part).logits, own)
        attached.detach()
        assert torch.equal(model(**whole, use_cache=False).logits, wanted)
    assert {name: space[name] for name in before} == before
    assert (model.config._attn_implementation, model.config.use_cache) == settings
    assert not any(module._forward_pre_hooks or "forward" in vars(module) for module in model.modules())
    assert float((own - wanted[:, 10 * rank : 10 * rank + 10]).abs().max()) < TOLERANCE


def own_kind(line: str) -> type[nn.Module]:
    """A class with this line in its forward function."""
    space: dict[str, Any] = {"torch": torch, "F": torch.nn.functional, "__name__": "of_a_user"}
    exec(f"def forward(self, x):\n    return {line}", space)
    return type("Own", (nn.Module,), {"forward": space["forward"], "__module__": "of_a_user"})


@on_ranks(2)
def test_modules_of_a_user_and_parameters_that_differ_are_refused_by_name(rank: int, size: int) -> None:
    attach_models.hide_fla()
    model: Any = build("gpt2")
    mlp, clean = model.transformer.h[1].mlp, {*vars(model)}
    for line in (
        "F.scaled_dot_product_attention(x, x, x)",
        "(x @ x.mT).softmax(-1) @ x",
        "torch.nn.Softmax(-1)(x @ x.mT) @ x",
        "x.cumsum(1)",
        "F.conv1d(x, x)",
        "flex_attention(x, x, x)",
    ):
        model.transformer.h[1].mlp = own_kind(line)()
        with pytest.raises(AttachError, match=r"^transformer\.h\.1\.mlp \(Own\): "):
            attach(model)
    model.transformer.h[1].mlp = nn.Sequential(own_kind("x.mT")(), nn.BatchNorm1d(32).double(), own_kind("x.mT")())
    attached = attach(model)
    with pytest.raises(AttachError, match=r"^transformer\.h\.1\.mlp\.1 \(BatchNorm1d\): mixes tokens"):
        model(**attached.shard(make_batch(1, 8)))
    attached.detach()
    with pytest.raises(AttachError, match=r"\(Own\): its code"):
        attach(derived(build("minimax", num_hidden_layers=2)))
    shifting: Any = build("qwen3", num_hidden_layers=1)
    kind = type(shifting.model.layers[0].self_attn)
    space = {"kind": kind}
    exec("def forward(self, x, **kwargs):\n    return kind.forward(self, x + x.cumsum(1), **kwargs)", space)
    shifting.model.layers[0].self_attn.__class__ = type("Own", (kind,), {**space, "__module__": "of_a_user"})
    with pytest.raises(AttachError, match=r"self_attn \(Own\): may mix tokens by cumsum"):
        attach(shifting)
    model.transformer.h[1].mlp = mlp
    right = mlp.c_fc.bias.data.clone()
    mlp.c_fc.bias.data[0] += rank
    with pytest.raises(AttachError, match=r"^transformer\.h\.1\.mlp\.c_fc\.bias: differs between ranks 0 and 1"):
        attach(model)
    mlp.c_fc.bias.data.copy_(right)
    mlp.c_fc.bias.requires_grad_(rank == 0)
    with pytest.raises(AttachError, match=r"^transformer\.h\.1\.mlp\.c_fc\.bias: differs"):
        attach(model)
    mlp.c_fc.bias.requires_grad_()
    # An error in the middle leaves nothing behind.
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(attached_module, "register", lambda: 1 // 0)
        with pytest.raises(ZeroDivisionError):
            attach(model)
    assert {*vars(model)} == clean
    assert not any(module._forward_pre_hooks or module._forward_hooks for module in model.modules())
    attached = attach(model)
    # Each time that a trainer enables checkpoints.
    own = lambda function, *args, **kwargs: function(*args, **kwargs)  # noqa: E731
    for _ in range(3):
        model._set_gradient_checkpointing(enable=True, gradient_checkpointing_func=own)
        model(**attached.shard(make_batch(1, 8)))
    attached.detach()
    assert all(layer._gradient_checkpointing_func is own for layer in model.transformer.h)


@on_ranks(2)
def test_ranks_with_other_batches_are_told_at_the_first_call(rank: int, size: int) -> None:
    attach_models.hide_fla()
    model: Any = build("gpt2", n_layer=1)
    attached, whole = attach(model), make_batch(2, 20)
    ids = whole["input_ids"]
    own = ids[:, 10 * rank : 10 * rank + 10]
    for what, part in [
        ("input_ids", lambda: attached.shard({**whole, "input_ids": ids.flip(rank)})),
        ("input_ids", lambda: attached.shard({"input_ids": own})),
        ("lengths", lambda: attached.shard({"input_ids": ids[:, : 20 - rank]})),
        ("documents", lambda: attached.shard(whole, [0, 5 + rank, 20])),
        ("num_items_in_batch", lambda: attached.shard({**whole, "num_items_in_batch": torch.tensor(30 + rank)})),
    ]:
        with pytest.raises(AttachError, match=f"^{what}: differs between ranks 0 and 1 of the group"):
            model(**part())
    with pytest.raises(AttachError, match=r"^input_ids: differs"):
        verify(attached, {"input_ids": ids.flip(rank)})
    with pytest.warns(UserWarning, match=r"^input_ids: all ranks have the same tokens"):
        model(**of_slice(attached, ids))
    # A comparison costs a message, so there is one.
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "all_gather_object", lambda *args, **kwargs: pytest.fail("compared again"))
        model(**attached.shard(whole))
    attached.detach()
    attached = attach(model)
    model(**attached.shard({"inputs_embeds": model.transformer.wte(ids)}))
    attached.detach()
    attached = attach(model, timeout=timedelta(seconds=8))  # also the longest wait of a busy machine's other rank
    if rank == 0:
        with pytest.raises(CommunicationError, match=r"^rank 0: comparing parameters or the first batch"):
            model(**attached.shard(whole))
    dist.barrier()


@on_ranks(2)
def test_gradients_are_added_up_and_none_is_made_where_no_rank_has_one(rank: int, size: int) -> None:
    attach_models.hide_fla()
    model: Any = build("gpt2")
    attached = attach(model)
    first, *others, last = model.parameters()
    last.data = last.data.float()
    if rank == 1:
        first.grad = torch.full_like(first, 3.0)
    for parameter in (*others, last):
        parameter.grad = torch.full_like(parameter, 1.0 + rank)
    others[0].grad = None
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(attached_module, "_BUCKET", 40 * 8)
        attached.reduce_gradients()
    assert others[0].grad is None
    assert all(bool((x.grad == 3.0).all()) for x in (first, *others[1:], last))


TINY = dict.fromkeys(("num_hidden_layers", "num_attention_heads"), 2)
TINY |= {"vocab_size": VOCABULARY, "hidden_size": 16, "pad_token_id": 0}
# Classes that would be wrong, and what the message names: at `attach`, or at the first call.
REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("MambaForCausalLM", {"vocab_size": VOCABULARY, "hidden_size": 16, "num_hidden_layers": 1}, "MambaMixer"),
    ("RwkvForCausalLM", {**TINY, "attention_hidden_size": 16}, "RwkvSelfAttention"),
    ("RecurrentGemmaForCausalLM", TINY | {"intermediate_size": 32, "num_hidden_layers": 3}, "RecurrentGemma"),
    ("xLSTMForCausalLM", {"vocab_size": VOCABULARY, "hidden_size": 16, "num_blocks": 1, "num_heads": 2}, "xLSTM"),
    ("BertLMHeadModel", TINY | {"intermediate_size": 32}, "BertSelfAttention"),
    ("BloomForCausalLM", {"vocab_size": VOCABULARY, "hidden_size": 16, "n_layer": 1, "n_head": 2}, "BloomAttention"),
    ("Gemma2ForCausalLM", TINY | {"intermediate_size": 32, "head_dim": 8}, "softcap"),
    ("GPT2LMHeadModel", {"vocab_size": VOCABULARY, "n_embd": 16, "n_layer": 1, "n_head": 2}, "dropout"),
    ("GptOssForCausalLM", TINY | {"intermediate_size": 32, "head_dim": 8, "num_local_experts": 2}, "s_aux"),
    ("BambaForCausalLM", TINY | {"z_loss_coefficient": 0.1, "mamba_n_heads": 2}, "z_loss_coefficient"),
    ("OPTForCausalLM", TINY | {"ffn_dim": 16, "word_embed_proj_dim": 16, "layerdrop": 0.5}, "layerdrop=0.5"),
    ("Llama4ForCausalLM", TINY | {"head_dim": 8, "attention_chunk_size": 4, "moe_layers": []}, "chunked_overlay"),
]


@on_ranks(1)
def test_classes_that_would_be_wrong_are_refused_by_name(rank: int, size: int) -> None:
    attach_models.hide_fla()
    import transformers

    transformers.logging.set_verbosity_error()
    for name, settings, what in REFUSED:
        model: Any = getattr(transformers, name)
        model = model(model.config_class(**settings)).train()
        with pytest.raises(AttachError) as raised:
            model(**attach(model).shard(make_batch(1, 12)))
        assert what in str(raised.value), (name, str(raised.value))
        assert "\n" not in raised.value.line


@on_ranks(1)
def test_batches_and_arguments_that_would_be_wrong_are_refused_by_name(rank: int, size: int) -> None:
    attach_models.hide_fla()
    model: Any = build("qwen3_next", **QWEN)
    attached = attach(model)
    batch = make_batch(2, 12)
    ids = batch["input_ids"]
    mask, jumps = torch.ones_like(ids), torch.arange(12).expand(2, -1).clone()
    mask[0, :3], jumps[0, 6:] = 0, 3
    for given, what in [
        ({**batch, "attention_mask": mask}, "attention_mask"),
        ({**batch, "attention_mask": mask[:, None]}, "attention_mask"),
        ({**batch, "attention_mask": mask.flip(1)}, "labels"),
        ({**batch, "position_ids": jumps}, "position_ids"),
        ({**batch, "pixel_values": ids}, "pixel_values"),
        ({"labels": ids}, "input_ids"),
        ({**batch, "cu_seq_lens_q": torch.tensor([0, 11])}, "cu_seq_lens_q"),
        ({**batch, "cu_seq_lens_q": torch.tensor([0, 5, 12]), "seq_idx": ids * 0}, "seq_idx: begins other"),
        ({**batch, "cu_seq_lens_q": torch.tensor([0, 5, 12]), "position_ids": torch.arange(12)[None]}, "position_ids"),
        ({**batch, "position_ids": torch.arange(12).expand(3, -1)}, "position_ids"),
        ({**batch, "labels": ids[:, 1:]}, "labels"),
    ]:
        with pytest.raises(AttachError, match=f"^{what}"):
            attached.shard(given)
    for options in ({"lengths": [11]}, {"documents": [[0, 12]]}, {"documents": [[0, 12], [1, 12]]}):
        with pytest.raises(AttachError, match=f"^{next(iter(options))}"):
            attached.shard(batch, **options)  # type: ignore[arg-type]
    by_index = attached.shard({**batch, "seq_idx": (torch.arange(12) >= 5).int().expand(2, -1)})
    assert [row.tolist() for row in by_index["sequence_position"].documents] == [[0, 5, 12]] * 2
    assert by_index["position_ids"][0].tolist() == [*range(5), *range(7)]
    with pytest.raises(AttachError, match="position_ids"):
        attached.shard({"input_ids": ids[:1], "position_ids": jumps * 0}, [0, 5, 12])
    part = attached.shard(batch)
    short = attached.shard(make_batch(2, 11))
    for arguments, what in [
        (batch, "sequence_position"),
        (part | {"use_cache": True}, "use_cache"),
        (part | {"attention_mask": mask}, "attention_mask"),
        (part | {"cu_seq_lens_q": ids}, "cu_seq_lens_q"),
        (part | {"shift_labels": None}, "shift_labels"),
        (part | {"num_items_in_batch": None}, "num_items_in_batch"),
        (part | {"sequence_position": short["sequence_position"]}, "input_ids"),
        (part | {"reverse": True}, "model.layers.0.linear_attn"),
    ]:
        with pytest.raises(AttachError, match=f"^{what}"):
            model(**arguments)
    with pytest.raises(AttachError, match="outside"):
        model.model(ids)
    with pytest.raises(AttachError, match="attached already"):
        attach(model)
    with attached.off(), pytest.raises(AttachError, match=r"^detach"):
        attached.detach()
    with attached.off(), pytest.raises(AttachError, match=r"^sequence_position"):
        model(**part)
    with pytest.raises(AttachError, match=r"^input_ids"):
        attached.audit({"labels": ids})
    with pytest.raises(AttachError, match=r"^input_ids"):
        verify(attached, {"inputs_embeds": torch.zeros(1, 4, 32), "labels": ids[:1, :4]})
    with pytest.raises(AttachError, match=r"^make: .*importable"):
        next(prove(lambda: model))
    import transformers

    settings = attach_models.MODELS["qwen3"].sizes
    pooled: Any = transformers.Qwen3ForSequenceClassification(transformers.Qwen3Config(**settings, pad_token_id=0))
    with pytest.raises(AttachError, match="logits"):
        pooled(**attach(pooled).shard({"input_ids": ids}))
    with pytest.raises(ZecoError, match="attention"):
        attach(model, attention="flash")


@on_ranks(2)
def test_compiled_models_take_other_documents_and_lengths_without_compiling_again(rank: int, size: int) -> None:
    """A layer without softmax is a part of one graph; a second length makes the graphs' sizes variables, once."""
    attach_models.hide_fla()
    from torch._dynamo.utils import counters

    layers = {"num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"], "num_experts": 0}
    for name, changes, slices, most in (
        ("mamba2", {"num_hidden_layers": 1}, ([20, 20], [20, 20], [25, 21], [3, 52]), (3, 1)),
        ("qwen3_next", layers, ([20, 20], [20, 20]), (3, 5)),
    ):
        torch._dynamo.reset()
        counters.clear()
        model: Any = build(name, **changes).float()
        attached, found = attach(model), []
        for part in [model] if name == "mamba2" else model.model.layers:
            part.compile(backend="eager")
        for number, lengths in enumerate(slices):
            length = sum(lengths)
            documents = [[0, 5 + number, length], [0, 20 - number, 30 + number, length]]
            batch, results = attached.shard(make_batch(2, length), documents, lengths), []
            for stance in ("default", "force_eager"):
                with torch.compiler.set_stance(stance):
                    loss = model(**batch).loss
                loss.backward()
                results.append([loss.detach(), *(x.grad for x in model.parameters())])
                model.zero_grad()
            for own, wanted in zip(*results, strict=True):
                torch.testing.assert_close(own, wanted, rtol=1e-5, atol=1e-6)  # rounding of fp32
            found.append((sum(counters["graph_break"].values()), counters["stats"]["unique_graphs"]))
        assert all(map(int.__le__, found[0], most)), (name, found, counters["graph_break"])
        assert found[0::2] == found[1::2], (name, found)
        attached.detach()


def test_audit_finds_a_module_that_mixes_tokens_unseen() -> None:
    mixing = nn.Sequential(nn.Linear(8, 8), Centered(), nn.Linear(8, 8))
    model = Embedded(mixing)
    batch = {"input_ids": torch.arange(20)[None]}
    from zeco_train.attach.audit import audit_modules

    assert audit_modules(model, batch, [mixing[1]]) == []
    assert audit_modules(model, batch, []) == ["layers.1 (Centered)"]


class Centered(nn.Module):
    """Subtracts the mean over tokens, which their order does not change."""

    def forward(self, x: Tensor) -> Tensor:
        return x - x.mean(1, keepdim=True)


class Embedded(nn.Module):
    """A model of layers."""

    def __init__(self, layers: nn.Module) -> None:
        super().__init__()
        self.embedding, self.layers = nn.Embedding(20, 8), layers

    def forward(self, input_ids: Tensor) -> Any:
        return self.layers(self.embedding(input_ids))


# Functions of transformers 5.23 and fla 0.6 with their arguments: what `zeco_train.attach.linear` answers.
CALLS = {
    "transformers.models.qwen3_next.modeling_qwen3_next": {
        "causal_conv1d_fn": "hidden_states weight bias activation kwargs",
        "torch_chunk_gated_delta_rule": "query key value g beta chunk_size initial_state output_final_state "
        "use_qk_l2norm_in_kernel kwargs",
        "load_balancing_loss_func": "gate_logits num_experts top_k attention_mask",
    },
    "transformers.models.kimi_linear.modeling_kimi_linear": {
        "chunk_kimi_delta_attention": "query key value g beta chunk_size initial_state output_final_state "
        "use_qk_l2norm_in_kernel kwargs",
    },
    "transformers.models.mamba2.modeling_mamba2": {
        "mamba2_chunk_scan": "hidden_states dt A B C chunk_size D dt_bias initial_states dt_softplus dt_limit "
        "return_final_states kwargs",
        "mamba2_split_conv1d_scan_combined": "zxbcdt conv1d_weight conv1d_bias dt_bias A D chunk_size initial_states "
        "dt_limit return_final_states activation rmsnorm_weight rmsnorm_eps outproj_weight outproj_bias headdim "
        "ngroups norm_before_gate kwargs",
    },
    "fla.modules.causal_conv1d.ops": {
        "causal_conv1d": "x weight bias residual initial_state output_final_state activation backend cu_seqlens "
        "cu_seqlens_cpu chunk_indices cp_context kwargs"
    },
    "fla.modules.rotary.ops": {
        "rotary_embedding": "x cos sin interleaved inplace seqlen_offsets cu_seqlens chunk_indices"
    },
    "fla.layers.gla": {
        "chunk_gla": "q k v g scale initial_state output_final_state state_v_first cu_seqlens cu_seqlens_cpu",
        "fused_recurrent_gla": "q k v gk gv scale initial_state output_final_state reverse state_v_first "
        "cu_seqlens kwargs",
    },
    "fla.layers.multiscale_retention": {
        "chunk_retention": "q k v scale initial_state output_final_state cu_seqlens kwargs"
    },
    "fla.layers.hgrn": {"chunk_hgrn": "x g initial_state output_final_state"},
    "fla.layers.delta_net": {
        "chunk_delta_rule": "q k v beta scale initial_state output_final_state use_qk_l2norm_in_kernel cu_seqlens "
        "cu_seqlens_cpu kwargs"
    },
    "fla.layers.gated_deltanet": {
        "chunk_gated_delta_rule": "q k v g beta scale initial_state output_final_state use_qk_l2norm_in_kernel "
        "use_beta_sigmoid_in_kernel allow_neg_eigval state_v_first cu_seqlens cu_seqlens_cpu chunk_indices cp_context "
        "kwargs"
    },
    "fla.layers.kda": {
        "chunk_kda": "q k v g beta scale initial_state output_final_state use_qk_l2norm_in_kernel use_gate_in_kernel "
        "use_beta_sigmoid_in_kernel allow_neg_eigval safe_gate lower_bound disable_recompute "
        "return_intermediate_states state_v_first cu_seqlens cu_seqlens_cpu cp_context use_graph max_num_seqs kwargs"
    },
}


def test_functions_of_other_libraries_have_the_names_and_arguments_that_are_answered() -> None:
    """A canary: the message names what a new version of transformers or fla has renamed."""
    import importlib

    for module, functions in CALLS.items():
        for name, arguments in functions.items():
            function = getattr(importlib.import_module(module), name, None)
            assert function is not None, f"{module} has no {name} any more"
            found = [*inspect.signature(inspect.unwrap(function)).parameters]
            assert found == arguments.split(), f"{module}.{name} takes other arguments"
    assert {name for functions in CALLS.values() for name in functions} - {
        "load_balancing_loss_func"
    } <= REPLACEMENTS.keys()
    for (package, name), (digest, _) in _REPLACED.items():
        place = {"fla": "fla.layers.mamba2", "transformers": "transformers.models.minimax.modeling_minimax"}[package]
        assert digest_of(getattr(importlib.import_module(place), name)) == digest, f"{name} of {package} has other code"


def test_a_project_may_have_models_and_data_of_its_own(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    for place in ("models.py", "data/__init__.py", "wandb.py"):
        (tmp_path / place).write_text("raise SystemExit('imported')")
    program = (
        "import sys, zeco_train.attach\n"
        "print(*{name.partition('.')[0] for name in sys.modules} & {'models', 'data', 'hydra', 'wandb', 'datasets'})"
    )
    environment = {"PYTHONPATH": f"{tmp_path}:{REPOSITORY}", "PATH": ""}
    found = subprocess.run(
        [sys.executable, "-c", program], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
    )
    assert (found.returncode, found.stdout.strip()) == (0, ""), found.stderr
