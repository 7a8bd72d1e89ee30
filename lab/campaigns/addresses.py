"""Question: are the shared-memory addresses of the machine code those that the compiler meant, in every thread?
Command: python -m lab.campaigns.addresses [--only OPERATORS] [--dims N]
Date: 28 November 2026, Triton 3.7.1 and 3.6, no GPU; ended early, after the dims that results/addresses.txt has.
Answer: yes, where they can be followed, 98.6 % of the accesses (results/addresses.txt). With `grads_kernel` of delta
    rules as it was before, no under Triton 3.6: K 64 or 32, V 8 or 16, with documents, where a GPU had wrong dq and dk;
    V 48 and 64 were right, and so was all code of Triton 3.7.1.

ptxas 12.8, which Triton 3.6 and 3.7 come with, can overwrite a register before it reads it, where it computes an
address again for want of registers. Integers are followed through PTX and through machine code, for all threads of a
program at once. What is loaded is unknown; arguments, and what goes up in a loop, are numbers that are unknown but the
same in all threads. An access of the machine code must be at an address that the PTX has; of stores the other way
round, too.
"""

from __future__ import annotations

import argparse
import itertools
import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch

from lab.campaigns.descriptors import listing_of, usage
from lab.campaigns.thread_values import (
    UNKNOWN_FOR_ALL,
    State,
    Value,
    Vector,
    bit_table,
    common,
    constant,
    freed,
    from_first_lane,
    joined,
    narrowed,
    permuted,
    same,
    shift_left,
    shift_right,
    shift_signed,
    signed,
)

_LINE = re.compile(r"^(?:\s*/\*[0-9a-f]{4,}\*/)?\s+(?:@(!?)(%?U?[Pp]\w+)\s+)?([a-zA-Z][\w.:]*)\s*([^;]*?)\s*;")
_LABEL = re.compile(r"^\s*([.$]L\w+):")
_TARGET = re.compile(r"[.$]L_\w+")
_OPERAND = re.compile(r"\{[^}]*\}|(?:desc)?\[[^,]*?\](?:\[[^,]*?\])?|[^,\s][^,]*")
_REGISTER = re.compile(r"U?R(\d+|Z)$")
_THREADS = re.compile(r"\.reqntid (\d+)")
_INTEGER = re.compile(r"-?(?:0x[0-9a-f]+|\d+)$")
_WIDE = re.compile(r"\.(?:64|WIDE\S*|F64\S*)(?:\.|$)|^D(?:ADD|MUL|FMA)|^CS2R$")
# Functions that add a number to the result if it is added to an operand; of those that multiply, to a free factor.
_SCALING = {"shl", "mul", "mad", "IMAD", "LEA", "SHF"}
_LINEAR = {"mov", "cvt", "add", "sub", "neg", "MOV", "R2UR", "IADD3", "VIADD", *_SCALING}
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
    # By kind of access and its addresses, known or free, the first such line.
    known: dict[tuple[str, bytes], str] = field(default_factory=dict)
    free: dict[tuple[str, bytes], str] = field(default_factory=dict)
    kinds: list[str] = field(default_factory=list)  # of all accesses
    unknown: list[str] = field(default_factory=list)  # kinds of the other accesses

    def targets(self, x: Instruction) -> list[str]:
        """What it writes, first what `result` computes."""
        raise NotImplementedError

    def result(self, x: Instruction, state: State) -> Value | tuple[Value | None, ...] | None:
        raise NotImplementedError

    def access(self, x: Instruction) -> tuple[str, str] | None:
        """Kind and operand of an access to shared memory."""
        raise NotImplementedError

    def parts(self, x: Instruction) -> range:
        """What it accesses may be accessed from these bytes on, after its address."""
        return range(1)

    def value(self, operand: str, state: State) -> Value | None:
        raise NotImplementedError

    def function(self, name: str, kinds: list[str], values: list[Vector]) -> Vector | None:
        """What an operation makes of numbers."""
        raise NotImplementedError

    def computed(self, name: str, kinds: list[str], given: list[Value | None]) -> Value | None:
        values = [value for value in given if value is not None]
        if len(values) < len(given):
            return None
        vectors = [value.vector for value in values]
        if not any(value.free for value in values):
            found = self.function(name, kinds, vectors)
            return None if found is None else Value(narrowed(found))
        if all(vector.size == 1 for vector in vectors):
            return Value(np.zeros(1, dtype=bool if name == "setp" else vectors[0].dtype), True)
        if name in ("selp", "SEL"):
            return joined(*values[:2]) if vectors[2].size == 1 else None
        if name in _LINEAR and (name not in _SCALING or self._scales(name, kinds, values)):
            found = self.function(name, kinds, vectors)
            return None if found is None else freed(found)
        return None

    def _scales(self, name: str, kinds: list[str], values: list[Value]) -> bool:
        """Whether free factors are multiplied by one number for all threads, which is known."""
        first, second = (values[0], values[2]) if name == "LEA" else values[:2]
        if name in ("LEA", "shl", "SHF"):
            is_left = kinds == ["L", "U32"] if name == "SHF" else name == "shl" or not kinds
            return is_left and not second.free and (not first.free or second.vector.size == 1)
        return not any(
            x.free and (factor.free or factor.vector.size > 1) for x, factor in ((first, second), (second, first))
        )

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
                agreed = common(entries[start], state)
                if len(agreed) == len(entries[start]) and all(x is agreed[name] for name, x in entries[start].items()):
                    return
                entries[start] = agreed
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
        is_always = name in ("bra", "bra.uni") and len(x.operands) == 1
        return not x.guard and (is_always or name == "exit" or name.startswith("ret"))

    def _record(self, x: Instruction, state: State) -> None:
        if access := self.access(x):
            kind, operand = access
            address = self.value(operand, state)
            self.kinds.append(kind)
            if address is None:
                self.unknown.append(kind)
            else:
                found = self.free if address.free else self.known
                for offset in self.parts(x):
                    moved = address.vector if address.free else address.vector + np.uint32(offset)
                    vector = np.broadcast_to(moved, self.threads).tobytes()
                    found.setdefault((kind, vector), f"{x.operation} {', '.join(x.operands)}")

    def _step(self, x: Instruction, state: State) -> None:
        if x.operation.lower().startswith("call"):
            state.clear()
        names = self.targets(x)
        if not names:
            return
        found = self.result(x, state)
        results = list(found) if type(found) is tuple else [found]
        guard = self.guard(x, state)
        for name, new in zip(names, [*results, *[None] * len(names)], strict=False):
            old = state.pop(name, None)
            if guard is None or guard.free:
                new = same(old, new) if guard is None else joined(old, new)
            elif not guard.vector.all():
                if not guard.vector.any():
                    new = old
                elif new is None or old is None or new.free or old.free:
                    new = None
                else:
                    new = Value(np.where(guard.vector, new.vector, old.vector))
            if new is not None:
                state[name] = new

    def guard(self, x: Instruction, state: State) -> Value | None:
        if x.guard in ("", "PT", "UPT"):
            return Value(np.array([not x.negated]))
        found = state.get(x.guard)
        return Value(~found.vector, found.free) if found is not None and x.negated else found

    def without(self, other: Program) -> list[tuple[str, str]]:
        """Kind and line of accesses at addresses that the other one has not."""
        patterns = {*other.free, *((kind, _pattern(vector)) for kind, vector in other.known)}
        found = [
            (kind, line)
            for (kind, vector), line in self.known.items()
            if (kind, vector) not in other.known and (kind, _pattern(vector)) not in other.free
        ]
        return found + [(kind, line) for (kind, vector), line in self.free.items() if (kind, vector) not in patterns]

    def tid(self) -> Value:
        return Value(np.arange(self.threads, dtype=np.uint32))

    def total(self, parts: list[Value | None]) -> Value | None:
        values = [part for part in parts if part is not None]
        if len(values) < len(parts):
            return None
        found = sum((value.vector for value in values), start=constant(0))
        return freed(found) if any(value.free for value in values) else Value(narrowed(found))


class Ptx(Program):
    """The compiler's assembly."""

    def targets(self, x: Instruction) -> list[str]:
        if not x.operands or x.operation.startswith(("st", "bar", "bra", "red", "cp.", "fence", "wgmma.fence")):
            return []
        return re.findall(r"%[a-z]+\d+", x.operands[0]) if x.operands[0][0] in "%{" else []

    def access(self, x: Instruction) -> tuple[str, str] | None:
        name = x.operation
        if ".shared" not in name:
            return None
        if name.startswith("cp.async."):
            return ("copy", x.operands[0]) if x.operands[0][0] == "[" else None
        for start, kind in (("ldmatrix", "LDSM"), ("stmatrix", "STSM"), ("ld.", "LDS"), ("st.", "STS")):
            if name.startswith(start):
                return kind, x.operands[1 if start[0] == "l" else 0]
        return None

    def parts(self, x: Instruction) -> range:
        # ptxas loads only those numbers of a vector that are read
        vector = re.match(r"ld\..*\.v(\d)\.[a-z](\d+)$", x.operation)
        return range(0, int(vector[1]) * int(vector[2]) // 8, int(vector[2]) // 8) if vector else range(1)

    def value(self, operand: str, state: State) -> Value | None:
        parts: list[Value | None] = []
        for term in re.findall(r"-?[%\w.]+", operand.strip("[] ")):
            if _INTEGER.match(term):
                parts.append(Value(constant(int(term, 0))))
            elif term in ("global_smem", "%tid.y", "%tid.z"):
                parts.append(Value(constant(0)))
            elif term.startswith("%ctaid"):
                parts.append(UNKNOWN_FOR_ALL)
            else:
                parts.append(self.tid() if term == "%tid.x" else state.get(term))
        return parts[0] if len(parts) == 1 else self.total(parts)

    def result(self, x: Instruction, state: State) -> Value | tuple[Value | None, ...] | None:
        name, *kinds = x.operation.split(".")
        if any(operand.startswith("{") for operand in x.operands):
            return None
        if name == "cvt":  # of 64-bit integers the low word
            return self.value(x.operands[1], state) if {*kinds} <= {"u32", "s32", "u64", "s64"} else None
        if name == "ld" and kinds[0] == "param":
            return UNKNOWN_FOR_ALL if kinds[-1] in ("b32", "u32", "s32") else None
        if kinds and kinds[-1] in ("f32", "f64", "b64", "s64", "u64", "bf16", "bf16x2", "f16", "b16", "s16", "u16"):
            return None
        given = [self.value(operand.removeprefix("!"), state) for operand in x.operands[1:]]
        if name == "shfl":
            return from_first_lane(given) if kinds[1] == "idx" else None
        if name == "and" and kinds[-1] != "pred" and any(y and not y.free and not y.vector.any() for y in given):
            return Value(constant(0))  # whatever the other is
        if name == "selp" and given[2] is None:
            return same(*given[:2])
        return self.computed(name, kinds, given)

    def function(self, name: str, kinds: list[str], values: list[Vector]) -> Vector | None:
        a, b, c = [*values, *[constant(0)] * 2][:3]
        kind = kinds[-1] if kinds else ""
        if name == "setp":
            wide = (signed(a), signed(b)) if kind == "s32" else (a, b)
            return _COMPARED[kinds[0]](*wide) if len(kinds) == 2 else None
        if name == "selp":
            return np.where(c, a, b)
        if name == "shr":
            return shift_signed(a, b) if kind == "s32" else shift_right(a, b)
        if name in ("min", "max"):
            pick = np.minimum if name == "min" else np.maximum
            return pick(signed(a), signed(b)).view(np.uint32) if kind == "s32" else pick(a, b)
        if name == "bfe":
            moved = shift_left(a, 32 - b - c)  # fields that end within the word
            return shift_right(moved, 32 - c) if kind == "u32" else shift_signed(moved, 32 - c)
        if name == "bfi":
            place, length = c, values[3]
            mask = shift_left(shift_left(constant(1), length) - 1, place)
            return (shift_left(a, place) & mask) | (b & ~mask)
        if name == "lop3":
            return bit_table(a, b, c, int(values[3][0]))
        if name == "shf" and kinds[1:] == ["wrap", "b32"]:
            by = c & 31
            left, right = (b, a) if kinds[0] == "l" else (a, b)
            other = 32 - by
            return (
                shift_left(left, by) | shift_right(right, other)
                if kinds[0] == "l"
                else shift_right(left, by) | shift_left(right, other)
            )
        simple: dict[str, Callable[[], Vector | None]] = {
            "mov": lambda: a, "shl": lambda: shift_left(a, b), "and": lambda: a & b,
            "or": lambda: a | b, "xor": lambda: a ^ b, "not": lambda: ~a, "add": lambda: a + b, "sub": lambda: a - b,
            "neg": lambda: constant(0) - a, "prmt": lambda: permuted(a, b, c),
            "mul": lambda: a * b if kinds[0] == "lo" else None,
            "mad": lambda: a * b + c if kinds[0] == "lo" else None,
        }  # fmt: skip
        return simple[name]() if name in simple else None


class Sass(Program):
    """Machine code of Hopper GPUs."""

    def targets(self, x: Instruction) -> list[str]:
        name = x.operation
        if not x.operands or name.startswith(("ST", "BAR", "BRA", "RED", "LDGSTS", "EXIT", "MEMBAR", "BSSY", "BSYNC")):
            return self._slots(x.operands[0], self._width(name)) if name.startswith("STL") else []
        if x.operands[0] == "PR":
            return [f"P{i}" for i in range(7)]
        predicates = _leading_predicates(x.operands)
        register = x.operands[len(predicates)]
        if "SETP" in name or name.startswith(("PLOP3", "UPLOP3", "FCHK")) or not _REGISTER.match(register):
            return predicates
        bank, _, first = register.rpartition("R")
        bank += "R"
        wide = [f"{bank}{int(first) + i}" for i in range(self._width(name))] if first != "Z" else ["RZ"]
        return wide + predicates + _leading_predicates(x.operands[len(predicates) + 1 :])

    def _slots(self, operand: str, count: int) -> list[str]:
        """Of the stack, of which a thread's registers are spilled to."""
        register, _, offset = operand.strip("[]").partition("+")
        return [f"{register}+{int(offset or '0', 0) + 4 * i:#x}" for i in range(count)]

    def _width(self, name: str) -> int:
        if shape := re.match(r"HGMMA\.64x(\d+)", name):
            return int(shape[1]) // (4 if name.endswith(".F16") else 2)
        if name.startswith(("HMMA", "IMMA", "QGMMA")):
            return 4
        if ".128" in name or name.endswith("88.4"):
            return 4
        return 2 if _WIDE.search(name) or name.endswith("88.2") else 1

    def access(self, x: Instruction) -> tuple[str, str] | None:
        name = x.operation.split(".")[0]
        if name == "LDGSTS":
            return "copy", x.operands[0]
        if x.operands[:2] == ("RZ", "[RZ]"):  # a wait
            return None
        return (name, x.operands[name.startswith("L")]) if name in ("STS", "LDS", "STSM", "LDSM") else None

    def value(self, operand: str, state: State) -> Value | None:
        if operand.startswith("["):
            terms = operand.strip("[]").split("+")
            return self.total([self.value(term.removesuffix(".reuse"), state) for term in terms])
        if operand in ("RZ", "URZ"):
            return Value(constant(0))
        if operand in ("PT", "UPT"):
            return Value(np.array([True]))
        if operand.startswith("c[0x0][0x"):
            return UNKNOWN_FOR_ALL
        if _INTEGER.match(operand):
            return Value(constant(int(operand, 0)))
        if operand[:1] in "!~-":
            found = self.value(operand[1:], state)
            if found is None or (operand[0] == "~" and found.free):
                return None
            return Value(constant(0) - found.vector if operand[0] == "-" else ~found.vector, found.free)
        return state.get(operand)

    def result(self, x: Instruction, state: State) -> Value | tuple[Value | None, ...] | None:
        name, *kinds = x.operation.split(".")
        if name in ("S2R", "S2UR"):
            if x.operands[1].startswith("SR_CTAID"):
                return UNKNOWN_FOR_ALL
            return self.tid() if x.operands[1] == "SR_TID.X" else None
        if name in ("LDC", "ULDC"):
            return UNKNOWN_FOR_ALL if not kinds and x.operands[1].startswith("c[0x0][0x") else None
        if name == "LDL":
            slots = [state.get(slot) for slot in self._slots(x.operands[1], self._width(x.operation))]
            return tuple(slots) if not {"U8", "S8", "U16", "S16"} & {*kinds} else None
        if name == "STL":
            bank, number = x.operands[1][0], x.operands[1][1:]
            if number.isdigit():
                return tuple(state.get(f"{bank}{int(number) + i}") for i in range(self._width(x.operation)))
            return self.value(x.operands[1], state)
        if name in ("ISETP", "UISETP"):
            return self._compared(kinds, x.operands[2:], state) if "EX" not in kinds else None
        first = len(_leading_predicates(x.operands))
        rest = x.operands[first + 1 :]
        rest = rest[len(_leading_predicates(rest)) :]
        if name == "P2R":
            return self._packed(rest, state) if not kinds else None
        given = [self.value(operand, state) for operand in rest]
        if name == "SHFL":
            return from_first_lane(given) if kinds == ["IDX"] else None
        name = name.removeprefix("U")
        if name == "LEA" and not kinds and rest[2] == "0x18" and given[0] is None and given[1] is not None:
            # the base of shared memory: 0 is where the program's begins
            return Value(given[1].vector - 0x400)
        if "X" in kinds:
            return None
        if name == "SEL" and given[2] is None:
            return same(*given[:2])
        if name == "LOP3":
            given = _without_unread(given)
        found = self.computed(name, kinds, given)
        if found is not None and first:
            return found, None if found.free else Value(found.vector != 0)
        return found

    def _packed(self, operands: tuple[str, ...], state: State) -> Value | None:
        mask, old = int(operands[2], 0), self.value(operands[1], state)
        bits = {i: state.get(f"P{i}") for i in range(7) if mask >> i & 1}
        if old is None or old.free or any(bit is None or bit.free for bit in bits.values()):
            return None
        found = old.vector
        for i, bit in bits.items():
            assert bit is not None
            found = found & ~np.uint32(1 << i) | (bit.vector * np.uint32(1 << i))
        return Value(found)

    def _compared(self, kinds: list[str], operands: tuple[str, ...], state: State) -> tuple[Value | None, ...] | None:
        given = [self.value(operand, state) for operand in operands[:3]]
        comparison = _COMPARED.get(kinds[0].lower())
        values = [value for value in given if value is not None]
        if len(values) < 3 or comparison is None:
            return None
        a, b, also = (value.vector for value in values)
        if any(value.free for value in values):
            is_one = a.size == b.size == also.size == 1
            return (Value(np.zeros(1, dtype=bool), True),) * 2 if is_one else None
        found = comparison(*((a, b) if "U32" in kinds else (signed(a), signed(b))))
        join = {"AND": np.logical_and, "OR": np.logical_or, "XOR": np.logical_xor}[kinds[-1]]
        return Value(narrowed(join(found, also))), Value(narrowed(join(~found, also)))

    def function(self, name: str, kinds: list[str], values: list[Vector]) -> Vector | None:
        a, b, c = [*values, *[constant(0)] * 2][:3]
        if name in ("MOV", "R2UR"):
            return a
        if name == "IMAD":
            return None if "HI" in kinds else a * b + c
        if name == "IADD3":
            return a + b + c
        if name == "VIADD":
            return a + b
        if name == "LOP3":
            return bit_table(a, b, c, int(values[3][0]))
        if name == "LEA":
            if kinds == ["HI"]:
                by = values[3]
                return shift_left(c, by) + shift_right(a, 32 - by) + b
            return shift_left(a, c) + b if not kinds else None
        if name == "SHF":
            if kinds == ["L", "U32"]:
                return shift_left(a, b)
            if kinds[0] == "R" and kinds[-1] == "HI" and "W" not in kinds:
                return shift_right(c, b) if "U32" in kinds else shift_signed(c, b) if "S32" in kinds else None
            return None
        if name == "SGXT":
            moved = shift_left(a, 32 - b)
            return shift_right(moved, 32 - b) if kinds == ["U32"] else shift_signed(moved, 32 - b)
        if name == "PRMT":
            return permuted(a, c, b)
        if name == "SEL":
            return np.where(c, a, b)
        if name in ("IMNMX", "VIMNMX"):
            low = np.minimum(a, b) if "U32" in kinds else np.minimum(signed(a), signed(b)).view(np.uint32)
            high = np.maximum(a, b) if "U32" in kinds else np.maximum(signed(a), signed(b)).view(np.uint32)
            return np.where(c, low, high)
        return None


def _without_unread(given: list[Value | None]) -> list[Value | None]:
    """Operands of a bitwise function; 0 for the third if it is unknown and the result is the same whatever it is."""
    a, b, c, table, *_ = given
    if c is not None or a is None or b is None or table is None or a.free or b.free:
        return given
    number, zero = int(table.vector[0]), constant(0)
    if (bit_table(a.vector, b.vector, zero, number) == bit_table(a.vector, b.vector, ~zero, number)).all():
        return [a, b, Value(zero), table]
    return given


def _leading_predicates(operands: tuple[str, ...]) -> list[str]:
    """Carries, between an addition's target and what it adds."""
    found = []
    for operand in operands:
        if not re.match(r"U?P\d$|U?PT$", operand):
            break
        found.append(operand)
    return found if len(found) < len(operands) else []


class Judged(NamedTuple):
    wrong: list[str]  # accesses at addresses that the other code has not
    followed: int  # whose addresses are known
    accesses: int


def judged(ptx: str, listing: str) -> Judged:
    """Of one kernel, by its PTX and its machine code as text."""
    found = _THREADS.search(ptx)
    assert found is not None
    threads = int(found[1])
    meant, made = Ptx(threads), Sass(threads)
    meant.run(ptx)
    made.run(listing)
    wrong = [line for kind, line in made.without(meant) if kind not in meant.unknown]
    # ptxas leaves out loads that nothing reads
    stores = {"STS", "STSM", "copy"}.difference(made.unknown)
    wrong += [f"nowhere: {line}" for kind, line in meant.without(made) if kind in stores]
    count = sum(kind not in meant.unknown for kind in made.kinds) - sum(
        kind not in meant.unknown for kind in made.unknown
    )
    return Judged(wrong, count, len(made.kinds))


def _pattern(vector: bytes) -> bytes:
    """How far each thread's address is from the first thread's."""
    x = np.frombuffer(vector, dtype=np.uint32)
    return (x - x[:1]).tobytes()


def wrong_addresses(ptx: str, cubin: bytes) -> list[str]:
    """Accesses of the machine code at addresses that the PTX has not, and stores of the PTX that it has not."""
    return judged(ptx, listing_of(cubin)).wrong


# K and V: narrow ones of one tile, some of several tiles, the widest.
DIMS = (
    (64, 16), (32, 16), (64, 64), (128, 16), (128, 128), (16, 16), (64, 128), (48, 32), (256, 64), (96, 96), (256, 256),
    (128, 512),
)  # fmt: skip
OPERATORS_WITH_KERNELS = ("delta", "gated_delta", "kda", "gla", "scalar_decay", "fixed_decay", "gsa")


class Row(NamedTuple):
    """One kernel of a case."""

    operator: str
    case: str
    kernel: str
    registers: int
    stack: int
    followed: int
    accesses: int
    wrong: str


def rows_of(operator: str, heads: tuple[int, int], dims: tuple[int, int], documents: bool) -> list[Row]:
    """The kernels of the case."""
    from tests.support.kernel_cases import KernelCase, compiling  # late, for it imports this
    from zeco_train.ops.operator import Target, assume

    found: list[Row] = []
    what = f"{heads} {dims} {'documents' if documents else ''}"

    def seen(name: str, made: Any) -> None:
        kernel = judged(made.asm["ptx"], listing_of(made.asm["cubin"]))
        found.append(Row(operator, what, name, *usage(made.asm["cubin"]), *kernel[1:], "; ".join(kernel.wrong[:3])))

    case = KernelCase(operator, 65, (1, *heads, *dims), documents=(0, 6) if documents else None)
    try:
        with compiling(90, seen), assume(Target("cuda", (9, 0))):
            case.found(case.tensors(torch.bfloat16, torch.device("cpu")))
    except AssertionError:
        if not any(row.wrong for row in found):  # not `compiling`, of what has a row
            raise
    return found


def table_of(rows: list[Row]) -> Iterator[str]:
    """A line for each kernel, with the largest numbers, and one for each wrong one."""
    yield f"{'operator':<13} {'kernel':<22} cases registers stack accesses  judged wrong"
    rows = sorted(rows, key=lambda row: (row.operator, row.kernel, row.case))
    for (operator, kernel), group in itertools.groupby(rows, key=lambda row: (row.operator, row.kernel)):
        own = [*group]
        accesses, followed = (sum(getattr(row, name) for row in own) for name in ("accesses", "followed"))
        yield (
            f"{operator:<13} {kernel:<22} {len({row.case for row in own}):>5} {max(row.registers for row in own):>9}"
            f" {max(row.stack for row in own):>5} {accesses:>8} {followed / max(1, accesses):>7.1%}"
            f" {sum(bool(row.wrong) for row in own):>5}"
        )
    for row in rows:
        if row.wrong:
            yield f"{row.operator} {row.case} {row.kernel}: {row.wrong}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default=",".join(OPERATORS_WITH_KERNELS), help="these operators")
    parser.add_argument("--dims", type=int, default=len(DIMS), help="the first so many")
    arguments = parser.parse_args()
    rows: list[Row] = []
    for number, dims in enumerate(DIMS[: arguments.dims]):
        for operator in arguments.only.split(","):
            # with heads that share keys, or without documents, in turn
            other = ((1, 2), True) if number % 2 == 0 else ((1, 1), False)
            for heads, documents in ((1, 1), True), other:
                rows += rows_of(operator, heads, dims, documents)
                print(*rows[-1], file=sys.stderr, flush=True)
    print(*table_of(rows), sep="\n")


if __name__ == "__main__":
    main()
