"""`attach`: the layers of a foreign model read the tokens of all ranks that share a sequence."""

from __future__ import annotations

import inspect
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from functools import wraps
from types import MethodType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._utils import _flatten_dense_tensors, _take_tensors, _unflatten_dense_tensors
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor

from zeco_train.attach.audit import audit_modules
from zeco_train.attach.forward import AttachError, Checkpoint, Frame, Layer, Pass, current, pop, push
from zeco_train.attach.inline import inline_of
from zeco_train.attach.layers import MIXING_MODULES, find_layers, names_of, spaces_of
from zeco_train.attach.linear import REPLACEMENTS
from zeco_train.attach.losses import LOSSES, check_labels, check_losses, redirect_loss
from zeco_train.attach.shard import POSITION, Documents, checksum, cut
from zeco_train.attach.softmax import IMPLEMENTATION, register
from zeco_train.errors import CommunicationError, ConfigError
from zeco_train.sp.attention.method_registry import AttentionChoice
from zeco_train.sp.backend_registry import SPConfig
from zeco_train.sp.exchange import GroupExchange

_READ_BY_SHARD = "give it to `shard`, which reads documents from it"
# Arguments that make no sense for a slice.
_REFUSED = {
    "cache_params": "generate with the model detached",
    "cu_seq_lens_k": _READ_BY_SHARD,
    "cu_seq_lens_q": _READ_BY_SHARD,
    "cu_seqlens": _READ_BY_SHARD,
    "encoder_hidden_states": "other sequences are not cut",
    "logits_to_keep": "the last tokens are on the last rank only",
    "output_attentions": "no rank has the attention of all tokens",
    "past_key_values": "generate with the model detached",
    "seq_idx": _READ_BY_SHARD,
    "use_cache": "generate with the model detached",
}
# Attributes of modules of transformers and fla that hold a function for checkpointing.
_CHECKPOINTS = ("_gradient_checkpointing_func", "checkpoint_fn")
# Bytes of gradients that are sent as one message.
_BUCKET = 25 << 20
_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def attach(
    model: nn.Module,
    group: ProcessGroup | None = None,
    *,
    attention: str = "auto",
    timeout: timedelta = timedelta(minutes=5),
) -> Attached:
    """Make a model of transformers or fla exact where each rank of a group has consecutive tokens of every sequence.

    Outputs are of the rank's tokens. The ranks' losses, and their gradients, add up to those of one device. Collective
    over the group, whose ranks have the same parameters. Wrap the model by PEFT before, by DDP or FSDP after.

    Args:
        model: whose layers mix tokens by functions that are known, see docs/attach.md.
        group: of the ranks that share sequences; None is the default group.
        attention: how softmax layers read other ranks' tokens: "auto", "ring", "ulysses" or "all_gather".
        timeout: the longest wait of a layer for another rank; sums over `group` wait as long as it does.

    Raises:
        AttachError: a module that would be wrong over ranks, or a parameter that differs between them, by its name.
        CommunicationError: a rank of the group is missing.
        ConfigError: an unknown method; torch.distributed is not initialised, or this process is not in the group.
    """
    if attention not in AttentionChoice.__members__:
        raise ConfigError("attention", attention, f"must be one of {', '.join(AttentionChoice.__members__)}")
    return Attached(model, group, AttentionChoice[attention], timeout)


class Attached:
    """A model whose layers read the tokens of all ranks of a sequence, made by `attach`.

    Attributes:
        model: as it was given, of the same class, with the same parameters and state dict.
        group: of the ranks that share sequences.
        rank: this process's place in the group, and so its part of each sequence.
        size: their number.
        layers: names of the attached layers by kind, `linear` and `softmax`.
    """

    def __init__(
        self, model: nn.Module, group: ProcessGroup | None, attention: AttentionChoice, timeout: timedelta
    ) -> None:
        hooks = [hook for module in model.modules() for hook in module._forward_pre_hooks.values()]
        if any(isinstance(getattr(hook, "__self__", None), Attached) for hook in hooks):
            raise AttachError(f"{type(model).__name__}: is attached already; call `detach` first")
        self.model = model
        self.attached = find_layers(model)
        self.layers = {
            kind: [layer.name for layer in self.attached if layer.kind == kind] for kind in ("linear", "softmax")
        }
        self._root = _language_model(model)
        self._names = names_of(self._root)
        self._parameters = {*inspect.signature(self._root.forward).parameters}
        self._check()
        self._over = GroupExchange(SPConfig(attention=attention), group, timeout, halo=True)
        self.group, self.rank, self.size = self._over.group, self._over.rank, self._over.size
        kept = {n: (tuple(x.shape), _checksum(x), x.requires_grad) for n, x in model.named_parameters()}
        self._compare(kept, "load and freeze the same on all")
        self._undo: list[Callable[[], None]] = []
        self._is_random = any(random_settings(module) for module in model.modules())
        # Of configurations, as they were, and those of an attached model while it is off.
        self._settings: list[tuple[Any, str, Any]] = []
        self._own: list[tuple[Any, str, Any]] = []
        self._blocks = 0
        self._is_compared = self.size == 1
        try:
            self._attach()
        except BaseException:
            self.detach()
            raise

    def __deepcopy__(self, memo: dict[int, Any]) -> Attached:
        # A copy of the model is attached to the same ranks.
        return self

    def shard(
        self, batch: Mapping[str, Any], documents: Documents | None = None, lengths: Sequence[int] | None = None
    ) -> dict[str, Any]:
        """This rank's part of a batch that all ranks of the sequence have whole: the arguments of the model.

        Labels are shifted before they are cut, so the last token of a rank has the next rank's first as its label; the
        last of a document has none. The loss is divided by the number of all ranks' labels.

        Args:
            batch: as a model takes it: `input_ids` [B, T] or `inputs_embeds`, and `labels`, `shift_labels`,
                `attention_mask` (padding, at the end of rows), `position_ids`, `cu_seq_lens_q`, `num_items_in_batch`.
            documents: borders of packed documents from 0 to T, of all rows, or a list for each; nothing is read across
                them. None: from `cu_seq_lens_q`, or from `position_ids` that restart at 0; else each row is one.
            lengths: tokens of each rank, from 1 on; None: as equal as possible.

        Raises:
            AttachError: what cannot be cut, by its name.
        """
        return cut(batch, self.rank, self.size, documents, lengths)

    def reduce_gradients(self) -> None:
        """Add up the gradients of all ranks of the sequence, for a loop without DDP or FSDP. Collective."""
        parameters = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
        # A rank's tokens may have chosen no expert that another rank's have; what no rank used is not trained.
        is_used = torch.tensor([int(parameter.grad is not None) for parameter in parameters], device=self._over.device)
        dist.all_reduce(is_used, group=self.group)
        used = [parameter for parameter, count in zip(parameters, is_used.tolist(), strict=True) if count]
        for parameter in used:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        for grads in _take_tensors([parameter.grad for parameter in used], _BUCKET):
            flat = _flatten_dense_tensors(grads)
            dist.all_reduce(flat, group=self.group)
            for grad, total in zip(grads, _unflatten_dense_tensors(flat, grads), strict=True):
                grad.copy_(total)

    @contextmanager
    def off(self) -> Iterator[None]:
        """In the block, calls of the model are of whole sequences, as if it were not attached; of all threads."""
        with _lock:
            if not self._blocks:
                self._own = [(owner, name, getattr(owner, name)) for owner, name, _ in self._settings]
                _set(self._settings)
            self._blocks += 1
        try:
            yield
        finally:
            with _lock:
                self._blocks -= 1
                if not self._blocks:
                    _set(self._own)

    def detach(self) -> None:
        """Make the model what it was; not within `off()`."""
        if self._blocks:
            raise AttachError("detach: within `off()`, whose end would attach the model's settings again")
        while self._undo:
            self._undo.pop()()
        for module in self.model.modules():
            for name in _CHECKPOINTS:
                if isinstance(function := vars(module).get(name), Checkpoint):
                    setattr(module, name, function.function)

    def audit(self, batch: Mapping[str, Any]) -> list[str]:
        """The modules that mix tokens and are not attached, by name and class; none means that the model is exact.

        On the first row and at most 61 tokens of a batch of whole sequences, on this rank alone, without gradients.
        """
        with self.off():
            return audit_modules(self.model, batch, [layer.module for layer in self.attached])

    def _check(self) -> None:
        check_losses(self._root, self._names, getattr(self._root, "config", None))
        for name, module in self.model.named_modules():
            kinds = str(getattr(module, "rope_type", ""))
            if "dynamic" in kinds or "longrope" in kinds:
                raise AttachError(f"{name} ({type(module).__name__}): rope_type {kinds} depends on a rank's own length")
            if rate := getattr(module, "layerdrop", None):
                problem = f"layerdrop={rate} would leave out other layers on each rank; set it to 0"
                raise AttachError(f"{name} ({type(module).__name__}): {problem}")
        if self.layers["softmax"] and "position_ids" not in self._parameters:
            raise AttachError(f"{type(self._root).__name__}: takes no position_ids, so positions would be a rank's own")

    # Refuses the first name whose value differs between ranks; returns every rank's `own`.
    def _compare(self, mine: dict[str, Any], remedy: str, own: int | None = None) -> list[int | None]:
        everyone: list[Any] = [None] * self.size
        try:
            dist.all_gather_object(everyone, (mine, own), group=self._over.group_with_timeout)
        except RuntimeError as error:
            problem = str(error).splitlines()[0]
            raise CommunicationError(self.rank, "comparing parameters or the first batch", problem) from error
        for rank, (theirs, _) in enumerate(everyone):
            first = everyone[0][0]
            if wrong := [name for name in first | theirs if theirs.get(name) != first.get(name)]:
                raise AttachError(f"{wrong[0]}: differs between ranks 0 and {rank} of the group; {remedy}")
        return [own for _, own in everyone]

    def _attach(self) -> None:
        handled = {layer.module for layer in self.attached}
        for layer in self.attached:
            self._hook(layer.module, _entering(self, layer), _leaving(self, layer))
            self._redirect(layer.module, REPLACEMENTS, in_layer=True)
            if (replacement := inline_of(layer)) is not None:
                self._replace(layer.module, replacement)
        for name, module in self.model.named_modules():
            self._redirect(module, LOSSES, in_layer=False)
            if isinstance(module, MIXING_MODULES) and module not in handled:
                self._undo.append(module.register_forward_pre_hook(_refusing(self, name)).remove)
        self._undo += redirect_loss(self._root, self._names)
        self._hook(self.model, self._enter, self._leave)
        # Not by use_cache=False in each call: some forward functions do not take it, but pass it on.
        configs: list[Any] = [module.config for module in self.model.modules() if hasattr(module, "config")]
        configs += [config.get_text_config() for config in configs if hasattr(config, "get_text_config")]
        wanted: list[tuple[str, Any]] = [("use_cache", False)]
        if self.layers["softmax"]:
            register()
            wanted.append(("_attn_implementation", IMPLEMENTATION))
        for config in {id(config): config for config in configs}.values():
            found = [(config, name, getattr(config, name)) for name, _ in wanted if hasattr(config, name)]
            self._settings += found
            _set([(config, name, value) for name, value in wanted if hasattr(config, name)])
        self._undo.append(lambda: _set(self._settings))

    def _hook(self, module: nn.Module, before: Callable[..., Any], after: Callable[..., Any]) -> None:
        self._undo.append(module.register_forward_pre_hook(before, with_kwargs=True).remove)
        self._undo.append(module.register_forward_hook(after, always_call=True).remove)

    def _redirect(self, module: nn.Module, answers: Mapping[str, Callable[..., Any]], *, in_layer: bool) -> None:
        for space in spaces_of(module):
            for name in names_of(module) & answers.keys() & space.keys():
                self._undo.append(_install(space, name, answers[name], in_layer))

    def _replace(self, module: nn.Module, replacement: Callable[..., Any]) -> None:
        # Bound to the module, and so by a deep copy to its copy.
        def forward(own: nn.Module, *args: Any, **kwargs: Any) -> Any:
            frame = current()
            if frame is None or frame.layer is None:
                return type(own).forward(own, *args, **kwargs)
            frame.layer.calls += 1
            return replacement(frame, own, *args, **kwargs)

        module.forward = MethodType(forward, module)
        self._undo.append(lambda: vars(module).pop("forward"))

    def _enter(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        # Before the model's own forward function: the pass begins.
        kwargs = dict(kwargs)
        position = kwargs.pop(POSITION, None)
        if bool(self._blocks) == (position is not None):
            raise AttachError(f"{POSITION}: pass what `shard` gives, or whole sequences within `off()`")
        if self._blocks:
            return None
        for name, remedy in _REFUSED.items():
            value = kwargs.get(name)
            if value is not None and not (isinstance(value, int) and value == 0):
                raise AttachError(f"{name}: {remedy}")
        if len(args) > 1:
            raise AttachError(f"{type(module).__name__}: {len(args)} arguments by position; pass arguments by keyword")
        tokens = args[0] if args else kwargs.get("input_ids")
        tokens = kwargs.get("inputs_embeds") if tokens is None else tokens
        if tokens is None:
            raise AttachError("input_ids: missing, and inputs_embeds, too")
        self._check_position(position, tokens)
        check_labels(self._root, self._names, kwargs)
        self._compare_batches(position, tokens, kwargs.get("num_items_in_batch"))
        positions, mask = kwargs.get("position_ids"), kwargs.pop("attention_mask", None)
        if mask is not None and (mask.dtype != torch.bool or mask.shape != tokens.shape[:2]):
            raise AttachError("attention_mask: give it to `shard`, which cuts it")
        if "position_ids" not in self._parameters:
            kwargs.pop("position_ids", None)
        self._wrap_checkpoints(module)
        state = _draw_apart(tokens, self.rank) if module.training and self._is_random else None
        labels = {name: kwargs.get(name) for name in ("shift_labels", "num_items_in_batch")}
        push(Frame(of := Pass(position, self._over, positions, labels, mask, state)))
        of.position_on(tokens, self._over.exchange)
        return args, kwargs

    def _leave(self, module: nn.Module, _: Any, output: Any) -> None:
        frame = current()
        if frame is None or self._blocks or frame.of.over is not self._over:
            return
        pop(within=frame.of)
        for generator, state in frame.of.random_state or ():
            generator.set_state(state)
        logits, tokens = getattr(output, "logits", None), frame.of.position.num_tokens
        if isinstance(logits, torch.Tensor) and (logits.dim() < 3 or logits.shape[1] != tokens):
            problem = f"logits {list(logits.shape)}, expected [B, t, V] for this rank's t = {tokens} tokens"
            raise AttachError(f"{type(module).__name__}: {problem}")

    def _check_position(self, position: Any, tokens: torch.Tensor) -> None:
        if tokens.shape[1] != position.num_tokens:
            raise AttachError(f"input_ids: {tokens.shape[1]} tokens, the slice has {position.num_tokens}")
        if (position.rank, len(position.bounds)) != (self.rank, self.size + 1):
            of = f"rank {position.rank} of {len(position.bounds) - 1}"
            raise AttachError(f"{POSITION}: of {of}, this is rank {self.rank} of {self.size}")

    # At the first call only: a program that gives the ranks different batches does so from the start.
    @torch.compiler.disable
    def _compare_batches(self, position: Any, tokens: torch.Tensor, count: Any) -> None:
        if self._is_compared:
            return
        whole, own = (None if x is None else int(x) for x in (position.whole, checksum(tokens)))
        mine = {
            "lengths": (len(tokens), position.bounds),
            "documents": position.documents and [each.tolist() for each in position.documents],
            "input_ids": whole,
            "num_items_in_batch": None if count is None else float(count),
        }
        everyone = self._compare(mine, "`shard` takes the same whole batch on each", own)
        # Of zeros, where a trainer has cut the tokens: see `of_slice`. Not refused: slices may be equal.
        if whole == 0 and own and {*everyone} == {own}:
            warnings.warn(
                "input_ids: all ranks have the same tokens; each has its own slice of the sequences", stacklevel=3
            )
        self._is_compared = True

    def _wrap_checkpoints(self, model: nn.Module) -> None:
        # Each time: a trainer may enable checkpointing, or change its function, whenever it likes.
        for module in model.modules():
            for name in _CHECKPOINTS:
                function = vars(module).get(name)
                if callable(function) and not isinstance(function, Checkpoint):
                    setattr(module, name, Checkpoint(function))


# Ranks whose generators are alike would drop the same places of different tokens. The numbers after the pass are those
# that would have come without it, less one, so generators stay alike where they were.
def _draw_apart(tokens: torch.Tensor, rank: int) -> list[tuple[torch.Generator, torch.Tensor]]:
    generators = [torch.default_generator]
    if tokens.device.type == "cuda":
        generators.append(torch.cuda.default_generators[tokens.device.index])
    seed = int(torch.randint(1 << 62, ()))
    states = [(generator, generator.get_state()) for generator in generators]
    for generator in generators:
        generator.manual_seed(seed + rank)
    return states


def random_settings(module: nn.Module) -> list[str]:
    """Names of a module's own settings of dropout and noise that are not 0."""
    own = [name for name, value in vars(module).items() if isinstance(value, float) and value > 0]
    is_dropout = isinstance(module, nn.modules.dropout._DropoutNd)
    return [name for name in own if (is_dropout and name == "p") or "dropout" in name or "jitter" in name]


def _checksum(x: Tensor) -> int:
    # Of the numbers' bits, which add up exactly in any order.
    if x.is_meta or isinstance(x, DTensor) or x.element_size() not in _BITS:
        return 0
    return int(x.detach().contiguous().view(_BITS[x.element_size()]).sum())


def _language_model(model: nn.Module) -> nn.Module:
    # What is inside wrappers, as PEFT's: the outermost model of transformers.
    from transformers import PreTrainedModel

    return next((module for module in model.modules() if isinstance(module, PreTrainedModel)), model)


def _set(settings: Sequence[tuple[Any, str, Any]]) -> None:
    for owner, name, value in settings:
        setattr(owner, name, value)


def _entering(attached: Attached, layer: Layer) -> Callable[..., None]:
    def enter(module: nn.Module, *_: Any) -> None:
        if attached._blocks:
            return
        frame = current()
        if frame is None or frame.of.over is not attached._over:
            problem = "runs outside its model's forward pass, or is computed again by a checkpoint of another library"
            raise layer.error(problem)
        push(replace(frame, layer=replace(layer, module=module)))

    return enter


def _leaving(attached: Attached, layer: Layer) -> Callable[..., None]:
    def leave(module: nn.Module, _: Any, output: Any) -> None:
        frame = current()
        if attached._blocks or frame is None or frame.layer is None or frame.layer.module is not module:
            return
        pop()
        # None: an error is under way.
        if output is not None and not frame.layer.calls:
            raise layer.error("computed its output without a function that is known over ranks")

    return leave


def _refusing(attached: Attached, name: str) -> Callable[..., None]:
    def refuse(module: nn.Module, _: Any) -> None:
        if not attached._blocks and current() is not None:
            raise AttachError(f"{name} ({type(module).__name__}): mixes tokens, and is not attached")

    return refuse


_lock = threading.Lock()
# By the globals of a module and a name in them: how many models redirect it, what it was, and what it is.
_installed: dict[tuple[int, str], list[Any]] = {}


def _install(space: dict[str, Any], name: str, answer: Callable[..., Any], in_layer: bool) -> Callable[[], None]:
    """Replace a function in a module's globals by one that asks who calls; the result undoes it."""
    key = id(space), name
    with _lock:
        if key not in _installed:
            original = space[name]
            space[name] = _dispatcher(name, original, answer, in_layer)
            _installed[key] = [0, original, space[name]]
        _installed[key][0] += 1

    def undo() -> None:
        with _lock:
            count, original, own = _installed[key]
            _installed[key][0] = count - 1
            if count == 1:
                del _installed[key]
                # Another library may have replaced it in its turn.
                if space[name] is own:
                    space[name] = original

    return undo


def _dispatcher(
    name: str, original: Callable[..., Any], answer: Callable[..., Any], in_layer: bool
) -> Callable[..., Any]:
    signature = inspect.signature(answer)

    @wraps(original)
    def dispatch(*args: Any, **kwargs: Any) -> Any:
        frame = current()
        if frame is None or (in_layer and frame.layer is None):
            return original(*args, **kwargs)
        try:
            signature.bind(frame, *args, **kwargs)
        except TypeError as error:
            raise AttachError(f"{frame.layer or name}: {error}") from error
        if frame.layer is not None:
            frame.layer.calls += 1
        return answer(frame, *args, **kwargs)

    return dispatch
