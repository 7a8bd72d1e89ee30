#!/usr/bin/env bash
# Does a state cross ranks in training? A model of two small layers learns to recall values by their keys, the keys on one
# rank and the questions on the other, and is asked with the scan on and with the incoming states zeroed.
# usage: launch/recall.sh [KEY=VALUE ...]      settings of train.py, alike for all stages
#   NPROC    ranks, default 2; even, so that keys and questions lie apart
#   RUN_DIR  where the runs go, a folder each, default runs/recall; started again, it goes on where it was
#   VENV=none   use the packages of $PYTHON (default: python of the PATH), install nothing
# Three runs, each from the weights of the one before: the mechanism first, where a question may also be answered by an
# earlier one; then questions that only the states of the other rank answer, among four pairs and among two.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh" ""
cd "$root"

run_dir="${RUN_DIR:-runs/recall}"
nproc="${NPROC:-2}"
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"

stage() { # NAME FROM SETTINGS…
  local name="$1" load="$2"
  shift 2
  "$PYTHON" -m torch.distributed.run --standalone --nproc-per-node "$nproc" train.py +experiment=gla_recall \
    "name=$name" "run_dir=$run_dir/$name" ${load:+"checkpoint.load=$run_dir/$load"} "$@"
}

short=(data.seq_len=32 data.global_batch=64 data.micro_batch=64 optim.lr=5e-3)
stage mechanism "" "$@"
stage four "mechanism" "${short[@]}" data.synthetic.queries=4 train.steps=1000 "$@"
stage two "four" "${short[@]}" data.synthetic.facts=2 data.synthetic.queries=2 train.steps=450 \
  sched.warmup_steps=10 "$@"
"$PYTHON" -m torch.distributed.run --standalone --nproc-per-node "$nproc" -m zeco_train.evaluate "$run_dir/two" \
  --tasks recall recall.depths=0 recall.examples=500 recall.zeroed=true
