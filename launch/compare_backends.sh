#!/usr/bin/env bash
# Train the same model on the same data with each backend in turn, on all ranks, and compare the loss curves: a table,
# compare.png and compare.json. The losses of different backends differ by rounding only.
# usage: launch/compare_backends.sh [KEY=VALUE ...]      settings of train.py, the same for all backends
#   BACKENDS        default: all, dp first; zeco:ALGORITHM[:TRANSPORT] sets sp.all_scan; the baseline comes first
#   NPROC           ranks, default: the number of GPUs, else 2
#   RUN_DIR         parent of the runs' folders, default runs/compare
#   MAX_DIFFERENCE  exit code 1 if a relative difference of losses exceeds this; default: only reported
#   CHECKPOINTS     keep: keep the runs' last checkpoints; default: delete them, as they are large
#   VENV=none       use the packages of $PYTHON (default: python of the PATH), install nothing
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh" "" "$@"
cd "$root"

for key in sp name run_dir; do
  [[ " $*" != *" $key="* ]] || fail "$key: set by this script; see BACKENDS and RUN_DIR in its first lines"
done
known="$("$PYTHON" -c 'from zeco_train.sp.backend_registry import BACKENDS; print(*BACKENDS)')"
backends="${BACKENDS:-$known}"
run_dir="${RUN_DIR:-runs/compare}"
nproc="${NPROC:-$("$PYTHON" -c 'import torch; print(torch.cuda.device_count() or 2)')}"
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"

folders=()
for backend in $backends; do
  IFS=: read -r sp algorithm transport rest <<<"$backend"
  [ -z "$rest" ] || fail "BACKENDS: $backend: must be one of $known, or zeco:ALGORITHM:TRANSPORT"
  folder="$run_dir/${backend//:/_}"
  folders+=("$folder")
  [ "${CHECKPOINTS:-}" = keep ] || ! compgen -G "$folder/checkpoints/step_*" >/dev/null ||
    fail "RUN_DIR: $folder has checkpoints already, which are not this script's to delete; CHECKPOINTS=keep keeps them"
  # An earlier comparison without checkpoints starts anew.
  anew=()
  [ "${CHECKPOINTS:-}" = keep ] || anew=(checkpoint.missing=start_anew)
  echo "== $backend"
  "$PYTHON" -m torch.distributed.run --standalone --nproc-per-node "$nproc" train.py train.log_every=1 \
    ${anew[@]+"${anew[@]}"} "$@" \
    sp="$sp" ${algorithm:+sp.all_scan.algorithm="$algorithm"} ${transport:+sp.all_scan.transport="$transport"} \
    name="$(basename "$folder")" run_dir="$folder"
  [ "${CHECKPOINTS:-}" = keep ] || rm -rf "$folder/checkpoints"
done
"$PYTHON" -m zeco_train.compare "${folders[@]}" --out "$run_dir" ${MAX_DIFFERENCE:+--max-difference "$MAX_DIFFERENCE"}
