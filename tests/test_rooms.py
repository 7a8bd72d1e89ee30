"""Import rules of the project (docs/architecture.md): no import cycles, and allowed dependencies between packages."""

from __future__ import annotations

import ast
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

from models.mixer_registry import MIXERS
from tests.support.commands import REPOSITORY
from zeco_train.ops.operator_registry import OPERATORS

PRODUCT = ("zeco_train", "models", "data", "launch")
# Packages of `zeco_train` that `models` and `data` may import.
FOUNDATION = ("zeco_train.version", "zeco_train.errors", "zeco_train.system", "zeco_train.ops")

# Of mixers that are called as their operators: the registry, old results and runs, and which mixers `verify` trains.
NAME_MIXERS = (
    "models.mixer_registry",
    "zeco_train.bench.figures",
    "zeco_train.tracking.run_folder",
    "zeco_train.verify.step_cases",
)


def _module(path: Path) -> str:
    return ".".join(path.relative_to(REPOSITORY).with_suffix("").parts).removesuffix(".__init__")


@cache
def nodes(path: Path) -> list[ast.AST]:
    return [*ast.walk(ast.parse(path.read_text()))]


@cache
def imports() -> dict[str, set[str]]:
    """Imports within this project, by importing module; those in functions and under TYPE_CHECKING count."""
    modules = {_module(path): path for package in (*PRODUCT, "lab") for path in (REPOSITORY / package).rglob("*.py")}
    found: dict[str, set[str]] = {}
    for module, path in modules.items():
        names: set[str] = set()
        for node in nodes(path):
            if isinstance(node, ast.Import):
                names |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                assert node.module is not None, f"{path}: a relative import, which these rules would not see"
                assert node.level == 0, f"{path}: a relative import, which these rules would not see"
                members = {f"{node.module}.{alias.name}" for alias in node.names}
                names |= members & modules.keys() or {node.module}
        found[module] = names & modules.keys() - {module}
    return found


def test_no_import_cycles() -> None:
    try:
        TopologicalSorter(imports()).prepare()
    except CycleError as error:
        pytest.fail(" → ".join(error.args[1]))


@pytest.mark.parametrize("package", ["models", "data"])
def test_models_and_data_import_nothing_above_ops(package: str) -> None:
    above = {
        f"{module} → {name}"
        for module, names in imports().items()
        if module.split(".")[0] == package
        for name in names
        if name.startswith("zeco_train") and not _is_of(name, FOUNDATION)
    }
    assert not above


def test_foundation_imports_only_itself_and_kernels() -> None:
    own = {module: names for module, names in imports().items() if _is_of(module, FOUNDATION)}
    below = (*FOUNDATION, "zeco_train.kernels")
    assert not {f"{module} → {name}" for module, names in own.items() for name in names if not _is_of(name, below)}


def test_the_product_imports_nothing_of_lab() -> None:
    own = {module: names for module, names in imports().items() if not _is_of(module, ("lab",))}
    assert not {f"{module} → {name}" for module, names in own.items() for name in names if _is_of(name, ("lab",))}


def test_nobody_but_mixers_names_an_operator() -> None:
    """Other rooms read an operator's facts (`zeco_train.ops.operator.Operator`), and take it from the registry."""
    folders = tuple({operator.one_token.__module__ for operator in OPERATORS.values()})
    found = set()
    for path in (path for package in PRODUCT for path in (REPOSITORY / package).rglob("*.py")):
        module = _module(path)
        # `attach` calls operators as mixers do, for the layers of other libraries.
        if _is_of(module, ("models.mixers", "zeco_train.attach", "zeco_train.ops.operator_registry", *folders)):
            continue
        found |= {f"{module} → {name}" for name in imports()[module] if _is_of(name, folders)}
        constants = {node.value for node in nodes(path) if isinstance(node, ast.Constant)}
        # Some mixers, and classes of fla, are called as their operators.
        allowed = MIXERS.keys() if module in NAME_MIXERS or _is_of(module, ("models.formats",)) else ()
        found |= {f"{module}: {name}" for name in OPERATORS.keys() & constants - set(allowed)}
    assert not found


# Modules below communication that read the kind of a device for another reason than to choose an implementation: what
# PyTorch's own kernels round or take there, and what would make the host wait.
READS_DEVICE = {
    "models.modules",
    "zeco_train.kernels.adamw",
    "zeco_train.ops.delta.chunk_states",
    "zeco_train.ops.loss",
    "zeco_train.ops.mix",
    "zeco_train.ops.softmax.sdpa",
}
CHOOSES = "zeco_train.ops.operator"


def test_implementations_are_chosen_in_one_place() -> None:
    """By `Operator.select` and `KernelRule.serves`, of a `Target`."""
    readers = set()
    for path in (path for package in PRODUCT for path in (REPOSITORY / package).rglob("*.py")):
        module = _module(path)
        attributes = [node for node in nodes(path) if isinstance(node, ast.Attribute)]
        assert "is_cuda" not in {node.attr for node in attributes}, f"{module}: take a `Target`, or `device.type`"
        if _is_of(module, ("models", "zeco_train.ops", "zeco_train.kernels")):
            read = {ast.unparse(node) for node in attributes}
            readers |= {module for name in read if name.endswith(("device.type", "get_device_capability"))}
    assert readers == READS_DEVICE | {CHOOSES}


def _is_of(module: str, rooms: tuple[str, ...]) -> bool:
    return any(module == room or module.startswith(f"{room}.") for room in rooms)
