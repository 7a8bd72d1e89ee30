"""The model card of an export: the model, its training, and its use."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from data.config import DataConfig, DataKind
from models.attn import AttnShape
from models.config import LanguageModelConfig
from models.formats.format import ModelFormat
from models.spec import spec_of
from zeco_train.checkpoint.files import Progress
from zeco_train.config.schema import Config
from zeco_train.system.files import METRICS_FILE
from zeco_train.tracking.metrics import read_metrics

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
