"""`python -m zeco_train.export RUN OUT`: export a trained model as a folder for Hugging Face's libraries.

Runs in one CPU process, whatever the model was trained on, with the memory of two weight files. The folder is fsynced
and then renamed into place; it contains no code, so trust_remote_code is not needed.
"""

from __future__ import annotations

from zeco_train.system.signals import run_command

if __name__ == "__main__":
    run_command("zeco_train.export")

import dataclasses
import json
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch

from data.config import DataConfig, DataKind
from data.tokenizer import ByteTokenizer
from models.attn import AttnShape
from models.config import LanguageModelConfig
from models.formats.format import ModelFormat
from models.spec import spec_of
from zeco_train.checkpoint.files import HF_CONFIG_FILE, Progress, is_hf_folder, read_progress, write_checksums
from zeco_train.checkpoint.weights import problem_of
from zeco_train.config.help import describe_settings
from zeco_train.config.overrides import load_settings
from zeco_train.config.schema import Config, to_plain
from zeco_train.errors import CheckpointError, ConfigError
from zeco_train.hf.config_json import from_config_json, to_config_json
from zeco_train.hf.folder import EXPORT_FORMAT, ORIGIN_FILE, checked_model, write_tokenizer
from zeco_train.hf.trained import Trained, find_trained
from zeco_train.hf.weights import stored_dtype, write_weights
from zeco_train.system.command import errors_in_a_line
from zeco_train.system.files import METRICS_FILE, atomic_folder, sha256_of, write_durably
from zeco_train.system.numbers import check_least, compact
from zeco_train.system.paths import check_output_folder, is_utf8
from zeco_train.system.terminal import visible
from zeco_train.tracking.metrics import read_metrics
from zeco_train.training.config import Dtype
from zeco_train.version import __version__

_USAGE = "python -m zeco_train.export RUN OUT [KEY=VALUE ...]"
# The byte tokenizer's <pad>.
_PAD_OF_BYTES = 0


@dataclass
class ExportSettings:
    """Settings of an export.

    Attributes:
        shard_mb: maximum size of a weight file, in MB; memory is about twice that, since each file is read back.
        dtype: of the weights in the files; null: that of the checkpoint, bit for bit.
        model_type: class to export to, as in config.json; null: the first that can express the model, fla's first.
    """

    shard_mb: int = 1000
    dtype: Dtype | None = None
    model_type: str | None = None

    def validate(self) -> None:
        check_least(self, shard_mb=1)


@errors_in_a_line
def main(arguments: Sequence[str]) -> int:
    """Export; returns the process's exit code."""
    if {"-h", "--help"} & set(arguments):
        print(f"usage: {_USAGE}\n\nRUN: a run's folder, or one of its checkpoints. OUT: a new folder.\n")
        print(describe_settings(ExportSettings))
        return 0
    # A name may have a =, but a forgotten OUT does not make a folder of a setting.
    settings_names = {entry.name for entry in fields(ExportSettings)}
    if len(arguments) < 2 or {name.partition("=")[0] for name in arguments[:2] if "=" in name} & settings_names:
        raise ConfigError("arguments", " ".join(arguments), f"must be: {_USAGE}")
    settings = load_settings(ExportSettings, arguments[2:])
    print(visible(export(arguments[0], Path(arguments[1]), settings)))
    print(visible(f"how to load it: {Path(arguments[1]) / 'README.md'}"))
    return 0


def export(run: str, out: Path, settings: ExportSettings) -> str:
    """Write a trained model to `out`; returns a one-line summary.

    Raises:
        ZecoError: there is no such model, it is damaged, fla's configuration cannot express it, or `out` exists or
            cannot be written.
    """
    trained = find_trained(run)
    if is_hf_folder(trained.path):
        raise ConfigError("RUN", run, "is an export already; copy it")
    assert trained.config is not None
    check_output_folder("OUT", out)
    if not is_utf8(str(out)):
        raise ConfigError("OUT", out, "has bytes that are no UTF-8, as names of safetensors files must be")
    if out.exists():
        raise ConfigError("OUT", out, "exists; name a new folder, or move that one away")
    if (problem := problem_of(trained.path)) is not None:
        raise CheckpointError(f"{trained.path}: damaged: {problem}; name another checkpoint")
    stored = stored_dtype(trained.path, trained.model)
    dtype = stored if settings.dtype is None else settings.dtype.compute
    # Run all checks before anything is written.
    record = _config_record(trained, trained.config, dtype, settings.model_type)
    with atomic_folder(out, remedy="name another OUT") as folder:
        num_bytes = spec_of(trained.model).num_parameters * dtype.itemsize
        if (free := shutil.disk_usage(folder).free) < num_bytes:
            sizes = f"{num_bytes / 1e9:.3g} GB of weights, {free / 1e9:.3g} GB are free there"
            raise ConfigError("OUT", out, sizes)
        count, written = _fill(folder, trained, trained.config, record, dtype, settings.shard_mb * 10**6)
    files = "1 file" if count == 1 else f"{count} files"
    parameters = compact(spec_of(trained.model).num_parameters)
    size = f"{parameters} parameters, {_name(dtype)}, {written / 1e6:,.1f} MB in {files}"
    return f"{out}: step {trained.step} of {trained.config.name}, {size}"


def _config_record(trained: Trained, config: Config, dtype: torch.dtype, model_type: str | None) -> dict[str, Any]:
    pad_id = _PAD_OF_BYTES if isinstance(trained.tokenizer, ByteTokenizer) else None
    record = to_config_json(trained.model, trained.tokenizer, pad_id, config.data.seq_len, _name(dtype), model_type)
    if trained.tokenizer.vocab_size > trained.model.vocab_size:
        sizes = f"the run's tokenizer has {trained.tokenizer.vocab_size} ids"
        raise ConfigError("model.vocab_size", trained.model.vocab_size, f"{sizes}, which is not the one it began with")
    return record


def _fill(
    folder: Path, trained: Trained, config: Config, record: dict[str, Any], dtype: torch.dtype, file_bytes: int
) -> tuple[int, int]:
    written_model = from_config_json(record, folder)
    write_durably(folder / HF_CONFIG_FILE, _json(record))
    ids = {key: record[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id") if record[key] is not None}
    write_durably(folder / "generation_config.json", _json({**ids, "use_cache": True}))
    write_tokenizer(trained.tokenizer, folder)
    progress, run_dir = read_progress(trained.path), trained.path.parent.parent
    origin = {
        "format": EXPORT_FORMAT,
        "version": __version__,
        "step": progress.step,
        "sequences": progress.sequences,
        "tokens": progress.tokens,
        "dtype": _name(dtype),
        "tokenizer": dict(trained.tokenizer_info),
        "config": to_plain(config),
    }
    write_durably(folder / ORIGIN_FILE, _json(origin))
    losses = last_losses(run_dir, progress.step)
    write_durably(folder / "README.md", model_card(config, written_model.format, progress, losses, origin))
    files, num_bytes = write_weights(trained.path, written_model, folder, dtype, file_bytes)
    found, wanted = dataclasses.replace(checked_model(folder).model, name=trained.model.name), trained.model.canonical()
    # A failure is a bug in this package.
    assert found == wanted, (found, wanted)
    # Checksums of the weights only: other files are small, checked on reading, and may be edited by users.
    weights = [folder / name for name in files]
    write_checksums(folder, {path.name: (path.stat().st_size, sha256_of(path)) for path in weights})
    return len(files), num_bytes


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _json(record: dict[str, Any]) -> str:
    return json.dumps(record, indent=2) + "\n"


# --- the model card: the model, its training, and its use ---

_OF_FLA = """# Needs a GPU, since fla computes with Triton, and:
# pip install flash-linear-attention==0.6.0 'transformers<5.24'{packages} (5.24 would generate without states)
import fla  # tells transformers what a {name} model is
from transformers import AutoModelForCausalLM, AutoTokenizer

device = "cuda"
"""
_OF_TRANSFORMERS = """import sys

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

device = "cuda" if torch.cuda.is_available() else "cpu"
if device == "cpu":
    # Kernels of these packages need a GPU, and transformers takes them wherever they are installed.
    sys.modules.update(dict.fromkeys(("fla", "causal_conv1d", "mamba_ssm")))
"""
_USE = """```python
{beginning}path = "PATH"  # of this folder
tokenizer = AutoTokenizer.from_pretrained(path)
model = AutoModelForCausalLM.from_pretrained(path, dtype="auto").to(device)
prompt = tokenizer("Once", return_tensors="pt").to(device)
print(tokenizer.decode(model.generate(**prompt, max_new_tokens=100)[0]))
```

The tokenizer adds no special tokens to a text, and has none that begins one: training had none, either.

With ZeCO-Train, also without a GPU: `python -m zeco_train.generate PATH --prompt Once`, and to train on:
`checkpoint.load=hf:PATH`."""


def model_card(
    config: Config, form: ModelFormat, progress: Progress, losses: Mapping[str, float], origin: Mapping[str, Any]
) -> str:
    """The text of README.md of an export whose ORIGIN_FILE is `origin`; for the losses see `last_losses`."""
    model, data = config.model, config.data
    rows = {
        "parameters": f"{spec_of(model).num_parameters:,}",
        "layers, width": f"{model.num_layers}, {model.hidden_size}",
        **model.describe(),
        **_softmax(model),
        "vocabulary": f"{model.vocab_size:,}, tokenizer: {origin['tokenizer'].get('kind', 'unknown')}",
        "weights": origin["dtype"],
        "trained for": f"{progress.step:,} steps, {progress.tokens:,} tokens, seed {config.seed}",
        "sequences": f"{data.seq_len:,} tokens, {data.global_batch} a step",
        "data": _data(data),
        "compute": f"{config.train.dtype.value}, sp={config.sp.backend.value}, {config.parallel.strategy.value}",
        "optimizer": f"learning rate {config.optim.lr:g}, weight decay {config.optim.weight_decay:g}",
        **{name: f"{value:.4f} nats a token" for name, value in losses.items()},
    }
    beginning = _OF_TRANSFORMERS
    if form.library == "fla":
        packages = " flash-attn" if model.attn.chosen(model.num_layers) else ""
        beginning = _OF_FLA.format(name=form.name, packages=packages)
    use, remark = _USE.format(beginning=beginning), f"{form.remark(model)}\n\n" if form.remark(model) else ""
    table = "\n".join(f"| {name} | {value} |" for name, value in rows.items())
    return (
        "---\nlibrary_name: transformers\npipeline_tag: text-generation\ntags:\n"
        f"- {form.model_type}\n- linear-attention\n---\n\n"
        f"# {config.name}, step {progress.step}\n\n"
        f"A language model with {form.title or form.mixer.title}, trained with ZeCO-Train "
        f"{origin['version']}. {_memory(model)}, but it was trained on {data.seq_len:,} tokens at once.\n\n"
        f"| | |\n|---|---|\n{table}\n\n## Use\n\n{use}\n\n{remark}"
        "The run's whole configuration is in `zeco_train.json`, and `checksums.json` has digests of the weights.\n"
    )


def _softmax(model: LanguageModelConfig) -> dict[str, str]:
    attn = model.canonical().attn
    if attn.layers is None:
        return {}
    shape = AttnShape.of(attn, model.num_heads, model.hidden_size)
    heads = f"{shape.heads} heads of {shape.head_dim}, {shape.key_heads} of keys and values"
    window = "" if attn.window is None else f", window of {attn.window:,} tokens"
    return {"softmax attention": f"layers {', '.join(map(str, attn.layers))}, counted from 0: {heads}{window}"}


def _memory(model: LanguageModelConfig) -> str:
    if not model.attn.chosen(model.num_layers):
        return "Its memory is a state of one size: no sequence is too long for it"
    kept = "all tokens before" if model.attn.window is None else f"the last {model.attn.window:,} tokens"
    return f"Its memory is a state of one size in most layers, and keys and values of {kept} in softmax layers"


def last_losses(run_dir: Path, step: int) -> dict[str, float]:
    """The last training loss and the last validation loss logged up to `step`; `DataError` for damaged metrics."""
    rows = [row for row in read_metrics(run_dir / METRICS_FILE) if row["step"] <= step]
    found = {}
    for key, name in (("loss", "training loss"), ("val_loss", "validation loss")):
        values = [row for row in rows if row.get(key) is not None]
        if values:
            found[f"{name} at step {values[-1]['step']:,}"] = float(values[-1][key])
    return found


def _data(data: DataConfig) -> str:
    match data.kind:
        case DataKind.embedded:
            return "the sources of Python's standard library"
        case DataKind.tokens:
            return f"`{Path(data.path or '').name}`"
        case DataKind.mixture:
            return ", ".join(f"`{Path(store.path).name}` (weight {store.weight:g})" for store in data.stores)
        case DataKind.synthetic:
            return f"a synthetic task, {data.synthetic.task.value}"
