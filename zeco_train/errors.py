"""User-facing errors. Each is one line; `train.py` prints it from one rank and exits with a code ≠ 0."""

from __future__ import annotations

import errno
import resource
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from zeco_train.system.terminal import visible


class ZecoError(Exception):
    """Base class of user-facing errors. `exit_code` is the process's exit code."""

    exit_code = 1

    @property
    def line(self) -> str:
        """The message as printed for the user, on one line."""
        return "error: " + visible(" ".join(str(self).split()))

    def __reduce__(self) -> tuple[Callable[..., ZecoError], tuple[object, ...]]:
        # Ranks exchange errors by pickle, which would call the constructor with only the finished message.
        return _restore, (type(self), str(self), self.__dict__)


def _restore(kind: type[ZecoError], message: str, attributes: dict[str, object]) -> ZecoError:
    error = kind.__new__(kind, message)
    error.__dict__.update(attributes)
    return error


@contextmanager
def system_errors(explain: Callable[[str], ZecoError]) -> Iterator[None]:
    """Convert an `OSError` in the block to the `ZecoError` that `explain` builds from the system's reason."""
    try:
        yield
    except OSError as error:
        check_open_files(error)
        raise explain(error.strerror or str(error)) from error


def check_open_files(error: BaseException) -> None:
    """Raise `OpenFilesError` for an error that blames a limit of open files, not the file."""
    if (limit := open_files_error(error)) is not None:
        raise limit from error


def open_files_error(error: BaseException) -> OpenFilesError | None:
    """The error of a limit of open files, if `error` is one."""

    def is_of(number: int) -> bool:
        # Libraries in Rust give the number in the text.
        return (isinstance(error, OSError) and error.errno == number) or f"(os error {number})" in str(error)

    if is_of(errno.EMFILE):
        allowed = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        return OpenFilesError(f"too many open files: this process may have {allowed:,} (ulimit -n); allow more")
    if is_of(errno.ENFILE):
        return OpenFilesError("too many open files on this machine, of all processes (sysctl fs.file-max); allow more")
    return None


class ConfigError(ZecoError):
    """An invalid configuration value: names the field, its value and the allowed values."""

    exit_code = 2

    def __init__(self, field: str, value: object, allowed: str) -> None:
        super().__init__(f"{field}={value}: {allowed}")
        self.field = field

    def within(self, section: str) -> ConfigError:
        """The same error with the section's name before the field's; a section's own checks omit it."""
        error = ConfigError.__new__(ConfigError, f"{section}.{self}")
        error.field = f"{section}.{self.field}"
        return error


class DataError(ZecoError):
    """Unusable files: names the subject (a path), the problem and the remedy."""

    exit_code = 3

    def __init__(self, subject: object, problem: str, remedy: str = "") -> None:
        super().__init__(f"{subject}: {problem}" + (f"; {remedy}" if remedy else ""))


@contextmanager
def names_field(field: str, value: object) -> Iterator[None]:
    """Name the setting, or the argument, in a `DataError` of the block whose subject is its value."""
    try:
        yield
    except DataError as error:
        if not str(error).startswith(f"{value}: "):
            raise
        raise DataError(f"{field}={value}", str(error).removeprefix(f"{value}: ")) from error


class CheckpointError(ZecoError):
    """A checkpoint that cannot be written, read or resumed from."""

    exit_code = 4


class NonFiniteError(ZecoError):
    """A loss or gradient that is NaN or infinite: names step, rank and the first non-finite tensor."""

    exit_code = 5


class CommunicationError(ZecoError):
    """A peer that timed out or is lost: names rank, operation and, if known, the peer."""

    exit_code = 6

    def __init__(self, rank: int, operation: str, problem: str, peer: int | None = None) -> None:
        where = f" with rank {peer}" if peer is not None else ""
        super().__init__(f"rank {rank}: {operation}{where}: {problem}")
        self.rank, self.operation, self.problem, self.peer = rank, operation, problem, peer


class OutOfMemoryError(ZecoError):
    """A rank out of memory: names rank, activity and a remedy."""

    exit_code = 7

    def __init__(self, rank: int, activity: str, problem: str, remedy: str = "") -> None:
        super().__init__(f"rank {rank}: {activity}: out of memory ({problem})" + (f"; {remedy}" if remedy else ""))


class OpenFilesError(ZecoError):
    """No more files can be opened, by this process or on this machine: no fault of the file."""

    exit_code = 7


def first_cause(error: BaseException) -> str:
    """The root cause in one line: what ends a failed CUDA graph's capture raises another error, which hides it."""
    while error.__context__ is not None:
        error = error.__context__
    return (str(error).splitlines() or [""])[0] or type(error).__name__
