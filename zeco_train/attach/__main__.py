"""The command `python -m zeco_train.attach verify FOLDER`: is a model of Hugging Face exact over ranks of a CPU?"""

from __future__ import annotations

from zeco_train.system.signals import run_command

if __name__ == "__main__":
    run_command("zeco_train.attach.__main__")

import os
import sys
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from zeco_train.attach.forward import AttachError
from zeco_train.attach.proof import prove
from zeco_train.checkpoint.files import HF_CONFIG_FILE, read_record
from zeco_train.config.help import describe_settings
from zeco_train.config.overrides import load_settings
from zeco_train.errors import ConfigError, first_cause
from zeco_train.hf.folder import INDEX_FILE, WEIGHTS_FILE, stored_weights
from zeco_train.system.command import errors_in_a_line
from zeco_train.system.numbers import check_least

_USAGE = "python -m zeco_train.attach verify FOLDER [KEY=VALUE ...]"
# A stranger's config.json chooses it; each layer takes time and memory even without weights.
_MOST_LAYERS = 10_000
_DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32, "fp64": torch.float64}


@dataclass
class ProofSettings:
    """Settings of a proof.

    Attributes:
        ranks: processes on this machine's CPU that share each sequence.
        tokens: length of the sequences, cut into slices of different lengths.
        batch: sequences of a batch.
        documents: packed documents (true), whole sequences (false), both (null).
        weights: those of the folder's safetensors files (true), random ones (false); null: the folder's if it has any.
        dtype: bf16, fp32 or fp64, in which the model is compared after fp64.
        seed: of tokens and of random weights.
        timeout: seconds that a rank waits for another.
    """

    ranks: int = 2
    tokens: int = 200
    batch: int = 2
    documents: bool | None = None
    weights: bool | None = None
    dtype: str = "fp32"
    seed: int = 0
    timeout: float = 600.0

    def validate(self) -> None:
        check_least(self, ranks=1, batch=1, tokens=max(2, 2 * self.ranks), timeout=1)
        if self.dtype not in _DTYPES:
            raise ConfigError("dtype", self.dtype, f"must be one of {', '.join(_DTYPES)}")


def main(arguments: list[str]) -> int:
    """Print a table of each case; returns 0, 1 if a result is wrong, others for errors."""
    return errors_in_a_line(_verify)(arguments)


def _verify(arguments: list[str]) -> int:
    if not arguments or {"-h", "--help"} & set(arguments):
        print(f"usage: {_USAGE}\n\n{describe_settings(ProofSettings)}")
        return 0
    command, *rest = arguments
    if command != "verify":
        raise ConfigError("command", command, f"must be verify: {_USAGE}")
    if not rest or "=" in rest[0]:
        raise ConfigError("FOLDER", rest[0] if rest else "", f"must be a folder with config.json: {_USAGE}")
    folder, settings = Path(rest[0]), load_settings(ProofSettings, rest[1:])
    has_weights = settings.weights
    if has_weights is None:
        has_weights = any((folder / name).exists() for name in (WEIGHTS_FILE, INDEX_FILE))
    # Neither code nor anything else from the network.
    os.environ["HF_HUB_OFFLINE"] = "1"
    name = _checked(folder)
    if has_weights:
        stored_weights(folder)
    make = partial(build, folder, settings.dtype, settings.seed, has_weights=has_weights)
    kinds = [False, True] if settings.documents is None else [settings.documents]
    weights = "its weights" if has_weights else "random weights"
    print(f"{name} with {weights}, {settings.ranks} ranks, {settings.tokens} tokens", flush=True)
    found = prove(
        make,
        ranks=settings.ranks,
        tokens=settings.tokens,
        batch=settings.batch,
        documents=kinds,
        seed=settings.seed,
        timeout=timedelta(seconds=settings.timeout),
    )
    problems: list[str] = []
    for has_documents, proof in zip(kinds, found, strict=True):
        print(f"\n{'packed documents' if has_documents else 'whole sequences'}\n{proof.table()}", flush=True)
        problems += proof.problems
    print("", *problems, "exact" if not problems else f"{len(problems)} problems", sep="\n", flush=True)
    return 1 if problems else 0


def build(folder: Path, dtype: str, seed: int, *, has_weights: bool) -> nn.Module:
    """The model of a folder on the CPU, by transformers' own class: the folder's code is never run.

    Raises AttachError if its weights are not those of its config.json.
    """
    _quiet()
    from transformers import AutoModelForCausalLM

    safe: dict[str, Any] = {"trust_remote_code": False, "dtype": _DTYPES[dtype]}
    if has_weights:
        # Otherwise transformers draws the numbers of what is missing, and says so in a warning.
        safe |= {"ignore_mismatched_sizes": True, "output_loading_info": True}
        loaded: Any = AutoModelForCausalLM.from_pretrained(folder, local_files_only=True, use_safetensors=True, **safe)
        model, found = loaded
        wrong = {name: f"has {name}, which {HF_CONFIG_FILE} does not describe" for name in found["unexpected_keys"]}
        wrong |= {name: f"{name} is missing, which {HF_CONFIG_FILE} asks for" for name in found["missing_keys"]}
        for name, stored, shape in found["mismatched_keys"]:
            wrong[name] = f"{name} has the shape {[*stored]}, {HF_CONFIG_FILE} asks for {[*shape]}"
        if wrong:
            raise AttachError(f"{folder}: {wrong[min(wrong)]}")
        return model
    torch.manual_seed(seed)
    return AutoModelForCausalLM.from_config(_config(folder), **safe)


def _quiet() -> None:
    # fla's kernels run on no CPU, and its import takes seconds.
    sys.modules.setdefault("fla", None)  # type: ignore[arg-type]
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()


def _config(folder: Path) -> Any:
    from transformers import AutoConfig

    return AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)


def _checked(folder: Path) -> str:
    """The name of the model's class; an error if transformers has none."""
    record = read_record(folder / HF_CONFIG_FILE)
    for part in (record, record.get("text_config")):
        layers = part.get("num_hidden_layers") if isinstance(part, dict) else None
        if isinstance(layers, int) and layers > _MOST_LAYERS:
            raise AttachError(f"{folder}: num_hidden_layers={layers} of {HF_CONFIG_FILE}: more than {_MOST_LAYERS:,}")
    _quiet()
    from transformers import AutoModelForCausalLM

    try:
        with torch.device("meta"):
            return type(AutoModelForCausalLM.from_config(_config(folder), trust_remote_code=False)).__name__
    except Exception as error:  # whatever a stranger's numbers bring about
        raise AttachError(f"{folder}: transformers has no model for it: {first_cause(error)}") from error
