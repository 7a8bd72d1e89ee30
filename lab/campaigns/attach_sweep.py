"""Question: is any causal language model of transformers wrong over ranks, rather than exact or refused?
Command: python -m lab.campaigns.attach_sweep
Date: 2026-11-27
Answer: results/attach_sweep.txt: none of the 126 that were built: 76 exact, 50 refused; 55 were not built, as
their sizes cannot be reduced by names alone (DeepSeek, Gemma 3 and 4, Falcon, GPT-J, Nemotron, multimodal ones)

Each class of transformers' list of causal language models, by its configuration class's defaults with sizes reduced and
dropout and noise set to 0, in fp64 on two gloo ranks: a whole row, and packed documents over uneven ranks. The stored
table is of the script from which this file was made, in three parts, at dd29e1dd; Phimoe and SeedOss are of this file.
"""

from __future__ import annotations

import argparse
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from tests.support import attach_models
from tests.support.attach_models import InDouble, compare, fill, make_batch, run_alone
from tests.support.distributed import run_distributed
from zeco_train.attach import AttachError

TABLE = Path(__file__).with_name("results") / "attach_sweep.txt"
SECONDS = 60  # of a class
HEADER = "# By python -m lab.campaigns.attach_sweep over 2 ranks: classes at their defaults, sizes reduced, no dropout."
# Above this, sizes are left that the names below do not reduce.
MOST_PARAMETERS = 3e6
TOKENS, DOCUMENTS, LENGTHS = 40, [[0, 7, 25, 40]], [29, 11]
_NAMES = {
    97: "vocab_size",
    32: "hidden_size d_model n_embd dim embed_dim",
    48: "intermediate_size ffn_dim decoder_ffn_dim",
    2: "num_hidden_layers n_layer num_layers n_layers decoder_layers num_key_value_heads num_experts_per_tok "
    "eos_token_id mamba_n_groups",
    4: "num_attention_heads n_head num_heads n_heads decoder_attention_heads num_experts num_local_experts "
    "n_routed_experts qk_rope_head_dim",
    8: "head_dim qk_nope_head_dim v_head_dim mamba_n_heads mamba_d_head",
    16: "moe_intermediate_size kv_lora_rank q_lora_rank shared_expert_intermediate_size",
    12: "mamba_d_state",
    9: "sliding_window",
    1: "n_group topk_group bos_token_id",
    256: "max_position_embeddings",
    0: "pad_token_id",
}
_SIZES: dict[str, Any] = {name: size for size, names in _NAMES.items() for name in names.split()}
_RANDOM = ("dropout", "drop", "pdrop", "jitter_noise", "layerdrop", "dropout_prob")


def make(name: str) -> nn.Module:
    """A small model of a class of transformers."""
    import transformers

    kind = getattr(transformers, name)
    defaults = kind.config_class()
    numbers = {key: value for key, value in vars(defaults).items() if isinstance(value, int | float)}
    settings = {
        key: size for key, size in _SIZES.items() if key in numbers or isinstance(getattr(defaults, key, None), int)
    }
    settings |= {key: 0.0 for key, value in numbers.items() if key.endswith(_RANDOM) and isinstance(value, float)}
    types: dict[str, Any] = {}
    for key in ("layer_types", "mlp_layer_types"):
        if isinstance(listed := getattr(defaults, key, None), list):
            kinds = [*dict.fromkeys(listed)]
            types[key] = (kinds * 2)[: max(2, len(kinds))]
            types["num_hidden_layers"] = len(types[key])
    try:
        config = kind.config_class(**settings, **types)
    except Exception:
        config = kind.config_class(**settings)
    config._attn_implementation = config._experts_implementation = "eager"
    with torch.device("meta"):
        count = sum(parameter.numel() for parameter in kind(config).parameters())
    if count > MOST_PARAMETERS:
        raise ValueError(f"has {count:,} parameters")
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        torch.manual_seed(0)
        model: nn.Module = kind(config).double().train()
    finally:
        torch.set_default_dtype(before)
    fill(model)
    return model


def judged(name: str) -> tuple[str, str]:
    """exact, refused, WRONG, failed or not built; and the errors or the reason. Collective."""
    batch, runs_alone = make_batch(1, TOKENS), False
    try:
        with _in_time():
            with InDouble():
                run_alone(make(name), batch, None)
            runs_alone = True
            whole = compare(lambda: make(name), [batch])
            packed = compare(lambda: make(name), [batch], documents=DOCUMENTS, lengths=LENGTHS)
    except AttachError as error:
        return "refused", str(error)
    except Exception as error:
        return "failed" if runs_alone else "not built", f"{type(error).__name__}: {error}"[:120]
    shown = [x for errors in (whole, packed) for x in errors[:2]]
    return "exact" if max(shown) < 1e-12 else "WRONG", " ".join(f"{x:.1e}" for x in shown)


@contextmanager
def _in_time() -> Iterator[None]:
    def late(*_: Any) -> None:
        raise TimeoutError(f"took more than {SECONDS} s")

    signal.signal(signal.SIGALRM, late)
    signal.alarm(SECONDS)
    try:
        yield
    finally:
        signal.alarm(0)


def rows(rank: int, size: int) -> list[str]:
    """On each rank: a line a class."""
    attach_models.hide_fla()
    import transformers
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as LISTED

    transformers.logging.set_verbosity(transformers.logging.CRITICAL)
    names = {name for value in LISTED.values() for name in ([value] if isinstance(value, str) else value)}
    found = []
    for name in sorted(names):
        verdict, text = judged(name)
        found.append(f"{verdict:10} {name:45} {' '.join(text.split())}")
        if rank == 0:
            print(found[-1], flush=True)
    return found


def main() -> None:
    """Judge all classes."""
    # Only for --help, by which the sweep would start.
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    found = run_distributed(rows, 2, timeout=3600.0)[0]
    TABLE.write_text("\n".join([HEADER, *sorted(found)]) + "\n")
    print(TABLE, sum(line.startswith("WRONG") for line in found), "wrong of", len(found))


if __name__ == "__main__":
    main()
