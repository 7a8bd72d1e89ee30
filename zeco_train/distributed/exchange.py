"""All that the ranks of a sequence exchange for a model: states, halos of convolutions, and softmax attention."""

from __future__ import annotations

from models.attn import AttnShape
from models.config import LanguageModelConfig
from models.spec import spec_of
from zeco_train.distributed.mesh import ProcessMesh, attention_group, halo_groups
from zeco_train.ops.seam import AttentionMethod
from zeco_train.sp.attention.method import MethodSpec
from zeco_train.sp.attention.registry import build_attention, choose
from zeco_train.sp.backend import ScanBackend
from zeco_train.sp.registry import SPConfig, build_scan


def build_exchange(config: SPConfig, model: LanguageModelConfig, mesh: ProcessMesh) -> ScanBackend:
    """The scan of the configured backend, with what the model's layers need beside it. Collective.

    Raises:
        ConfigError: the ranks, or the model's heads, do not support the configuration.
    """
    halo = halo_groups(mesh) if spec_of(model).needs_halo else None
    scan = build_scan(config, mesh.scan_groups, mesh.timeout, mesh.device, halo, mesh.topology)
    scan.attention = build_softmax(config, model, mesh) or scan.attention
    return scan


def build_softmax(config: SPConfig, model: LanguageModelConfig, mesh: ProcessMesh) -> AttentionMethod | None:
    """The method of the model's softmax layers; None if it has none. Collective.

    Raises:
        ConfigError: the configured method cannot spread the heads over the ranks.
    """
    method = attention_method(config, model, mesh.sp_size)
    return None if method is None else build_attention(method, attention_group(mesh), mesh.timeout)


def attention_method(config: SPConfig, model: LanguageModelConfig, ranks: int) -> MethodSpec | None:
    """The method of the model's softmax layers over the ranks of a sequence; None if it has none.

    Raises:
        ConfigError: the configured method cannot spread the heads over the ranks.
    """
    if not model.attn.chosen(model.num_layers):
        return None
    shape = AttnShape.of(model.attn, model.num_heads, model.hidden_size)
    return choose(config.attention, shape.heads, shape.key_heads, shape.head_dim, ranks)
