"""`python -m zeco_train.hf.parity EXPORT`: compare an export in its library's model with this package's model.

Compares the logits of one sequence in fp32 and bf16, each also against this package's in fp64, and the texts that both
generate with the same seed, theirs through transformers. fla's models use Triton and so need a GPU; their fp32 matmuls
use tf32 unless TRITON_F32_DEFAULT=ieee is set, and the error of tf32 exceeds the tolerance here.
"""

from __future__ import annotations

from zeco_train.system.signals import run_command

if __name__ == "__main__":
    run_command("zeco_train.hf.parity")

import importlib.util
import inspect
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from zeco_train.checkpoint.files import is_hf_folder
from zeco_train.config.help import describe_settings
from zeco_train.config.overrides import load_settings
from zeco_train.distributed.mesh import ProcessMesh, init_mesh, pick_device
from zeco_train.errors import ConfigError
from zeco_train.generate.generator import Generator, Limits
from zeco_train.generate.prefill import whole_logits
from zeco_train.generate.sampling import Sampling
from zeco_train.hf.folder import checked_model
from zeco_train.hf.trained import Trained, find_trained, load_trained
from zeco_train.lifecycle.join import Launch
from zeco_train.sp.exchange import local_exchange
from zeco_train.system.command import errors_in_a_line
from zeco_train.system.numbers import check_least, relative_error
from zeco_train.training.config import Dtype

_USAGE = "python -m zeco_train.hf.parity EXPORT [KEY=VALUE ...]"
# Tolerance for the relative error (2-norms) between the two models' logits.
ALLOWED = {Dtype.fp32: 1e-4, Dtype.bf16: 1e-2}


@dataclass
class ParitySettings:
    """Settings of a comparison.

    Attributes:
        tokens: length of the sequence whose logits are compared.
        prompt_tokens: tokens of it used as the prompt of the texts.
        new_tokens: tokens generated per text.
        seed: of the sequence, and of sampling.
    """

    tokens: int = 4096
    prompt_tokens: int = 32
    new_tokens: int = 64
    seed: int = 0

    def validate(self) -> None:
        check_least(self, tokens=1, prompt_tokens=1, new_tokens=1)
        if self.prompt_tokens > self.tokens:
            raise ConfigError("prompt_tokens", self.prompt_tokens, f"must be ≤ tokens={self.tokens}")


@dataclass(frozen=True)
class Parity:
    """Comparison of the two models in one dtype."""

    dtype: Dtype
    error: float  # relative error between the logits, ‖ours − theirs‖ / ‖theirs‖
    ours: float  # relative error of each against our logits in fp64
    theirs: float
    # By kind of text (greedy, drawn): number of equal tokens before the first difference, and total.
    same: dict[str, tuple[int, int]]

    @property
    def passes(self) -> bool:
        """Whether the error between the logits is within the tolerance; texts are only reported."""
        return self.error <= ALLOWED[self.dtype]


def check_states_are_passed(model: Any) -> None:
    """Raise `ConfigError` if transformers' `generate` passes states by an argument that this model does not have."""
    import transformers

    asked = inspect.signature(transformers.GenerationMixin.prepare_inputs_for_generation).parameters
    if "cache" in asked and "cache" not in inspect.signature(model.forward).parameters:
        needed = f"passes states as `cache`, which {type(model).__name__} does not take: install transformers<5.24"
        raise ConfigError("transformers", transformers.__version__, needed)


def compare(
    trained: Trained, mesh: ProcessMesh, settings: ParitySettings, dtypes: Sequence[Dtype] = tuple(ALLOWED)
) -> Iterator[Parity]:
    """Compare both models, of an export, in each dtype, on one rank; those of fla need a GPU.

    Raises:
        ConfigError: the model would generate without its states with this transformers.
    """
    from transformers import AutoModelForCausalLM

    if checked_model(trained.path).format.library == "fla":
        import fla  # noqa: F401 - registers its models with transformers

    draw = torch.Generator().manual_seed(settings.seed)
    # Skip the lowest ids, special tokens in most vocabularies.
    first, vocabulary = min(3, trained.model.vocab_size - 1), trained.model.vocab_size
    ids = torch.randint(first, vocabulary, (settings.tokens,), generator=draw)
    sequence = ids[None].to(mesh.device)
    exact = whole_logits(load_trained(trained, mesh, dtype=Dtype.fp64, strategy=None), sequence)[0]
    for dtype in dtypes:
        theirs: Any = AutoModelForCausalLM.from_pretrained(trained.path, dtype=dtype.compute)
        theirs = theirs.to(mesh.device).eval()
        check_states_are_passed(theirs)
        ours = load_trained(trained, mesh, dtype=dtype, strategy=None)
        with torch.no_grad():
            expected = theirs(sequence, use_cache=False).logits[0].double()
        logits = whole_logits(ours, sequence)[0].double()
        generator = Generator(ours, trained.tokenizer, mesh, local_exchange())
        prompt = ids[: settings.prompt_tokens]
        same = {
            name: _same(generator, theirs, prompt, Sampling(temperature=temperature, seed=settings.seed), settings)
            for name, temperature in (("greedy", 0.0), ("drawn", 1.0))
        }
        yield Parity(
            dtype,
            error=relative_error(logits, expected),
            ours=relative_error(logits, exact),
            theirs=relative_error(expected, exact),
            same=same,
        )
        # Before the next dtype's models are loaded.
        del ours, theirs, generator


HEADER = "dtype   ours − theirs   allowed   ours − fp64   theirs − fp64   same greedy   same drawn"


def line(row: Parity) -> str:
    """Format a comparison as a line below `HEADER`."""
    counts = "   ".join(f"{equal:>4} of {total:<4}" for equal, total in row.same.values())
    figures = f"{row.error:13.2e}   {ALLOWED[row.dtype]:7.0e}   {row.ours:11.2e}   {row.theirs:13.2e}"
    return f"{row.dtype.value:5}   {figures}   {counts}   {'ok' if row.passes else 'TOO FAR APART'}"


@errors_in_a_line
def main(arguments: Sequence[str]) -> int:
    """Compare; returns the process's exit code, 1 if an error exceeds its tolerance."""
    if {"-h", "--help"} & set(arguments):
        print(f"usage: {_USAGE}\n\n{describe_settings(ParitySettings)}")
        return 0
    if not arguments or "=" in arguments[0]:
        raise ConfigError("arguments", " ".join(arguments), f"must be: {_USAGE}")
    settings = load_settings(ParitySettings, arguments[1:])
    trained = find_trained(arguments[0])
    if not is_hf_folder(trained.path):
        raise ConfigError("EXPORT", arguments[0], "is none; make one with: python -m zeco_train.export RUN OUT")
    is_of_fla = checked_model(trained.path).format.library == "fla"
    has_softmax = bool(trained.model.attn.chosen(trained.model.num_layers))
    if is_of_fla and has_softmax and importlib.util.find_spec("flash_attn") is None:
        raise ConfigError("EXPORT", arguments[0], "fla's softmax layers need the package flash-attn, which is missing")
    device = pick_device("auto")
    if is_of_fla and device.type == "cpu":
        raise ConfigError("device", "cpu", "fla's model computes with Triton and needs a GPU")
    if device.type == "cpu":
        # transformers takes the kernels of these packages, which need a GPU, wherever they are installed.
        for name in ("fla", "causal_conv1d", "mamba_ssm"):
            sys.modules[name] = None  # type: ignore[assignment]
    mesh = init_mesh(Launch.from_environment(), 1, device, timedelta(minutes=5))
    print(HEADER, flush=True)
    all_pass = True
    for row in compare(trained, mesh, settings):
        # Flush each line: fla tunes its kernels for minutes per dtype.
        print(line(row), flush=True)
        all_pass &= row.passes
    dist.destroy_process_group()
    return 0 if all_pass else 1


def _same(
    generator: Generator, theirs: Any, prompt: Tensor, sampling: Sampling, settings: ParitySettings
) -> tuple[int, int]:
    limits = Limits(max_tokens=settings.new_tokens, at_eos=False)
    own = generator.generate([prompt], sampling, limits)[0].tokens
    options: dict[str, Any] = {"do_sample": False}
    if sampling.temperature:
        options = {"do_sample": True, "temperature": sampling.temperature, "top_k": 0, "top_p": 1.0}
    torch.manual_seed(sampling.seed)
    row = prompt[None].to(theirs.device)
    text = theirs.generate(
        row,
        attention_mask=torch.ones_like(row),
        max_new_tokens=settings.new_tokens,
        # Both sides generate the same number of tokens, so that they can be compared one by one.
        min_new_tokens=settings.new_tokens,
        eos_token_id=None,
        **options,
    )
    other = text[0, len(prompt) :].tolist()
    equal = next((i for i, (a, b) in enumerate(zip(own, other, strict=True)) if a != b), len(other))
    return equal, len(other)
