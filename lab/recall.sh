#!/usr/bin/env bash
# Question: does training use states across ranks: recall of values, keys on one rank, queries on the other?
# Command: lab/recall.sh
# Date: 2026-11-21, 2 CPU ranks
# Answer: yes, 100 % right, and 6.6 % with the incoming states zeroed (chance 6.2). lab/results/evaluation/README.md
# usage: lab/recall.sh [KEY=VALUE ...]      settings of train.py, the same for all stages
#   NPROC    ranks, default 2; even, so that keys and queries are on different ranks
#   RUN_DIR  parent of the runs' folders, default runs/recall; the same command resumes after an interruption
#   VENV=none   use the packages of $PYTHON (default: python of the PATH), install nothing
# Three runs with 2, 8 and 16 pairs, each from the weights of the previous one. The circuit that binds a value to the
# preceding key forms within some hundred steps if there are only two keys; with more from the start, a model first
# learns to guess among the values seen, and stays there.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/../launch/environment.sh" "" "$@"
cd "$root"

run_dir="${RUN_DIR:-runs/recall}"
nproc="${NPROC:-2}"
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"

device=""
for setting in "$@"; do
  case "$setting" in
    train.device=*) device="$setting" ;;
    name=* | run_dir=* | checkpoint.load=*) fail "${setting%%=*}: set by this script; see RUN_DIR in its first lines" ;;
  esac
done

stage() { # NAME FROM PAIRS QUERIES SEQ_LEN STEPS SETTINGS…
  local name="$1" load="$2"
  local task=(data.synthetic.facts="$3" data.synthetic.keys="$3" data.synthetic.queries="$4" data.seq_len="$5" train.steps="$6")
  shift 6
  "$PYTHON" -m torch.distributed.run --standalone --nproc-per-node "$nproc" train.py +experiment=gla_recall \
    "name=$name" "run_dir=$run_dir/$name" ${load:+"checkpoint.load=$run_dir/$load"} "${task[@]}" "$@"
}

stage stage_1 "" 2 1 16 400 "$@"
stage stage_2 stage_1 8 4 32 1000 "$@"
stage stage_3 stage_2 16 16 64 1600 "$@"
"$PYTHON" -m torch.distributed.run --standalone --nproc-per-node "$nproc" -m zeco_train.evaluate "$run_dir/stage_3" \
  --tasks recall recall.depths=0 recall.examples=500 recall.zeroed=true ${device:+"$device"}
