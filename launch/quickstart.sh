#!/usr/bin/env bash
# Train a small GLA language model on real text, each sequence split over ranks by ZeCO: on the GPUs there are, or on
# two CPU processes. Leaves runs/quickstart with a plot, and ends with a sample of what the model writes.
# usage: launch/quickstart.sh [KEY=VALUE ...]
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh" ""
cd "$root"

# The largest power of two that there are GPUs for, so that it divides the sequence's length.
ranks="$(python -c 'import torch; n = torch.cuda.device_count(); print(1 << n.bit_length() - 1 if n else 2)')"
run_dir=runs/quickstart
# Its own earlier result is replaced, unless it is another folder's turn or somebody is still training there. What is
# not a run's folder is left for train.py to refuse.
if [ -f "$run_dir/identity.json" ] && [[ " $*" != *" run_dir="* && " $*" != *" name="* ]]; then
  if command -v flock >/dev/null; then
    flock -n "$run_dir/lock" rm -rf "$run_dir" || fail "run_dir=$run_dir: another process is training there; end it first"
  else
    rm -rf "$run_dir"
  fi
fi

export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
torchrun --standalone --nproc-per-node "$ranks" train.py +experiment=quickstart name=quickstart "$@"

for setting in "$@"; do
  case "$setting" in
    -h | --help) exit 0 ;;
    name=*) run_dir="runs/${setting#name=}" ;;
  esac
done
for setting in "$@"; do
  case "$setting" in
    run_dir=*) run_dir="${setting#run_dir=}" run_dir="${run_dir#[\'\"]}" run_dir="${run_dir%[\'\"]}" ;;
  esac
done
prompt="def main("
sample=(python -m zeco_train.generate "$run_dir" --max-tokens 200 --temperature 0.7)
printf '\n%s --prompt "%s"\n%s' "${sample[*]}" "$prompt" "$prompt"
"${sample[@]}" --prompt "$prompt"
