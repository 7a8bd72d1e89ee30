#!/usr/bin/env bash
# Question: has fla's model of an export the logits, and with the same seed the texts, of this package's?
# Command: lab/check_export.sh
# Date: 2026-11-21, a3b3abd, gla_340m after 20 steps, one GPU
# Answer: yes, logits differ by 8.5e-7 in fp32 and 5.0e-3 in bf16, and all 64 tokens are the same.
# Takes a minute, and up to 10 more if fla has not tuned its kernels for these shapes before.
# usage: lab/check_export.sh [KEY=VALUE ...]      settings of train.py, default: model=gla_340m with byte tokens
#   RUN      an existing run, instead of training one
#   OUT      folder for all results, default: a new temporary folder
#   STEPS    default 20
#   VENV=none   use the packages of $PYTHON (default: python of the PATH), install nothing
# Without a GPU it only exports, and trains one step from the export.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/../launch/environment.sh" "gpu" "$@"
cd "$root"

out="${OUT:-$(mktemp -d)}"
mkdir -p "$out"
settings=("$@")
[ "${#settings[@]}" -gt 0 ] || settings=(model=gla_340m model.vocab_size=259)
small=(data.seq_len=2048 data.global_batch=1 train.eval_sequences=1 "train.steps=${STEPS:-20}" checkpoint.every=0)
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"

if [ -z "${RUN:-}" ]; then
  RUN="$out/run"
  "$PYTHON" train.py name=check_export run_dir="$RUN" "${small[@]}" "${settings[@]}"
fi
"$PYTHON" -m zeco_train.export "$RUN" "$out/export"
if [ "$("$PYTHON" -c 'import torch; print(torch.cuda.device_count())')" -gt 0 ]; then
  # Otherwise fla's fp32 matmuls use tf32.
  TRITON_F32_DEFAULT=ieee timeout 1200 "$PYTHON" -m zeco_train.hf.parity "$out/export"
else
  echo "no GPU: fla's model was not compared"
  # Take the model's shape from the export: RUN may have been trained with other settings.
  shape='import json, sys
for key, value in json.load(open(sys.argv[1]))["config"]["model"].items(): print(f"model.{key}={json.dumps(value)}")'
  mapfile -t model < <("$PYTHON" -c "$shape" "$out/export/zeco_train.json")
  "$PYTHON" train.py name=check_import run_dir="$out/on" "${small[@]}" "${settings[@]}" "${model[@]}" \
    train.steps=1 checkpoint.load="hf:$out/export"
fi
echo "results in $out"
