"""Tokenizers: bytes, or any Hugging Face tokenizer, local or (during preparation only) from the hub.

Token stores, runs and exports may be untrusted, and a file in them may be a link to any file on this machine: loading
would read it, a run would copy it, and an export would publish it. So every file that transformers might open in such a
folder is checked before loading, and only known files are copied.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import stat
import sys
from collections.abc import Container, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from numpy.typing import NDArray

from zeco_train.errors import ConfigError, DataError, check_open_files
from zeco_train.system.files import read_errors
from zeco_train.system.paths import is_within, path_problem, shown
from zeco_train.system.small_files import LARGEST_BYTES, read_json, read_small
from zeco_train.system.terminal import visible

if TYPE_CHECKING:
    import tokenizers

BYTES = "bytes"
# Texts that tokenizers of different normalizers, pre-tokenizers or special tokens encode differently.
_PROBES = ("", "a", " Two  words, 1234 and 5.6\n\n\tx = y;\r\n ", "naïve ﬁ Ａ 日本語 e\u0301 👍🏽\u200d'll İ")
_BYTE = re.compile("<0x[0-9A-Fa-f]{2}>")
# A path has at most 4,096 bytes, the rest less than 200.
_INFO_CHARACTERS = 4500
# In a message.
_TOKENS_SHOWN = 8
_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*(/[\w.-]+)?")
# Subfolder of token stores and runs with the tokenizer's files.
TOKENIZER_FOLDER = "tokenizer"
TOKENIZER_CONFIG = "tokenizer_config.json"
TOKENIZER_FILE = "tokenizer.json"
# All vocabulary file names of transformers' tokenizers, slow and fast (their `vocab_files_names`), and of the formats
# it converts (tekken.json, tiktoken.model, tokenizer.tiktoken).
VOCABULARIES = frozenset(
    (
        *(TOKENIZER_FILE, "tokenizer.model", "tokenizer.tiktoken", "tiktoken.model", "tekken.json"),
        *("vocab.json", "vocab.txt", "merges.txt", "bpe.codes", "byte_maps.json", "prophetnet.tokenizer"),
        *("spiece.model", "sentencepiece.model", "sentencepiece.bpe.model", "spm.model", "spm_char.model"),
        *("source.spm", "target.spm", "target_vocab.json", "vocab-src.json", "vocab-tgt.json"),
        *("dict.txt", "emoji.json", "entity_vocab.json", "normalizer.json"),
        *("word_shape.json", "word_pronunciation.json"),
    )
)
_SETTINGS = frozenset((TOKENIZER_CONFIG, "special_tokens_map.json", "added_tokens.json", "chat_template.jinja"))
# A model's config; AutoTokenizer reads the tokenizer class from it if tokenizer_config.json does not name one.
_MODEL_CONFIG = "config.json"
_TEMPLATES = "additional_chat_templates"
# Other names that transformers finds by pattern or by argument name.
_FOUND_BY_PATTERN = re.compile(r".*tokenizer\..*json.*|.*(tokenizer|tiktoken)\.model.*|.*tekken\.json.*|\w+_file")
_LARGEST_FILE = 4 * LARGEST_BYTES
_FILE_REMEDY = "put the file itself there"


class Tokenizer(Protocol):
    """Converts text to ids."""

    vocab_size: int  # every id is below it
    eos_id: int  # ends every document
    open_ids: Container[int]  # those whose text may change with the ids after them, incomplete UTF-8 apart
    control_ids: Mapping[int, str]  # those that texts can be given and that do not stand for text, and their strings
    info: dict[str, str]  # in meta.json: `kind` ("bytes" or "huggingface"), of the latter `path` and `sha256`

    def encode(self, texts: Sequence[str], *, control: bool = False) -> list[NDArray[np.integer]]:
        """The ids of each text, [tokens], without an end-of-sequence id.

        With `control`, control strings such as "</s>" become their ids; by default they are text as any other.
        """

    def decode(self, ids: NDArray[np.integer]) -> str:
        """The text of `ids`."""

    def save(self, folder: Path) -> None:
        """Write the files that `load_tokenizer` needs into `folder`; none for bytes."""


class ByteTokenizer:
    """One token per UTF-8 byte, with the ids of `transformers.ByT5Tokenizer(extra_ids=0)`.

    Ids are byte + 3; 0 is padding, 1 is end of sequence, 2 is unknown and does not occur.
    """

    vocab_size = 259
    eos_id = 1
    unknown_id = 2
    open_ids: Container[int] = ()
    info = {"kind": BYTES}  # noqa: RUF012 - as in the protocol; never modified
    control_ids: Mapping[int, str] = {}
    offset = 3

    def encode(self, texts: Sequence[str], *, control: bool = False) -> list[NDArray[np.integer]]:
        """The ids of each text, [bytes] uint16; no text becomes a control id."""
        return [np.frombuffer(text.encode("utf-8"), np.uint8).astype(np.uint16) + self.offset for text in texts]

    def decode(self, ids: NDArray[np.integer]) -> str:
        """The text of `ids`; special ids are dropped, invalid UTF-8 becomes replacement characters."""
        values = ids[ids >= self.offset] - self.offset
        return values.astype(np.uint8).tobytes().decode("utf-8", errors="replace")

    def save(self, folder: Path) -> None:
        """Bytes need no files."""


def announce_hub(name: str) -> None:
    """Print that a name will be looked up on the hub, whose library prints nothing for up to a minute."""
    from huggingface_hub import constants  # with `datasets` or `transformers`, which the caller has imported

    if not (constants.HF_HUB_OFFLINE or Path(name).exists()):
        wait = "up to a minute if it cannot be reached; HF_HUB_OFFLINE=1 takes only what is on this machine"
        print(f"asking the Hugging Face hub for {visible(name)} ({wait})", file=sys.stderr, flush=True)


class HuggingFaceTokenizer:
    """A tokenizer of transformers, from a local folder or tokenizer.json, or by its hub name.

    Where there is a tokenizer.json, exactly that encodes and decodes: many classes of transformers build another
    normalizer or pre-tokenizer than the file's, and drop or add tokens.

    Args:
        name: the path or the hub name.
        local: do not access the hub: `name` is a path, or in the hub's local cache.
        remedy: advice in the message if it cannot be loaded.
        eos: end-of-document token, in place of the tokenizer's own.

    Raises:
        DataError: it cannot be loaded, or has no end-of-sequence token.
        ConfigError: it has no token `eos`.
    """

    def __init__(self, name: str, local: bool = True, remedy: str = "", eos: str | None = None) -> None:
        import huggingface_hub.utils
        import transformers
        from transformers import AutoTokenizer, PreTrainedTokenizerFast

        # Problems are reported as one-line DataErrors instead.
        transformers.utils.logging.set_verbosity(transformers.utils.logging.CRITICAL)
        huggingface_hub.utils.logging.set_verbosity(huggingface_hub.utils.logging.CRITICAL)
        if Path(name).exists():
            check_tokenizer(Path(name))
        if not local:
            announce_hub(name)
        with _failures(name, "transformers cannot load a tokenizer from it", remedy):
            # Without trust_remote_code=False, transformers asks on stdin whether to run the folder's code.
            self._loaded: Any
            if Path(name).is_file():
                self._loaded = PreTrainedTokenizerFast(tokenizer_file=name)
            else:
                self._loaded = AutoTokenizer.from_pretrained(name, local_files_only=local, trust_remote_code=False)
            self._backend = _backend(self._loaded, name)
            vocabulary: dict[str, int] = (self._loaded if self._backend is None else self._backend).get_vocab()
            added = [*self._loaded.added_tokens_decoder.values()]
            if self._backend is not None:
                added += self._backend.get_added_tokens_decoder().values()
            special = {str(token) for token in added if token.special} & vocabulary.keys()
        self._name_tokens(name, vocabulary, special, eos)
        eos = self._loaded.eos_token
        self.eos_id = vocabulary[eos]
        # Added tokens can leave gaps, so the largest id may exceed the number of tokens.
        self.vocab_size = max(len(vocabulary), max(vocabulary.values()) + 1)
        self.open_ids: Container[int] = ()
        # The unknown token stands for text.
        special -= {str(self._loaded.unk_token)}
        self.control_ids: Mapping[int, str] = {vocabulary[token]: token for token in sorted({*special, eos})}
        # Slow tokenizers have no backend to serialise; their vocabulary stands for them.
        contents = json.dumps(sorted(vocabulary.items()))
        if self._backend is not None:
            self.open_ids = _open_ids(_part(self._backend.decoder), vocabulary)
            contents = self._backend.to_str()
        digest = hashlib.sha256(contents.encode("utf-8", errors="surrogatepass")).hexdigest()
        place = str(Path(name).resolve()) if Path(name).exists() else name
        self.info = {"kind": "huggingface", "path": place, "sha256": digest}

    def _name_tokens(self, name: str, vocabulary: Mapping[str, int], special: set[str], eos: str | None) -> None:
        some = ", ".join(map(visible, sorted(special)[:_TOKENS_SHOWN])) or "none"
        if eos is not None:
            if eos not in vocabulary:
                raise ConfigError("--eos", eos, f"is no token of {visible(name)}; its control tokens: {some}")
            self._loaded.eos_token = eos
            if self._backend is not None and self._loaded.unk_token is None:
                # A tokenizer.json without settings beside it names no end token, but may name this one.
                self._loaded.unk_token = getattr(self._backend.model, "unk_token", None)
        own = self._loaded.eos_token
        if own is None or own not in vocabulary:
            problem = "no end-of-sequence token" if own is None else f"an end-of-sequence token without an id, {own!r}"
            remedy = "set eos_token in its tokenizer_config.json, or give data.prepare --eos TOKEN: every document ends"
            raise DataError(name, f"the tokenizer has {problem}", f"{remedy} with it; its control tokens: {some}")

    def encode(self, texts: Sequence[str], *, control: bool = False) -> list[NDArray[np.integer]]:
        """The ids of each text, [tokens] int64."""
        with _failures(self.info["path"], "this tokenizer cannot encode a text"):
            if self._backend is not None:
                self._backend.encode_special_tokens = not control
                encodings = self._backend.encode_batch_fast(list(texts), add_special_tokens=False)
                return [np.asarray(encoding.ids, dtype=np.int64) for encoding in encodings]
            # `verbose`: a document may be longer than the tokenizer's model allows, without a warning.
            options = {"add_special_tokens": False, "return_attention_mask": False, "verbose": False}
            options["split_special_tokens"] = not control
            return [np.asarray(ids, dtype=np.int64) for ids in self._loaded(list(texts), **options)["input_ids"]]

    def decode(self, ids: NDArray[np.integer]) -> str:
        """The text of `ids`, special tokens included."""
        with _failures(self.info["path"], "this tokenizer cannot decode its ids"):
            if self._backend is not None:
                return self._backend.decode(ids.tolist(), skip_special_tokens=False)
            # Clean-up would remove spaces before punctuation, which the text had.
            return str(self._loaded.decode(ids.tolist(), clean_up_tokenization_spaces=False))

    def save(self, folder: Path) -> None:
        """Write files from which transformers builds exactly this tokenizer: by default it adds no special tokens."""
        if self._backend is None:
            self._loaded.save_pretrained(folder)
            return
        from transformers import PreTrainedTokenizerFast

        vocabulary, found = self._backend.get_vocab(), self._loaded.special_tokens_map
        # Programs begin texts with a beginning-of-sequence token where there is one, which training never does.
        names = (name for name in self._loaded.SPECIAL_TOKENS_ATTRIBUTES if name != "bos_token")
        special = {name: found[name] for name in names if found.get(name) in vocabulary}
        of_any_class = PreTrainedTokenizerFast(
            tokenizer_object=self._backend,
            model_max_length=self._loaded.model_max_length,
            model_input_names=self._loaded.model_input_names,
            chat_template=self._loaded.chat_template,
            # As `encode` does by default.
            split_special_tokens=True,
            **special,
        )
        of_any_class.save_pretrained(folder)
        # It has written the file with a post-processor and marks of special tokens, which are in the settings as well.
        self._backend.save(str(folder / TOKENIZER_FILE))

    def is_built_from(self, folder: Path) -> bool:
        """Whether transformers builds this tokenizer from the files in a folder, and encodes alike by default.

        Raises DataError if it cannot load one.
        """
        from transformers import AutoTokenizer

        with _failures(str(folder), "transformers cannot load a tokenizer from it"):
            other: Any = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
            texts = [*_PROBES, " a".join(self.control_ids.values())]
            if [other(text)["input_ids"] for text in texts] != [ids.tolist() for ids in self.encode(texts)]:
                return False
            own, found = self._backend, getattr(other, "backend_tokenizer", None)
            if own is None or found is None:
                return own is found
            parts = ("normalizer", "pre_tokenizer", "model", "decoder")
            same = all(_part(getattr(own, name)) == _part(getattr(found, name)) for name in parts)
            return same and own.get_vocab() == found.get_vocab()


def _backend(loaded: Any, name: str) -> tokenizers.Tokenizer | None:
    # Of the `tokenizers` library, which adds, cuts and pads nothing; None for one written in Python.
    import tokenizers
    from transformers.utils import cached_file

    if Path(name).is_file():
        file: str | None = name
    else:
        # Loading has put the files into the hub's cache, this one for every class.
        file = cached_file(name, TOKENIZER_FILE, local_files_only=True, _raise_exceptions_for_missing_entries=False)
    backend = getattr(loaded, "backend_tokenizer", None) if file is None else tokenizers.Tokenizer.from_file(file)
    if backend is not None:
        backend.no_truncation()
        backend.no_padding()
        backend.post_processor = None
    return backend


def _part(part: Any) -> Any:
    return None if part is None else json.loads(part.__getstate__())


def _open_ids(decoder: Mapping[str, Any] | None, vocabulary: Mapping[str, int]) -> Container[int]:
    # The decoder as in tokenizer.json.
    joined, found = False, frozenset[int]()
    for step in _steps(decoder):
        kind = step["type"]
        if kind == "ByteFallback":
            # Bytes in a row are decoded together: as one text, or if that is no UTF-8, as a mark for each.
            found = frozenset(number for token, number in vocabulary.items() if _BYTE.fullmatch(token))
        # Once all text is joined, only steps that treat its characters one by one leave its beginning as it is.
        by_character = kind in ("Fuse", "Strip", "Metaspace") or len(step.get("pattern", {}).get("String", "")) == 1
        if joined and not by_character:
            return range(max(vocabulary.values(), default=-1) + 1)
        joined |= kind in ("Fuse", "ByteLevel")
    return found


def _steps(decoder: Mapping[str, Any] | None) -> Iterator[Mapping[str, Any]]:
    if decoder is not None and decoder["type"] == "Sequence":
        for part in decoder["decoders"]:
            yield from _steps(part)
    elif decoder is not None:
        yield decoder


@contextmanager
def _failures(name: str, problem: str, remedy: str = "") -> Iterator[None]:
    try:
        yield
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # a panic of the `tokenizers` library is not an Exception
        check_open_files(error)
        if "trust_remote_code" in str(error):
            remedy = "give a tokenizer that transformers has a class for"
            raise DataError(name, "the tokenizer needs code of its own, which is never run", remedy) from error
        reason = " ".join(str(error).split())[:200]
        raise DataError(name, f"{problem} ({reason})", remedy) from error


def load_tokenizer(name: str, download: bool = False, eos: str | None = None) -> Tokenizer:
    """The byte tokenizer for "bytes", else the Hugging Face tokenizer at a local path or with that hub name.

    A path names a folder or a tokenizer.json. Without `download`, a hub name must be in the local cache.
    `eos`: end-of-document token, in place of the tokenizer's own.

    Raises:
        DataError: no such path, not loadable by transformers, or a tokenizer without an end-of-sequence token.
        ConfigError: the tokenizer has no token `eos`, or is of bytes.
    """
    if name == BYTES:
        if eos is not None:
            raise ConfigError("--eos", eos, "would be ignored; documents of bytes end with an id of their own")
        return ByteTokenizer()
    if (problem := path_problem(name)) is not None:
        raise DataError(f"tokenizer {shown(name)!r}", problem)
    if Path(name).exists():
        return HuggingFaceTokenizer(name, eos=eos)
    remedy = "give the folder or file of a tokenizer on this machine, 'bytes', or a name on the hub"
    # What can only be a path on this machine is looked up nowhere else.
    is_path = name.endswith(".json") or (os.sep in name and Path(name).parent.is_dir())
    if is_path or not _HUB_NAME.fullmatch(name):
        raise DataError(name, "no such tokenizer", remedy)
    return HuggingFaceTokenizer(name, local=not download, remedy=remedy, eos=eos)


def info_problem(info: object) -> str | None:
    """Why a stranger's value cannot be `Tokenizer.info`; None if it can."""
    if not isinstance(info, dict) or not all(isinstance(text, str) for text in (*info, *info.values())):
        return f"{info!r:.80} is not a mapping of texts"
    size = sum(len(text) for text in (*info, *info.values()))
    return f"has {size:,} characters, at most {_INFO_CHARACTERS:,}" if size > _INFO_CHARACTERS else None


def tokenizer_name(info: Mapping[str, str], *folders: Path) -> str:
    """The argument of `load_tokenizer`: the tokenizer's folder in the first of `folders`, else its original path."""
    if info.get("kind") == BYTES:
        return BYTES
    own = tokenizer_files(*folders)
    return str(own) if own else info.get("path", "")


def same_tokenizer(
    one: tuple[Mapping[str, str], Sequence[Path]], other: tuple[Mapping[str, str], Sequence[Path]]
) -> bool:
    """Whether tokenizers have equal digests, given `info` of each and the stores or runs that may hold its files.

    Where the recorded ones differ, digests of their files are compared: version 0.2 computed them in another way.

    Raises:
        DataError: the files of one cannot be loaded.
    """
    infos = [comparable(info) for info, _ in (one, other)]
    if infos[0] == infos[1] or {"kind": BYTES} in infos:
        return infos[0] == infos[1]
    files = [tokenizer_files(*folders) for _, folders in (one, other)]
    for place, folder in enumerate(files):
        if folder is not None:
            infos[place] = comparable(load_tokenizer(str(folder)).info)
    return infos[0] == infos[1]


def comparable(value: Any) -> Any:
    """A tokenizer's `info` without its path, since its digest identifies it; other values as they are."""
    return {key: part for key, part in value.items() if key != "path"} if isinstance(value, dict) else value


def tokenizer_files(*folders: Path) -> Path | None:
    """The tokenizer's files in the first of `folders`, stores or runs, that has them.

    Raises DataError for a subfolder that is a link out of its folder.
    """
    for folder in folders:
        path = folder / TOKENIZER_FOLDER
        if path.is_symlink() and not _real(path).is_relative_to(_real(folder)):
            raise DataError(path, "is a link to another place; it is not followed", "put the folder itself there")
        if path.is_dir():
            return path
    return None


def check_tokenizer(path: Path) -> None:
    """Check every file that transformers may open in a folder, so that loading reads nothing outside of it.

    Links into the hub's cache are allowed if `path` is a snapshot of that cache, where all files are such links. Of a
    single file only type and size are checked.

    Raises:
        DataError: names a file that is not a regular file of this folder, is too large, or refers to other files.
    """
    if not path.is_dir():
        _check_file(path, _real(path).parent)
        return
    for name in _entries(path):
        if _is_known(name) or name == _MODEL_CONFIG or _FOUND_BY_PATTERN.fullmatch(name):
            _check_file(path / name, _real(path))
    _check_settings(path / TOKENIZER_CONFIG)


def copy_tokenizer(folder: Path, to: Path, model_config: bool = False) -> None:
    """Copy only a tokenizer's files, checked first, to an existing folder; links become files.

    With `model_config` also config.json. Raises DataError as `check_tokenizer`, OSError for a file that cannot be
    written.
    """
    check_tokenizer(folder)
    for name in _entries(folder):
        if _is_known(name) or (model_config and name == _MODEL_CONFIG):
            with read_errors(folder / name):
                contents = read_small(folder / name, _LARGEST_FILE)
            (to / name).parent.mkdir(exist_ok=True)
            (to / name).write_bytes(contents)


def _is_known(name: str) -> bool:
    parent, _, file = name.rpartition("/")
    return file.endswith(".jinja") if parent == _TEMPLATES else name in _SETTINGS | VOCABULARIES


def _entries(folder: Path) -> Iterator[str]:
    for part in ("", _TEMPLATES):
        names = []
        with read_errors(folder / part), contextlib.suppress(FileNotFoundError, NotADirectoryError):
            names = sorted(os.listdir(folder / part))  # noqa: PTH208 - names are wanted, not paths
        yield from (f"{part}/{name}" if part else name for name in names)


def _check_file(path: Path, root: Path) -> None:
    # A regular file in `root` (a resolved path), or in the hub cache of `root`.
    real = _real(path)
    if not is_within(real, root):
        raise DataError(path, "is a link out of its folder; it is not followed", _FILE_REMEDY)
    with read_errors(path):
        if not real.exists():
            raise DataError(path, "is a link to a file that is not there", _FILE_REMEDY)
        status = real.stat()
    if not stat.S_ISREG(status.st_mode):
        raise DataError(path, "is not a regular file", _FILE_REMEDY)
    if status.st_size > _LARGEST_FILE:
        problem = f"has {status.st_size:,} bytes; files of a tokenizer have at most {_LARGEST_FILE:,}"
        raise DataError(path, problem, "give another tokenizer")


def _check_settings(path: Path) -> None:
    # No settings that make transformers open files by other names, inside or outside the folder.
    try:
        with read_errors(path):
            if not path.exists():
                return
            settings: Any = read_json(path)
    except ValueError as error:
        raise DataError(path, f"cannot be read ({error})") from error
    if not isinstance(settings, dict):
        raise DataError(path, "cannot be read (not a JSON object)")
    names = settings.get("fast_tokenizer_files") or []
    if not isinstance(names, list) or not all(isinstance(name, str) and "/" not in name for name in names):
        raise DataError(path, "fast_tokenizer_files may only name files beside it", "remove the entry")
    for key in ("init_inputs", "gguf_file"):
        if settings.get(key):
            raise DataError(path, f"{key} names files to read, which is not allowed here", "remove the entry")


def _real(path: Path) -> Path:
    try:
        return path.resolve()
    except (OSError, RuntimeError) as error:
        raise DataError(path, "is a link that leads back to itself", _FILE_REMEDY) from error
