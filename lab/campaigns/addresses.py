"""Question: are the shared-memory addresses of the machine code those that the compiler meant, in every thread?
Command: python -m lab.campaigns.addresses [--only TEXT] > lab/results/addresses.txt
Date: 28 November 2026.
Answer: ...

ptxas 12.8, which Triton 3.6 and 3.7 come with, can read a register after it gave it to another value, where it computes
an address again for want of registers. Integers are followed through PTX and through machine code, for all threads of a
program at once, in the order of the text. What comes from memory, from an argument, or changes in a loop is unknown. An
address known in the machine code must be one of those in the PTX.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch

from lab.campaigns.descriptors import listing_of

Vector = np.ndarray  # uint32, or bool of a predicate: of each thread, or of one for all
State = dict[str, Vector]

_LINE = re.compile(r"^(?:\s*/\*[0-9a-f]{4,}\*/)?\s+(?:@(!?)(%?U?[Pp]\w+)\s+)?([a-zA-Z][\w.:]*)\s*([^;]*?)\s*;")
_LABEL = re.compile(r"^\s*([.$]L\w+):")
_TARGET = re.compile(r"[.$]L_\w+")
_OPERAND = re.compile(r"\{[^}]*\}|(?:desc)?\[[^,]*?\](?:\[[^,]*?\])?|[^,\s][^,]*")
_REGISTER = re.compile(r"U?R(\d+|Z)$")
_THREADS = re.compile(r"\.reqntid (\d+)")
_INTEGER = re.compile(r"-?(?:0x[0-9a-f]+|\d+)$")
_WIDE = re.compile(r"\.(?:64|WIDE\S*|F64\S*)(?:\.|$)|^D(?:ADD|MUL|FMA)|^CS2R$")
_COMPARED: dict[str, Callable[..., Vector]] = {
    "eq": np.equal, "ne": np.not_equal, "lt": np.less, "le": np.less_equal, "gt": np.greater, "ge": np.greater_equal,
    "lo": np.less, "ls": np.less_equal, "hi": np.greater, "hs": np.greater_equal,
}  # fmt: skip


class Instruction(NamedTuple):
    """One line; `label` alone, or an operation, if `guard` is true, or false if `negated`."""

    label: str
    negated: bool = False
    guard: str = ""
    operation: str = ""
    operands: tuple[str, ...] = ()


def _instructions(text: str) -> list[Instruction]:
    found = []
    for line in text.splitlines():
        if label := _LABEL.match(line):
            found.append(Instruction(label[1]))
        elif parts := _LINE.match(line):
            operands = (x.strip().removesuffix(".reuse") for x in _OPERAND.findall(parts[4]))
            found.append(Instruction("", bool(parts[1]), parts[2] or "", parts[3], tuple(operands)))
    return found


@dataclass
class Program:
    """Follows a program's integers; a subclass knows the language."""

    threads: int
    known: dict[str, set[bytes]] = field(default_factory=dict)  # by kind of access, the vectors of addresses
    where: dict[tuple[str, bytes], str] = field(default_factory=dict)  # the first that accesses so
    accesses: int = 0
    judged: int = 0

    def targets(self, x: Instruction) -> list[str]:
        """What it writes, first what `result` computes."""
        raise NotImplementedError

    def result(self, x: Instruction, state: State) -> Vector | tuple[Vector | None, ...] | None:
        raise NotImplementedError

    def access(self, x: Instruction) -> tuple[str, str] | None:
        """Kind and operand of an access to shared memory."""
        raise NotImplementedError

    def value(self, operand: str, state: State) -> Vector | None:
        raise NotImplementedError

    def run(self, text: str) -> None:
        """States at labels are what all ways there agree on, found by going on until none changes."""
        code = _instructions(text)
        starts = {x.label: i for i, x in enumerate(code) if x.label}
        entries: dict[int, State] = {0: {}}
        pending = {0}

        def arrive(start: int, state: State) -> None:
            if start not in entries:
                entries[start] = state.copy()
            else:
                common = _common(entries[start], state)
                if len(common) == len(entries[start]):
                    return
                entries[start] = common
            pending.add(start)

        def walk(start: int, settled: bool) -> None:
            state = entries[start].copy()
            for i in range(start, len(code)):
                x = code[i]
                if x.label and i > start:
                    if not settled:
                        arrive(i, state)
                    return
                if x.label:
                    continue
                if not settled and (jump := self._jump(x)):
                    arrive(starts[jump], state)
                if self._ends(x):
                    return
                if settled:
                    self._record(x, state)
                self._step(x, state)

        while pending:
            start = min(pending)
            pending.remove(start)
            walk(start, settled=False)
        for start in sorted(entries):
            walk(start, settled=True)

    def _jump(self, x: Instruction) -> str:
        if x.operation.lower().startswith("bra"):
            return _TARGET.findall(x.operands[-1])[-1]
        return ""

    def _ends(self, x: Instruction) -> bool:
        name = x.operation.lower()
        return not x.guard and (name in ("bra", "bra.uni", "exit", "ret") or name.startswith("ret"))

    def _record(self, x: Instruction, state: State) -> None:
        if access := self.access(x):
            kind, operand = access
            self.accesses += 1
            address = self.value(operand, state)
            if address is not None:
                self.judged += 1
                vector = np.broadcast_to(address, self.threads).tobytes()
                self.known.setdefault(kind, set()).add(vector)
                self.where.setdefault((kind, vector), f"{x.operation} {', '.join(x.operands)}")

    def _step(self, x: Instruction, state: State) -> None:
        names = self.targets(x)
        if not names:
            return
        found = self.result(x, state)
        results = found if isinstance(found, tuple) else (found,)
        guard = self.guard(x, state)
        for name, new in zip(names, [*results, *[None] * len(names)], strict=False):
            old = state.pop(name, None)
            if guard is None:
                new = new if new is not None and old is not None and np.array_equal(new, old) else None
            elif not guard.all():
                new = old if not guard.any() else None if new is None or old is None else np.where(guard, new, old)
            if new is not None:
                state[name] = new

    def guard(self, x: Instruction, state: State) -> Vector | None:
        if x.guard in ("", "PT", "UPT"):
            return np.array([not x.negated])
        found = state.get(x.guard)
        return ~found if found is not None and x.negated else found

    def constant(self, number: int) -> Vector:
        return np.array([number & 0xFFFFFFFF], dtype=np.uint32)

    def tid(self) -> Vector:
        return np.arange(self.threads, dtype=np.uint32)


def _common(first: State, second: State) -> State:
    """What both agree on."""
    return {
        name: x for name, x in first.items()
        if name in second and (second[name] is x or np.array_equal(second[name], x))
    }  # fmt: skip


def _signed(x: Vector) -> Vector:
    return x.view(np.int32)


def _shift_left(x: Vector, by: Vector) -> Vector:
    return np.where(by > 31, np.uint32(0), x << (by & 31))


def _shift_right(x: Vector, by: Vector) -> Vector:
    return np.where(by > 31, np.uint32(0), x >> (by & 31))


def _shift_signed(x: Vector, by: Vector) -> Vector:
    return (_signed(x) >> np.minimum(by, 31).astype(np.int32)).view(np.uint32)


def _table(a: Vector, b: Vector, c: Vector, table: int) -> Vector:
    """Bit by bit, the bit of `table` that the three bits number."""
    found = np.zeros(1, dtype=np.uint32)
    for case in range(8):
        if table >> case & 1:
            found = found | ((a if case & 4 else ~a) & (b if case & 2 else ~b) & (c if case & 1 else ~c))
    return found


def _permute(a: Vector, b: Vector, selector: Vector) -> Vector | None:
    """The bytes of b and a that the four digits of the selector number."""
    if selector.size > 1 or int(selector[0]) & 0x8888:
        return None
    found = np.zeros(1, dtype=np.uint32)
    for position in range(4):
        digit = int(selector[0]) >> 4 * position & 7
        found = found | (((b if digit & 4 else a) >> np.uint32(8 * (digit & 3)) & 0xFF) << np.uint32(8 * position))
    return found


def _from_first_lane(x: Vector) -> Vector:
    return x if x.size == 1 else np.repeat(x[::32], 32)


class Ptx(Program):
    """The compiler's assembly."""

    def targets(self, x: Instruction) -> list[str]:
        if not x.operands or x.operation.startswith(("st", "bar", "bra", "red", "cp.", "fence", "wgmma.fence")):
            return []
        return re.findall(r"%[a-z]+\d+", x.operands[0]) if x.operands[0][0] in "%{" else []

    def access(self, x: Instruction) -> tuple[str, str] | None:
        name = x.operation
        if ".shared" not in name or x.guard and False:
            return None
        if name.startswith("cp.async."):
            return ("copy", x.operands[0]) if x.operands[0][0] == "[" else None
        for start, kind in (("ldmatrix", "LDSM"), ("stmatrix", "STSM"), ("ld.", "LDS"), ("st.", "STS")):
            if name.startswith(start):
                return kind, x.operands[1 if start[0] == "l" else 0]
        return None

    def value(self, operand: str, state: State) -> Vector | None:
        total = self.constant(0)
        for term in re.findall(r"-?[%\w.]+", operand.strip("[] ")):
            if _INTEGER.match(term):
                part: Vector | None = self.constant(int(term, 0))
            elif term in ("global_smem", "%tid.y", "%tid.z"):
                part = self.constant(0)
            else:
                part = self.tid() if term == "%tid.x" else state.get(term)
            if part is None or part.dtype == bool:
                return part
            total = total + part
        return total

    def result(self, x: Instruction, state: State) -> Vector | tuple[Vector | None, ...] | None:
        name, *kinds = x.operation.split(".")
        if name == "cvt":  # of 64-bit integers the low word
            return self.value(x.operands[1], state) if {*kinds} <= {"u32", "s32", "u64", "s64"} else None
        if kinds and kinds[-1] in ("f32", "f64", "b64", "s64", "u64", "bf16", "bf16x2", "f16", "b16", "s16", "u16"):
            return None
        values = [self.value(operand.removeprefix("!"), state) for operand in x.operands[1:]]
        if name == "shfl" and kinds[1] == "idx":
            lane = values[1]
            return _from_first_lane(values[0]) if values[0] is not None and lane is not None and not lane.any() else None
        if any(value is None for value in values):
            # 0 whatever the other is
            zero = any(value is not None and not value.any() for value in values)
            return self.constant(0) if name == "and" and zero and kinds[-1] != "pred" else None
        return self._computed(name, kinds, [value for value in values if value is not None])

    def _computed(self, name: str, kinds: list[str], values: list[Vector]) -> Vector | None:
        a, b, c = [*values, *[self.constant(0)] * 2][:3]
        kind = kinds[-1] if kinds else ""
        if name == "setp":
            wide = (_signed(a), _signed(b)) if kind == "s32" else (a, b)
            return _COMPARED[kinds[0]](*wide) if len(kinds) == 2 else None
        if name == "selp":
            return np.where(c, a, b)
        if name == "shr":
            return _shift_signed(a, b) if kind == "s32" else _shift_right(a, b)
        if name in ("min", "max"):
            pick = np.minimum if name == "min" else np.maximum
            return pick(_signed(a), _signed(b)).view(np.uint32) if kind == "s32" else pick(a, b)
        if name == "bfe":
            moved = _shift_left(a, 32 - b - c)  # fields that end within the word
            return _shift_right(moved, 32 - c) if kind == "u32" else _shift_signed(moved, 32 - c)
        if name == "bfi":
            place, length = c, values[3]
            mask = _shift_left(_shift_left(self.constant(1), length) - 1, place)
            return (_shift_left(a, place) & mask) | (b & ~mask)
        if name == "lop3":
            return _table(a, b, c, int(values[3][0]))
        if name == "shf" and kinds[1:] == ["wrap", "b32"]:
            by = c & 31
            left, right = (b, a) if kinds[0] == "l" else (a, b)
            other = 32 - by
            return (
                _shift_left(left, by) | _shift_right(right, other)
                if kinds[0] == "l"
                else _shift_right(left, by) | _shift_left(right, other)
            )
        simple: dict[str, Callable[[], Vector | None]] = {
            "mov": lambda: a, "shl": lambda: _shift_left(a, b), "and": lambda: a & b,
            "or": lambda: a | b, "xor": lambda: a ^ b, "not": lambda: ~a, "add": lambda: a + b, "sub": lambda: a - b,
            "neg": lambda: self.constant(0) - a, "prmt": lambda: _permute(a, b, c),
            "mul": lambda: a * b if kinds[0] == "lo" else None,
            "mad": lambda: a * b + c if kinds[0] == "lo" else None,
        }  # fmt: skip
        return simple[name]() if name in simple else None


class Sass(Program):
    """Machine code of Hopper GPUs."""

    def targets(self, x: Instruction) -> list[str]:
        name = x.operation
        if not x.operands or name.startswith(("ST", "BAR", "BRA", "RED", "LDGSTS", "EXIT", "MEMBAR", "BSSY", "BSYNC")):
            return [f"stack{x.operands[0]}"] if name == "STL" else []
        if x.operands[0] == "PR":
            return [f"P{i}" for i in range(7)]
        predicates = _leading_predicates(x.operands)
        register = x.operands[len(predicates)]
        if "SETP" in name or name.startswith(("PLOP3", "UPLOP3", "FCHK")) or not _REGISTER.match(register):
            return predicates
        bank, first = re.match(r"(U?R)(.+)", register).groups()
        wide = [f"{bank}{int(first) + i}" for i in range(self._width(name))] if first != "Z" else ["RZ"]
        return wide + predicates + _leading_predicates(x.operands[len(predicates) + 1 :])

    def _width(self, name: str) -> int:
        if shape := re.match(r"HGMMA\.64x(\d+)", name):
            return int(shape[1]) // (4 if ".F16" == name[-4:] else 2)
        if name.startswith(("HMMA", "IMMA", "QGMMA")):
            return 4
        if ".128" in name or name.endswith("M88.4"):
            return 4
        return 2 if _WIDE.search(name) or name.endswith("M88.2") else 1

    def access(self, x: Instruction) -> tuple[str, str] | None:
        name = x.operation.split(".")[0]
        if name == "LDGSTS":
            return "copy", x.operands[0]
        if x.operands[:2] == ("RZ", "[RZ]"):  # a wait
            return None
        return (name, x.operands[name.startswith("L")]) if name in ("STS", "LDS", "STSM", "LDSM") else None

    def value(self, operand: str, state: State) -> Vector | None:
        if operand.startswith("["):
            total = self.constant(0)
            for term in operand.strip("[]").split("+"):
                part = self.value(term.removesuffix(".reuse"), state)
                if part is None:
                    return None
                total = total + part
            return total
        if operand in ("RZ", "URZ"):
            return self.constant(0)
        if operand in ("PT", "UPT"):
            return np.array([True])
        if _INTEGER.match(operand):
            return self.constant(int(operand, 0))
        if operand[:1] in "!~-":
            found = self.value(operand[1:], state)
            return None if found is None else self.constant(0) - found if operand[0] == "-" else ~found
        return state.get(operand)

    def result(self, x: Instruction, state: State) -> Vector | tuple[Vector | None, ...] | None:
        name, *kinds = x.operation.split(".")
        if name in ("S2R", "S2UR"):
            return self.tid() if x.operands[1] == "SR_TID.X" else None
        if name == "LDL":
            return state.get(f"stack{x.operands[1]}") if kinds in ([], ["LU"]) else None
        if name == "STL":
            return self.value(x.operands[1], state) if not kinds else None
        first = len(_leading_predicates(x.operands))
        if name in ("ISETP", "UISETP"):
            return self._compared(kinds, x.operands[2:], state) if "EX" not in kinds else None
        rest = x.operands[first + 1 :]
        rest = rest[len(_leading_predicates(rest)) :]
        if name in ("SHFL",):
            lane = self.value(rest[1], state)
            found = self.value(rest[0], state)
            is_first = kinds == ["IDX"] and lane is not None and not lane.any()
            return _from_first_lane(found) if is_first and found is not None else None
        if name == "P2R":
            return self._packed(rest, state) if not kinds else None
        values = [self.value(operand, state) for operand in rest]
        if name in ("LEA", "ULEA") and not kinds and rest[2] == "0x18" and values[0] is None and values[1] is not None:
            # the base of shared memory: 0 is where the program's begins
            return values[1] - 0x400
        if "X" in kinds:
            return None
        found = self._computed(name.removeprefix("U"), kinds, values)
        return (found, found != 0) if found is not None and first else found

    def _packed(self, operands: tuple[str, ...], state: State) -> Vector | None:
        mask, found = int(operands[2], 0), self.value(operands[1], state)
        for i in range(7):
            bit = state.get(f"P{i}")
            if mask >> i & 1 and found is not None:
                found = None if bit is None else found & ~np.uint32(1 << i) | (bit * np.uint32(1 << i))
        return found

    def _compared(self, kinds: list[str], operands: tuple[str, ...], state: State) -> tuple[Vector | None, ...] | None:
        a, b, also = (self.value(operand, state) for operand in operands[:3])
        if a is None or b is None or also is None or kinds[0].lower() not in _COMPARED:
            return None
        found = _COMPARED[kinds[0].lower()](*((a, b) if "U32" in kinds else (_signed(a), _signed(b))))
        join = {"AND": np.logical_and, "OR": np.logical_or, "XOR": np.logical_xor}[kinds[-1]]
        return join(found, also), join(~found, also)

    def _computed(self, name: str, kinds: list[str], given: list[Vector | None]) -> Vector | None:
        if name == "LOP3" and given[3] is not None:
            return self._looked_up(given)
        if any(value is None for value in given):
            return None
        values = [value for value in given if value is not None]
        a, b, c = [*values, *[self.constant(0)] * 2][:3]
        if name in ("MOV", "R2UR"):
            return a
        if name == "IMAD":
            return None if "HI" in kinds else a * b + c
        if name == "IADD3":
            return a + b + c
        if name == "VIADD":
            return a + b
        if name == "LEA":
            if kinds == ["HI"]:
                by = values[3]
                return _shift_left(c, by) + _shift_right(a, 32 - by) + b
            return _shift_left(a, c) + b if not kinds else None
        if name == "SHF":
            if kinds == ["L", "U32"]:
                return _shift_left(a, b)
            if kinds[0] == "R" and kinds[-1] == "HI" and "W" not in kinds:
                return _shift_right(c, b) if "U32" in kinds else _shift_signed(c, b) if "S32" in kinds else None
            return None
        if name == "SGXT":
            up = 32 - b
            moved = _shift_left(a, up)
            return _shift_right(moved, up) if kinds == ["U32"] else _shift_signed(moved, up)
        if name == "PRMT":
            return _permute(a, c, b)
        if name == "SEL":
            return np.where(c, a, b)
        if name in ("IMNMX", "VIMNMX"):
            low = np.minimum(a, b) if "U32" in kinds else np.minimum(_signed(a), _signed(b)).view(np.uint32)
            high = np.maximum(a, b) if "U32" in kinds else np.maximum(_signed(a), _signed(b)).view(np.uint32)
            return np.where(c, low, high)
        return None

    def _looked_up(self, given: list[Vector | None]) -> Vector | None:
        """A bitwise function; of unknown operands, too, if it does not depend on them."""
        assert given[3] is not None
        table = int(given[3][0])
        zero = self.constant(0)
        a, b, c = given[:3]
        if c is None and a is not None and b is not None:
            found = _table(a, b, zero, table), _table(a, b, ~zero, table)
            return found[0] if np.array_equal(*found) else None
        return None if a is None or b is None or c is None else _table(a, b, c, table)


def _leading_predicates(operands: tuple[str, ...]) -> list[str]:
    """Carries, between an addition's target and what it adds."""
    found = []
    for operand in operands:
        if not re.match(r"U?P\d$|U?PT$", operand):
            break
        found.append(operand)
    return found if len(found) < len(operands) else []


class Judged(NamedTuple):
    wrong: list[str]  # accesses at addresses that the PTX has not
    count: int  # whose addresses are known
    accesses: int


def judged(ptx: str, listing: str) -> Judged:
    """Of one kernel, by its PTX and its machine code as text."""
    found = _THREADS.search(ptx)
    assert found is not None
    threads = int(found[1])
    meant, made = Ptx(threads), Sass(threads)
    meant.run(ptx)
    made.run(listing)
    wrong = [
        made.where[kind, vector]
        for kind, vectors in made.known.items()
        for vector in vectors - meant.known.get(kind, set())
    ]
    return Judged(wrong, made.judged, made.accesses)


def wrong_addresses(ptx: str, cubin: bytes) -> list[str]:
    """Accesses at addresses that no access of the PTX has."""
    return judged(ptx, listing_of(cubin)).wrong


# K and V: narrow ones of one tile, some of several tiles, the widest.
DIMS = (
    (64, 16), (32, 16), (64, 64), (128, 16), (128, 128), (16, 16), (64, 128), (48, 32), (256, 64), (96, 96), (256, 256),
    (128, 512),
)  # fmt: skip
OPERATORS_WITH_KERNELS = ("delta", "gated_delta", "kda", "gla", "scalar_decay", "fixed_decay", "gsa")


def lines_of(operator: str, heads: tuple[int, int], dims: tuple[int, int], documents: bool) -> list[str]:
    """A line for each kernel of the case."""
    from lab.campaigns.registers import _usage
    from tests.support.kernel_cases import KernelCase, compiling  # late, for it imports this
    from zeco_train.ops.operator import Target, assume

    found: dict[str, None] = {}

    def seen(name: str, made: Any) -> None:
        kernel = judged(made.asm["ptx"], listing_of(made.asm["cubin"]))
        registers, stack = _usage(made.asm["cubin"])
        found[
            f"{operator:<13} {heads!s:>7} {dims!s:>11} {'documents' if documents else '':<10} {name:<26} {registers:>4}"
            f" {stack:>5} {kernel.count:>6} {kernel.accesses:>6} {'; '.join(kernel.wrong[:3])}".rstrip()
        ] = None

    case = KernelCase(operator, 65, (1, *heads, *dims), documents=(0, 6) if documents else None)
    try:
        with compiling(90, seen), assume(Target("cuda", (9, 0))):
            case.found(case.tensors(torch.bfloat16, torch.device("cpu")))
    except AssertionError as error:
        found[f"{operator:<13} {heads!s:>7} {dims!s:>11} {'documents' if documents else '':<10} WRONG {error!s:.300}"] = None
    return list(found)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default=",".join(OPERATORS_WITH_KERNELS), help="these operators")
    parser.add_argument("--dims", type=int, default=len(DIMS), help="the first so many")
    arguments = parser.parse_args()
    print(
        f"{'operator':<13} {'G, H':>7} {'K, V':>11} {'':<10} {'kernel':<26} {'regs':>4} {'stack':>5} {'judged':>6}"
        f" {'of':>6} wrong"
    )
    for number, dims in enumerate(DIMS[: arguments.dims]):
        for operator in arguments.only.split(","):
            # with heads that share keys, or without documents, in turn
            other = ((1, 2), True) if number % 2 == 0 else ((1, 1), False)
            for heads, documents in ((1, 1), True), other:
                print(*lines_of(operator, heads, dims, documents), sep="\n", flush=True)


if __name__ == "__main__":
    main()
