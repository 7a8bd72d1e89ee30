"""Question: is what users and stored runs can name still there in another version, or has an entry where it went?
Command: python -m lab.campaigns.surface OLD [NEW]; COMMIT|FOLDER --out LIST[.xz] writes a list
Date: 2026-11-26, the commit before the redesign: results/surface_d2b9b8f.jsonl.xz
Answer: `surface_changes.toml` has what may be gone; anything else that is gone gives exit code 1, but for tests: of one
without an entry the history tells what became of it.

OLD and NEW are commits, folders with the sources, or written lists. A line is a kind, a name and its value. A version
is read through its command line, in forks of a process that imports nothing of this one, in 4 minutes of CPU time.
Columns of GPUs (memory_gb, mfu, hfu) are listed on a GPU only.
"""

from __future__ import annotations

import argparse
import functools
import importlib.util
import json
import lzma
import os
import re
import runpy
import signal
import subprocess
import sys
import tempfile
import tomllib
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any
from unittest import mock

from tests.support.commands import REPOSITORY

# (kind, name) → value.
Surface = dict[tuple[str, str], str]
CHANGES = Path(__file__).with_name("surface_changes.toml")
HYBRID = "model.attn.every=2"
SOFTMAX = ["model.attn.qk_norm=true", "model.attn.gate=true", "model.attn.norm_after=true"]
SOFTMAX += ["sp.attention=all_gather", "sp.attention=ulysses", "sp.attention=ring"]
SHORT = "train.steps=2 data.seq_len=64 data.global_batch=2 train.eval_sequences=1 train.log_every=1"
# Of the place where a version lies.
VOLATILE = re.compile(r"files\.[0-9a-f]{64}|environment\.(commit|dirty)")
TYPES = "the types of the keys:"
TOKENS = ["</s>", "<unk>", "a", "the", "of", "model"]


def fork(command: str, before: Callable[[], object] = bool, after: Callable[[], object] = bool, ranks: int = 1) -> str:
    """The output of a Python command, on each rank between two calls; raises RuntimeError if it fails."""
    with tempfile.TemporaryFile("w+") as output:
        children = []
        for rank in range(ranks):
            if (child := os.fork()) == 0:
                os.dup2(output.fileno(), 1)
                os.dup2(output.fileno(), 2)
                if ranks > 1:
                    launch = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks}
                    launch["MASTER_PORT"], os.environ["MASTER_ADDR"] = 20_000 + os.getppid() % 10_000, "127.0.0.1"
                    os.environ.update({name: str(value) for name, value in launch.items()})
                os._exit(_run(command.split(), before, after))
            children.append(child)
        failed = [code for child in children if (code := os.waitpid(child, 0)[1])]
        output.seek(0)
        text = output.read()
    if failed:
        raise RuntimeError(f"{command}:\n{text}")
    return text


def _run(words: list[str], before: Callable[[], object], after: Callable[[], object]) -> int:
    signal.alarm(300)
    try:
        before()
        # The second for a script that executes itself anew.
        sys.argv, sys.orig_argv = words[words[0] == "-m" :], [sys.executable, *words]
        try:
            if words[0] == "-m":
                runpy.run_module(words[1], run_name="__main__", alter_sys=True)
            else:
                runpy.run_path(words[0], run_name="__main__")
            code: object = 0
        except SystemExit as end:
            code = end.code
        after()
        sys.stdout.flush()
        return code if isinstance(code, int) else int(code is not None)
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        return 1


def commands() -> Iterator[tuple[str, str]]:
    """Each command with its help; a shell script's is its first comment."""
    for path in sorted(chain(Path("launch").rglob("*.sh"), Path("lab").rglob("*.sh"))):
        yield str(path), re.sub(r"(?m)^# ?", "", re.findall(r"\A(?:#.*\n)+", path.read_text())[0].partition("\n")[2])
    in_docs = {name for path in Path().rglob("*.md") for name in re.findall(r"-m (tests[.\w]+)", path.read_text())}
    for path in sorted([Path("train.py"), *Path().glob("[!.]*/**/*.py")]):
        text, module = path.read_text(), ".".join(path.with_suffix("").parts).removesuffix(".__main__")
        if re.search(r'^if __name__ == "__main__":', text, re.M) and (path.parts[0] != "tests" or module in in_docs):
            command = str(path) if path.parts[0] in ("launch", "train.py") else f"-m {module}"
            # The others do their work whatever is asked of them.
            helps = path.parts[0] not in ("tests", "lab") or re.search(r"argparse|CASE\.main", text)
            text = fork(f"{command} --help") if helps else ""
            # Since 0.3 a case's own help has all of its options.
            cases = re.findall(r"(?m)^Case (\w+) \(all of it", text)
            yield command, "\n".join(fork(f"{command} {case} --help") for case in cases) if cases else text


def options(text: str) -> Iterator[tuple[str, str]]:
    """The options in a help text: `--name METAVAR`, `key=default`, `VARIABLE`, each after the section that it is in."""
    section = ""
    for line in text.partition("command line sets them:")[0].splitlines():
        if heading := re.match(r"(?:Case (\w+)|([\w.]+)\.KEY=VALUE):$", line):
            section = f"{heading[1] or heading[2]} "
        elif option := re.match(r" {1,3}(?:([A-Z_]{3,})  |(--?[a-z][\w-]*(?:, --[\w-]+)*)|([\w.]+)=)(.*)", line):
            name = section + next(filter(None, option.groups()[:3]))
            # Behind two spaces is the meaning.
            yield name, option[4].partition("  ")[0].strip() if option[3] or option[2] else ""


def composed(overrides: str = "") -> dict[str, str]:
    """Each key of the configuration with its value and its type."""
    from omegaconf import OmegaConf

    text = fork(f"train.py {overrides} --help", after=_types)
    shown, types, *values = text.split(TYPES)
    typed = json.loads(types)
    # Until 0.3 the help text had the values, as YAML.
    written = shown.partition("command line sets them:")[2]
    found = flat(OmegaConf.to_container(OmegaConf.create(written)) if written else json.loads(values[0]))
    return {key: f"{json.dumps(value)} ({typed.get(key)})" for key, value in found}


def _types() -> None:
    """Print them from the schema of the configuration; before 0.3 it was a node of Hydra's store."""
    from hydra.core.config_store import ConfigStore

    from zeco_train.config import schema

    def types(node: Any, prefix: str = "") -> Iterator[tuple[str, str]]:
        for key in node:
            child = node._get_node(key)
            if hasattr(child, "keys"):
                yield from types(child, f"{prefix}{key}.")
            else:
                kind = child._metadata.ref_type
                yield f"{prefix}{key}", getattr(kind, "__name__", str(kind)) + ", null" * child._metadata.optional

    store, config = ConfigStore.instance(), None
    if "schema.yaml" in store.repo:
        node = store.load("schema.yaml").node
    else:
        config = schema._compose([text for text in sys.argv if "=" in text])[0]
        node = schema.defaults_of(type(config.model))
    print(TYPES, json.dumps(dict(types(node))))
    if config is not None:
        print(TYPES, json.dumps(schema.to_plain(config)))


def flat(value: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """The leaves of nested dictionaries with their dotted names."""
    if isinstance(value, dict) and value:
        for key, item in value.items():
            yield from flat(item, f"{prefix}.{key}" if prefix else str(key))
    else:
        yield prefix, value


def state(checkpoint: Path) -> Iterator[tuple[str, str]]:
    """The tensors in a checkpoint with their shapes and dtypes."""
    from torch.distributed.checkpoint import FileSystemReader
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata

    for name, entry in FileSystemReader(checkpoint).read_metadata().state_dict_metadata.items():
        if isinstance(entry, TensorStorageMetadata):
            yield name, f"{list(entry.size)} {entry.properties.dtype}"
        else:
            yield name, "object"


def contents(folder: Path) -> Iterator[tuple[str, str]]:
    """The files of a folder, with the fields of JSON and the names of weights in them."""
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        name = str(path.relative_to(folder))
        yield name, ""
        if path.suffix in (".json", ".jsonl") and "tokenizer" not in path.name:
            for line in path.read_text().splitlines() if path.suffix == ".jsonl" else [path.read_text()]:
                yield from ((f"{name} {key}", type(value).__name__) for key, value in flat(json.loads(line)))
        if path.suffix == ".safetensors":
            with path.open("rb") as file:
                header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
            yield from ((f"{name} {key}", f"{e['dtype']} {e['shape']}") for key, e in header.items() if "shape" in e)


def of_commands(folder: Path) -> Iterator[tuple[str, str, str]]:
    """Commands and their options."""
    for command, text in commands():
        yield "command", command, text
        yield from (("option", f"{command} {name}", value) for name, value in options(text))


def of_configuration(folder: Path) -> Iterator[tuple[str, str, str]]:
    """Keys, also those of each mixer, and what each file of `configs/` changes."""
    base = composed()
    yield from (("key", *item) for item in base.items())
    for path in sorted(path.relative_to("configs") for path in Path("configs").rglob("*/*.yaml")):
        yield "config file", str(path), ""
        if (group := path.parts[0]) != "recipes":
            changed = composed(f"{'+' * (group == 'experiment')}{group}={path.stem}").items() - base.items()
            yield from (("config file", f"{path} {key}", value) for key, value in changed)


def of_models(folder: Path) -> Iterator[tuple[str, str, str]]:
    """Names in checkpoints of every mixer, plain and hybrid; of two also those of the optimizer's state."""
    tiny = sorted(path.stem for path in Path("configs/model").glob("*_tiny.yaml"))
    models = [*tiny, *(f"{name} {HYBRID}" for name in tiny), *(f"gla_tiny {HYBRID} {more}" for more in SOFTMAX)]
    for number, model in enumerate(["gla_tiny optim=adamw", "gla_tiny optim=muon", *models]):
        run = folder / f"model-{number}"
        fork(f"train.py {SHORT} train.steps=1 model.num_layers=2 checkpoint.every=0 run_dir={run} model={model}")
        for name, value in state(next(run.glob("checkpoints/step_*"))):
            if name.startswith("model.") or "optim" in model:
                yield "state", f"{model}: {name}", value


def of_runs(folder: Path) -> Iterator[tuple[str, str, str]]:
    """Files, columns and fields of stores, a run and its export."""
    text, run = folder / "text.jsonl", folder / "run"
    text.write_text("".join(json.dumps({"text": f"the model of {number}"}) + "\n" for number in range(400)))
    _make_tokenizer(folder / "tokenizer")
    stores = [folder / "bytes", folder / "words"]
    for store, tokenizer in zip(stores, ("bytes", folder / "tokenizer"), strict=True):
        fork(f"-m data.prepare {text} --out {store} --tokenizer {tokenizer} --validation-fraction 0.2 --workers 1")
        yield from (("store", *item) for item in contents(store))
    mixture = f"data=mixture data.stores=[{{path:{stores[0]},weight:1}},{{path:{stores[0]},weight:2,name:again}}]"
    train = f"train.py {SHORT} run_dir={run} {mixture} train.eval_every=1"
    fork(f"{train} logger=tensorboard", ranks=2)
    columns = folder / "columns"
    # A learning rate for which it skips steps.
    fork(f"{train} logger=wandb train.steps=9 optim.lr=1e30 train.nonfinite=skip:9", before=lambda: _stand_in(columns))
    yield from (("wandb", name, "") for line in columns.read_text().splitlines() for name in json.loads(line))
    yield from (("tensorboard", name, "") for name in _tags(run / "tensorboard"))
    rows = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    yield from (("metric", name, type(value).__name__) for row in rows for name, value in row.items())
    shown = (item for item in contents(run) if not item[0].startswith(("wandb", "tensorboard", "metrics.jsonl ")))
    yield from (("run", *item) for item in shown)
    fork(f"-m zeco_train.export {run} {folder / 'export'}")
    yield from (("export", *item) for item in contents(folder / "export"))


def of_pages(folder: Path) -> Iterator[tuple[str, str, str]]:
    """Markdown files."""
    for path in sorted([*Path().glob("*.md"), *Path().glob("[!.]*/**/*.md")]):
        if path.parts[:2] != ("tests", "fixtures"):
            yield "page", str(path), ""


def of_tests(folder: Path) -> Iterator[tuple[str, str, str]]:
    """Test ids."""
    folders = " ".join(folder for folder in ("tests", "lab/campaigns/cases") if Path(folder).is_dir())
    lines = fork(f"-m pytest --collect-only -q -p no:cacheprovider {folders}").splitlines()
    yield from (("test", line, "") for line in lines if "::" in line)


# What lists the names of each kind.
PARTS: dict[str, Callable[[Path], Iterator[tuple[str, str, str]]]] = {
    part.__name__.removeprefix("of_"): part
    for part in (of_commands, of_configuration, of_models, of_runs, of_pages, of_tests)
}


def _make_tokenizer(folder: Path) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel({word: number for number, word in enumerate(TOKENS)}, "<unk>"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=words, eos_token="</s>", unk_token="<unk>").save_pretrained(folder)


def _stand_in(columns: Path) -> None:
    """In place of W&B: what the run sends goes to a file, each time one line of names."""
    spec = importlib.util.find_spec("wandb")
    wandb = sys.modules["wandb"] = mock.MagicMock(__spec__=spec, Error=OSError)
    wandb.errors.CommError = OSError
    run = wandb.init.return_value
    run.id = "id"

    def write(names: Any) -> Any:
        with columns.open("a") as file:
            file.write(json.dumps(sorted(names)) + "\n")
        return run

    run.log.side_effect = run.summary.update.side_effect = write
    wandb.init.side_effect = lambda **given: write([*given, *dict(flat(given["config"]))])


def _tags(folder: Path) -> list[str]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    tags = EventAccumulator(str(folder)).Reload().Tags()
    return [*tags["scalars"], *tags["tensors"]]


def read(source: str, parts: Sequence[str] = tuple(PARTS)) -> Surface:
    """The list of a commit or a folder, or a written one; a written one is whole whatever `parts` says."""
    path = Path(source)
    if path.is_file():
        text = lzma.decompress(path.read_bytes()).decode() if path.suffix == ".xz" else path.read_text()
        return {(kind, name): value for kind, name, value in map(json.loads, text.splitlines())}
    with tempfile.TemporaryDirectory(prefix="zeco-surface-") as folder:
        if not path.is_dir():
            path = Path(folder, "tree")
            path.mkdir()
            packed = subprocess.run(["git", "archive", source], check=True, capture_output=True).stdout
            subprocess.run(["tar", "-x", "-C", path], input=packed, check=True)
        home = {"HOME": folder, "TMPDIR": folder, "PYTHONPATH": str(path.resolve())}
        home |= {"COLUMNS": "120", "PYTHONWARNINGS": "ignore"}
        # Without `-P` the folder of this file would come first in its path.
        command = [sys.executable, "-P", str(Path(__file__).resolve()), "--walk", folder, *parts]
        text = subprocess.check_output(command, cwd=path, env={**os.environ, **home}, text=True)
        # `zeco_train.system.code_cache` prints a folder that belongs to the checkout.
        text = re.sub(r"\b[0-9a-f]{32}\b", "DIGEST", text)
        lines = text.replace(folder, "FOLDER").replace(str(path.resolve()), "TREE").splitlines()
        return {(kind, name): value for kind, name, value in map(json.loads, lines) if not VOLATILE.search(name)}


def moved(kind: str, name: str, changes: list[dict[str, str]]) -> tuple[str, str] | None:
    """The name that an entry gives to a name, "" if it was deleted, and the entry's reason; None without an entry."""
    for change in changes:
        was, now = change["was"], change.get("now", "")
        if change["kind"] == kind and (name == was or (was.endswith("*") and name.startswith(was[:-1]))):
            return now[:-1] + name[len(was) - 1 :] if now.endswith("*") else now, change["because"]
    return None


@dataclass(frozen=True)
class Fate:
    """What became of a name: the name now, "" if it is gone, and why; no reason: nothing explains it, or it is kept."""

    kind: str
    name: str
    now: str
    because: str = ""

    @property
    def is_explained(self) -> bool:
        return self.name == self.now or bool(self.because)


def by_history(fate: Fate, new: Surface) -> Fate:
    """The fate of a test id that no entry explains: other cases of its function, or the commit that removed that."""
    file, _, case = fate.name.partition("::")
    function = case.partition("[")[0]
    others = [name for kind, name in new if kind == "test" and name.partition("::")[2].partition("[")[0] == function]
    if others:
        # Of the same file, with the same parameters, if there is such a one.
        now = max(others, key=lambda name: (name.startswith(f"{file}::"), name.endswith(case)))
        return Fate(fate.kind, fate.name, now, "moved" if now.endswith(case) else "its parameters are others")
    return Fate(fate.kind, fate.name, "", removed_by(function))


@functools.cache
def removed_by(function: str) -> str:
    """Id and subject of the last commit that changed how often the tests define a function; "" if they still do."""
    defined = ["git", "grep", "-q", f"def {function}(", "HEAD", "--", "tests", "lab/campaigns/cases"]
    if subprocess.run(defined, cwd=REPOSITORY).returncode == 0:
        return ""
    last = ["git", "log", "--no-merges", "-1", "--format=%h %s", "-S", f"def {function}("]
    done = subprocess.run([*last, "--", "tests"], cwd=REPOSITORY, capture_output=True, text=True, check=True)
    return done.stdout.strip()


def _renumbered(old: Surface, new: Surface) -> dict[str, str]:
    """Test ids that differ by a place in a list only, by which pytest names values that have no name."""

    def by_words(names: Surface, others: Surface) -> dict[str, list[str]]:
        found: dict[str, list[str]] = {}
        for kind, name in names:
            if kind == "test" and (kind, name) not in others:
                found.setdefault(re.sub(r"(?<=[a-z])\d+(?=[-\]])", "", name), []).append(name)
        return found

    gone, added = by_words(old, new), by_words(new, old)
    pairs = ((names, added.get(words, [])) for words, names in gone.items())
    return {was: now for names, others in pairs for was, now in zip(names, others, strict=False)}


def fates(old: Surface, new: Surface, changes: list[dict[str, str]]) -> Iterator[Fate]:
    """What became of each name of the old list."""
    renumbered = _renumbered(old, new)
    for kind, name in old:
        if (kind, name) in new:
            yield Fate(kind, name, name)
        elif kind == "test" and name in renumbered:
            yield Fate(kind, name, renumbered[name], "its place in the list of cases")
        else:
            now, because = moved(kind, name, changes) or ("", "")
            # An entry is of no use if there is nothing of the name that it gives.
            fate = Fate(kind, name, now, because) if not now or (kind, now) in new else Fate(kind, name, "")
            yield by_history(fate, new) if kind == "test" and "::" in name and not fate.is_explained else fate


def compare(old: Surface, new: Surface, changes: list[dict[str, str]]) -> Iterator[tuple[str, str, str, bool]]:
    """Each difference: kind, `gone`, `changed` or `new`, the name, and whether an entry explains it."""
    reached = set()
    for fate in fates(old, new, changes):
        kind, now = fate.kind, fate.now
        if not now:
            yield kind, "gone", fate.name, fate.is_explained
            continue
        reached.add((kind, now))
        if (value := old[kind, fate.name]) != new[kind, now]:
            yield kind, "changed", f"{now}: {value[:200]!r} became {new[kind, now][:200]!r}", True
    yield from ((kind, "new", name, True) for kind, name in new if (kind, name) not in reached)


def entries() -> list[dict[str, str]]:
    """The entries of `surface_changes.toml`."""
    return list(tomllib.loads(CHANGES.read_text()).get("change", []))


def main(arguments: list[str] | None = None) -> int:
    """Write a list, or compare two; returns 1 if something is gone without an entry."""
    parser = argparse.ArgumentParser(description="list what users and stored runs can name, and compare two versions")
    parser.add_argument("old", metavar="COMMIT|FOLDER|LIST")
    parser.add_argument("new", metavar="COMMIT|FOLDER|LIST", nargs="?", default=str(Path(__file__).parents[2]))
    parser.add_argument("--out", type=Path, metavar="LIST", help="write the list of the first, and compare nothing")
    given = parser.parse_args(arguments)
    old = read(given.old)
    if given.out:
        text = "".join(json.dumps([*name, value], ensure_ascii=False) + "\n" for name, value in sorted(old.items()))
        given.out.write_bytes(lzma.compress(text.encode()) if given.out.suffix == ".xz" else text.encode())
        return 0
    found = sorted(compare(old, read(given.new), entries()))
    for kind, what, name, is_explained in found:
        print(f"{kind}: {what}{'' if is_explained else ' WITHOUT AN ENTRY'}: {name}")
    missing = sum(not is_explained for *_, is_explained in found)
    print(f"{len(old)} names; {len(found)} differences, {missing} gone without an entry")
    return 1 if missing else 0


if __name__ == "__main__":
    if sys.argv[1] == "--walk":
        runpy.run_path("train.py")
        for part in sys.argv[3:]:
            for item in PARTS[part](Path(sys.argv[2])):
                print(json.dumps(item, ensure_ascii=False), flush=True)
    else:
        sys.exit(main())
