#!/usr/bin/env bash
# Train a small GLA language model on real text, each sequence split over ranks by ZeCO: on the GPUs there are, or on
# two CPU processes. Leaves runs/quickstart with a plot.
# usage: launch/quickstart.sh [KEY=VALUE ...]
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh" ""
cd "$root"

ranks="$(python -c 'import torch; print(torch.cuda.device_count() or 2)')"
run_dir=runs/quickstart
# Its own earlier result is replaced; a folder that is not a run's is left for train.py to refuse.
if [ -f "$run_dir/identity.json" ]; then rm -rf "$run_dir"; fi

export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
exec torchrun --standalone --nproc-per-node "$ranks" train.py +experiment=quickstart name=quickstart "$@"
