"""Question: how many tokens can keys and values be gathered of, until memory ends? (ZeCO, Figure 3: 128 GPUs run out)
Command: torchrun --nproc-per-node 2 -m lab.paper.gather_end [GB] > FILE
Date: 2026-11-28, 2 × H100 (80 GB)
Answer: 1,261,568 tokens, as on 154 GPUs; the planner's formula says 148 of 80 GB. docs/papers.md.

The paper's 8,192 tokens a GPU on P GPUs are 8,192 P tokens on each of them after the gather, on however few GPUs. So
each rank has tokens / ranks, 32 heads of 128 in bf16, gathers keys and values as `sp.attention=all_gather` does, and
keeps beside them their gradients in fp32, as the backward pass does. Out of memory is an answer, not an error.
"""

from __future__ import annotations

import json
import math
import os
import sys
from datetime import timedelta

import torch
import torch.distributed as dist

from zeco_train.collectives.wire import Wire
from zeco_train.sp.attention.all_gather import AllGather
from zeco_train.system.command import Parser, docstring

HEADS, DIM = 32, 128
_LONGEST = 1 << 24


def fits(tokens: int, method: AllGather, device: torch.device, limit: float) -> bool:
    """Whether a rank's memory holds the gathered keys and values of a sequence of `tokens`; the same on all ranks."""
    own, enough = tokens // dist.get_world_size(), True
    # Keys and values of a rank and of all, and gradients in fp32.
    if HEADS * DIM * (2 * 2 * own + 2 * (2 + 4) * tokens) > limit:
        return False
    try:
        k, v = (torch.zeros(1, own, HEADS, DIM, dtype=torch.bfloat16, device=device) for _ in range(2))
        # A rank that cannot must not leave the others in a collective: the room is asked for before.
        room = [torch.empty(tokens * HEADS * DIM * size, dtype=torch.uint8, device=device) for size in (2, 2, 4, 4)]
        del room
    except torch.OutOfMemoryError:
        enough = False
    answer = torch.tensor(int(enough), device=device)
    dist.all_reduce(answer, op=dist.ReduceOp.MIN)
    if not answer.item():
        return False
    try:
        kept = method.gather([k, v], range(0, tokens + 1, own))
        kept += [torch.empty(x.shape, dtype=torch.float32, device=device) for x in kept]
    except torch.OutOfMemoryError:
        enough = False
    answer.fill_(int(enough))
    dist.all_reduce(answer, op=dist.ReduceOp.MIN)
    return bool(answer.item())


def main(limit: float) -> None:
    """Bisect, and print a line of JSON on the first rank."""
    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if on_gpu else "gloo", timeout=timedelta(seconds=60))
    method = AllGather(Wire(dist.new_group(), "gather", False, timedelta(seconds=60)))
    step = 8_192 * dist.get_world_size()
    most, least = _LONGEST // step, 0
    while most - least > 1:
        middle = (least + most) // 2
        if fits(middle * step, method, device, limit):
            least = middle
        else:
            most = middle
        if on_gpu:
            torch.cuda.empty_cache()
    if dist.get_rank() == 0:
        memory = torch.cuda.get_device_properties(device).total_memory / 1e9 if on_gpu else limit / 1e9
        device_name = torch.cuda.get_device_name() if on_gpu else "CPU"
        found = {"device": device_name, "ranks": dist.get_world_size(), "memory_gb": memory, "tokens": least * step}
        print(json.dumps(found | {"gpus_of_8192": least * step // 8_192}), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    parser = Parser(prog="python -m lab.paper.gather_end", description=docstring(sys.modules[__name__]))
    parser.add_argument("limit", type=float, nargs="?", default=math.inf, help="GB of a rank; default: its memory")
    main(1e9 * parser.parse_args().limit)
