#!/usr/bin/env bash
# Extend a model's sequence length in stages, 16k → 64k → 256k → 1M tokens: one run per stage, each from the weights of
# the previous one. The same command resumes after an interruption; finished stages are skipped.
# usage: launch/length_extension.sh [KEY=VALUE ...]      settings of train.py, the same for all stages
#   launch/length_extension.sh +experiment=gla_1b_extension data=tokens data.path=/data/books checkpoint.load=runs/gla_1b
#   STAGES   SEQ_LEN:GLOBAL_BATCH:STEPS[:SEGMENTS[:SP_SIZE]], in order; the default keeps 1,048,576 tokens per step.
#            More SEGMENTS need less memory; python -m zeco_train.plan estimates it
#   NPROC    ranks, default: the number of GPUs, else 2
#   RUN_DIR  parent of the stages' folders, default runs/extension
#   VENV=none   use the packages of $PYTHON (default: python of the PATH), install nothing
# The first stage starts from checkpoint.load=…, by default from random weights.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh" "" "$@"
cd "$root"

stages="${STAGES:-16384:64:2000:1:1 65536:16:1000 262144:4:500 1048576:1:250}"
run_dir="${RUN_DIR:-runs/extension}"
nproc="${NPROC:-$("$PYTHON" -c 'import torch; print(torch.cuda.device_count() or 2)')}"
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"

load="" settings=()
for setting in "$@"; do
  case "$setting" in
    checkpoint.load=*) load="${setting#checkpoint.load=}" ;;
    name=* | run_dir=* | data.seq_len=* | data.global_batch=* | train.steps=* | train.segments=* | sp.size=*)
      fail "${setting%%=*}: set by this script; see STAGES and RUN_DIR in its first lines" ;;
    *) settings+=("$setting") ;;
  esac
done
number='^[1-9][0-9]*$'
for stage in $stages; do
  IFS=: read -r seq_len batch steps segments sp_size rest <<<"$stage"
  for value in "$seq_len" "$batch" "$steps" "${segments:-1}"; do
    [[ "$value" =~ $number && -z "$rest" ]] ||
      fail "STAGES: $stage: must be SEQ_LEN:GLOBAL_BATCH:STEPS[:SEGMENTS[:SP_SIZE]], numbers ≥ 1, as in 65536:16:1000"
  done
done

count=0
for stage in $stages; do
  IFS=: read -r seq_len batch steps segments sp_size <<<"$stage"
  count=$((count + 1))
  name="stage_${count}_$seq_len"
  echo "== stage $count: $seq_len tokens, $steps steps of $batch sequences${load:+, from the weights of $load}"
  "$PYTHON" -m torch.distributed.run --standalone --nproc-per-node "$nproc" train.py "${settings[@]}" \
    name="$name" run_dir="$run_dir/$name" data.seq_len="$seq_len" data.global_batch="$batch" train.steps="$steps" \
    train.segments="${segments:-1}" sp.size="${sp_size:--1}" ${load:+checkpoint.load="$load"}
  load="$run_dir/$name"
done
