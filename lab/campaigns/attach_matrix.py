"""Question: are losses and all gradients of foreign models over ranks those of one device, class by class?
Command: python -m lab.campaigns.attach_matrix [--ranks 2,3,4] [--fla] [NAME ...]
Date: 2026-11-28
Answer: results/attach_matrix.txt: all errors are at most 1e-12, but for controls, in which one state is dropped; of
transformers in the published configurations below, of fla in its classes' defaults, over 2, 3 and 4 ranks

Each model has its published configuration with sizes reduced, in fp64, over gloo ranks with three chunks of 64 tokens
each and more. A row has a batch of two rows, whole; packed, with other documents in each row over uneven ranks, one of
which has one token; the same with gradient checkpointing; the control.

Sizes are vocabulary, widths, heads and groups, states, experts and those chosen, ranks of adapters and of latent
attention, windows, lengths, and the number of layers, of whose kinds there are two at least, in the published order
where that is short. Published groups of one state are two here, but for Mamba-2 2.7B.
"""

from __future__ import annotations

import argparse
import functools
import os
import subprocess
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch.distributed as dist

from tests.support import attach_models
from tests.support.attach_models import FLA_MODELS, MODELS, Errors, Model, build, build_fla, compare, make_batch
from tests.support.commands import REPOSITORY
from tests.support.distributed import run_distributed

TABLE = Path(__file__).with_name("results") / "attach_matrix.txt"
LINE = "{:16}{:>6}{:>9}{:>9}{:>9}{:>9}{:>9}{:>9}{:>10}{:>9}  {}"
HEADER = "# By python -m lab.campaigns.attach_matrix [--fla]: published configurations (fla: defaults), sizes reduced."
COLUMNS = ("class", "ranks", "whole", "dgrad", "packed", "dgrad", "replayed", "dgrad", "control", "seconds", "commit")
TOKENS = 200  # of a rank, on average
LARGEST = 1e-12


class Published(NamedTuple):
    """What a config.json sets otherwise than its class of transformers 5.23, and what is adapted to the sizes."""

    of: Model
    model_id: str
    seen: str  # where the values stood; the hub itself cannot be read from here
    fields: Mapping[str, Any] = {}
    sizes: Mapping[str, Any] = {}


def _rope(theta: float, **rest: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": "default", "rope_theta": theta, **rest}}


# Of 32 frequencies 11, 11 and 10: of 4 here.
_MROPE = _rope(1e7, partial_rotary_factor=0.25, mrope_interleaved=True, mrope_section=[2, 1, 1])
_GQA = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
_SAME = "the class's own defaults"
_AUDITS = "a survey of configurations on the hub, dinoml"
_MLSTM = "NX-AI/mlstm_kernels, its benchmarks"
_BRIDGE = "NVIDIA Megatron-Bridge, its tests"
PUBLISHED: dict[str, Published] = {
    "qwen3_next": Published(
        MODELS["qwen3_next"],
        "Qwen/Qwen3-Next-80B-A3B-Instruct",
        "tests of two converters, at revision 9c7f2fbe",
        _rope(1e7, partial_rotary_factor=0.25),
        {"head_dim": 32},
    ),
    "qwen3_5": Published(
        MODELS["qwen3_5"],
        "Qwen/Qwen3.5-27B",
        "tests of three converters, the whole text_config",
        _MROPE | {"attn_output_gate": True, "output_gate_type": "swish", "mamba_ssm_dtype": "float32"},
        {"head_dim": 32},
    ),
    "qwen3_5_moe": Published(
        MODELS["qwen3_5_moe"],
        "Qwen/Qwen3.5-35B-A3B",
        "tests of a converter, the whole text_config",
        _MROPE | {"attn_output_gate": True, "mamba_ssm_dtype": "float32"},
        {"head_dim": 32},
    ),
    "olmo_hybrid": Published(
        MODELS["olmo_hybrid"],
        "allenai/Olmo-Hybrid-7B",
        f"{_AUDITS}; OLMo-core's tests",
        # No rotation: the file has null, of which the class of 5.23 makes a rotation; -Instruct-DPO-7B has this.
        {"rope_parameters": {"rope_type": "default", "rope_theta": None}},
    ),
    "mamba2": Published(
        MODELS["mamba2"],
        "mistralai/Mamba-Codestral-7B-v0.1",
        _MLSTM,
        {"norm_before_gate": True, "rms_norm": True, "eos_token_id": 0, "pad_token_id": 0},
    ),
    "mamba2_2.7b": Published(
        MODELS["mamba2"],
        "state-spaces/mamba2-2.7b",
        "tests of mlx-swift-lm",
        {"rms_norm": True, "tie_word_embeddings": True, "eos_token_id": 0, "pad_token_id": 0},
        {"n_groups": 1},
    ),
    "nemotron_h": Published(
        MODELS["nemotron_h"],
        "nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16",
        "a study of a port, the whole file",
        {"routed_scaling_factor": 2.5},
    ),
    "nemotron_h_8b": Published(
        MODELS["nemotron_h"],
        "nvidia/Nemotron-H-8B-Base-8K",
        _BRIDGE,
        {},
        {"layers_block_type": ["mamba", "mlp", "mamba", "attention", "mlp", "mamba", "mlp", "attention"]},
    ),
    "bamba": Published(MODELS["bamba"], "ibm-ai-platform/Bamba-9B-v2", f"{_AUDITS}: {_SAME}"),
    "falcon_h1": Published(
        MODELS["falcon_h1"],
        "tiiuae/Falcon-H1-0.5B-Base",
        _BRIDGE,
        {
            "attention_out_multiplier": 0.9375,
            "embedding_multiplier": 5.656854249492381,
            "key_multiplier": 0.39062499999999994,
            "lm_head_multiplier": 0.0390625,
            "mamba_norm_before_gate": False,
            "mlp_multipliers": [0.8838834764831844, 0.5859375],
            "ssm_in_multiplier": 1.25,
            "ssm_multipliers": [0.3535533905932738, 0.25, 0.3535533905932738, 0.5, 0.3535533905932738],
            "ssm_out_multiplier": 0.23570226039551587,
            **_rope(1e11),
        },
    ),
    "zamba2": Published(
        MODELS["zamba2"],
        "Zyphra/Zamba2-7B",
        _MLSTM,
        {"num_mem_blocks": 2, "use_mem_rope": True},
        {"adapter_rank": 8, "layers_block_type": ["mamba", "hybrid"] * 4, "num_hidden_layers": 8},
    ),
    "zamba2_2.7b": Published(
        MODELS["zamba2"],
        "Zyphra/Zamba2-2.7B",
        f"Zyphra's page: two shared blocks, no positions; else {_SAME}",
        {"num_mem_blocks": 2},
        {"adapter_rank": 8, "layers_block_type": ["mamba", "hybrid"] * 4, "num_hidden_layers": 8},
    ),
    "granite_hybrid": Published(
        MODELS["granite_hybrid"],
        "ibm-granite/granite-4.0-h-350m, with experts as -h-small has",
        f"tests of an MLX port, the whole file of 350m; {_AUDITS}; none was found of one with experts",
        {
            "attention_multiplier": 0.015625,
            "embedding_multiplier": 12,
            "logits_scaling": 3,
            "position_embedding_type": "nope",
            "residual_multiplier": 0.246,
            "rms_norm_eps": 1e-5,
            "tie_word_embeddings": True,
        },
    ),
    "lfm2": Published(
        MODELS["lfm2"],
        "LiquidAI/LFM2-1.2B",
        f"a study of a port, and tests of two: {_SAME}",
        {},
        {"num_hidden_layers": 6, "layer_types": ["conv", "conv", "full_attention"] * 2, "block_multiple_of": 16},
    ),
    "kimi_linear": Published(
        MODELS["kimi_linear"],
        "moonshotai/Kimi-Linear-48B-A3B-Instruct",
        "tests of a converter, the whole file; its defaults but for the order of layers",
        {"first_k_dense_replace": 1, "layer_types": None, "mla_use_nope": True},
        {
            "num_hidden_layers": 8,
            "linear_attn_config": {
                "kda_layers": [1, 2, 3, 5, 6, 7],
                "full_attn_layers": [4, 8],
                "num_heads": 4,
                "head_dim": 8,
                "short_conv_kernel_size": 4,
            },
        },
    ),
    "minimax": Published(
        MODELS["minimax"],
        "MiniMaxAI/MiniMax-Text-01",
        "transformers' tests of MiniMax-VL-01, whose text it is; rotary_dim 64 is not read by the class",
        {
            "full_attn_alpha_factor": 3.5565588200778455,
            "linear_attn_alpha_factor": 3.5565588200778455,
            "mlp_alpha_factor": 3.5565588200778455,
            **_rope(1e7),
        },
        {"num_hidden_layers": 16, "layer_types": (["linear_attention"] * 7 + ["full_attention"]) * 2},
    ),
    "qwen3": Published(MODELS["qwen3"], "Qwen/Qwen3-8B", "tests of three converters, the whole file", _rope(1e6)),
    "llama": Published(
        Model("Llama", _GQA | {"num_hidden_layers": 2}),
        "meta-llama/Llama-3.1-8B",
        _MLSTM,
        {
            "rms_norm_eps": 1e-5,
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 500000.0,
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 8192,
            },
        },
    ),
    "gemma3": Published(
        Model("Gemma3", _GQA | {"head_dim": 8, "num_hidden_layers": 12, "pad_token_id": 0}, config="TextConfig"),
        "google/gemma-3-1b-it",
        f"tests of two converters: {_SAME}",
        {},
        {"sliding_window": 9, "num_key_value_heads": 1},
    ),
    # Its soft cap of attention is refused, so it is left out.
    "gemma2": Published(MODELS["gemma2"], "google/gemma-2-2b", f"tests of a converter: {_SAME}"),
    # Its dropout of 0.1 is left out: that of attention is refused.
    "gpt2": Published(MODELS["gpt2"], "openai-community/gpt2", f"{_SAME}, made of it"),
    "qwen3_window": Published(MODELS["qwen3_window"], "none: a window of 9 keys", _SAME),
}


def build_published(name: str) -> Any:
    """A model of the table, as `build` makes it."""
    row = PUBLISHED[name]
    return build(replace(row.of, sizes={**row.of.sizes, **row.fields, **row.sizes}))


def rows(rank: int, size: int, names: list[str], is_fla: bool) -> list[tuple[str, list[Errors], float]]:
    """On each rank: the errors of each class, whole, packed, checkpointed, and of the control; and seconds."""
    patch = pytest.MonkeyPatch()
    (attach_models.use_plain_fla(patch) if is_fla else attach_models.hide_fla())
    length = TOKENS * size + 1
    batch = make_batch(2, length)
    lengths = [1, *[(length - 1) // (size - 1)] * (size - 2)]
    lengths = [*lengths, length - sum(lengths)]
    documents = [[0, 3, 70, 71, length - 100, length], [0, length // 2, length]]
    packed: dict[str, Any] = {"documents": documents, "lengths": lengths}
    found = []
    for name in names:
        make = functools.partial(build_fla if is_fla else build_published, name)
        start = time.monotonic()
        errors = [
            compare(make, [batch]),
            compare(make, [batch], **packed),
            compare(make, [batch], **packed, prepare=_checkpointed),
            compare(make, [batch], prepare=attach_models.drop_a_state),
        ]
        found.append((name, errors, time.monotonic() - start))
        dist.barrier()
    return found


def _checkpointed(attached: Any) -> None:
    attach_models.checkpoint_in_double(attached.model, reentrant=False)


def main() -> None:
    """Run the classes; rows of others in the table stay."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", default="2,3,4")
    parser.add_argument("--fla", action="store_true", help="the classes of fla")
    parser.add_argument("names", nargs="*")
    arguments = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    known = FLA_MODELS if arguments.fla else PUBLISHED
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=REPOSITORY, capture_output=True, text=True, check=True
    ).stdout.strip()
    kept = TABLE.read_text().splitlines()[2:] if TABLE.exists() else []
    by_key = {tuple(line.split()[:2]): line for line in kept}
    for size in map(int, arguments.ranks.split(",")):
        for name in arguments.names or known:
            found = run_distributed(rows, size, [name], arguments.fla)[0]
            _, (whole, packed, replayed, control), seconds = found[0]
            shown = [x for errors in (whole, packed, replayed) for x in (errors.loss, errors.gradient)]
            is_wrong = max(shown) > LARGEST or control.gradient < 1e-6
            title = f"fla.{name}" if arguments.fla else name
            cells = [title, size, *(f"{x:.1e}" for x in (*shown, control.gradient)), f"{seconds:.0f}", commit]
            by_key[title, str(size)] = LINE.format(*cells) + ("  WRONG" if is_wrong else "")
            print(by_key[title, str(size)], flush=True)
            TABLE.write_text("\n".join([HEADER, LINE.format(*COLUMNS), *sorted(by_key.values())]) + "\n")


if __name__ == "__main__":
    main()
