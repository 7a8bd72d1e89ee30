#!/usr/bin/env bash
# Question: do the tests pass as another user in a read-only checkout full of old runs, with a read-only home?
# Command: lab/campaigns/read_only.sh (root; works on a copy of the last commit, and only TMPDIR can be written)
# Date: –
# Answer: no result is kept.
# usage: lab/campaigns/read_only.sh [PYTEST_ARGUMENT ...]        default: all tests that are not slow
#   PYTHON  default: python of the PATH; it may lie in the caller's home, all else of which is hidden
set -euo pipefail
python="${PYTHON:-$(command -v python)}"
root="$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)"
place="$(mktemp -d)"
trap 'rm -rf "$place"' EXIT
chmod 755 "$place"
mkdir -m 1777 "$place/tmp"
mkdir "$place/home"
git clone -q "$root" "$place/checkout"
cd "$place/checkout"

export OMP_NUM_THREADS=1 PYTHONDONTWRITEBYTECODE=1 PYTHONPATH="$place/checkout" VENV=none
small=(model.num_layers=1 model.hidden_size=32 model.num_heads=2 data.seq_len=64 train.steps=2 sched.warmup_steps=0 train.device=cpu)
for name in default quickstart compare/dp; do
  ZECO_CACHE="$place/tmp/cache" "$python" train.py +experiment=quickstart "${small[@]}" "run_dir=runs/$name"
done
"$python" -m zeco_train.report runs/default runs/quickstart
for folder in bench family recall sweep extension dashboard many_ranks recall_family; do
  mkdir -p "runs/$folder" && echo "not yours [x](y.md)" >"runs/$folder/README.md"
done
for name in loss.png out exported store wandb nohup.out; do echo "not yours" >"$name"; done
for name in .cache .config .netrc .triton; do echo "not yours" >"$place/home/$name"; done

base="$("$python" -c 'import sys; print(sys.base_prefix)')"
[[ "$base" != "$HOME"/* ]] || hidden="$HOME"
[ $# -gt 0 ] || set -- -m "not slow" tests
export HOME="$place/home" TMPDIR="$place/tmp" GIT_CONFIG_COUNT=1 GIT_CONFIG_KEY_0=safe.directory GIT_CONFIG_VALUE_0='*'
unset XDG_CACHE_HOME HF_HOME
unshare --mount bash -c '
  if [ -n "$1" ]; then
    mkdir "$0/base" && mount --bind "$2" "$0/base"
    mount -t tmpfs -o mode=755 tmpfs "$1" && mkdir -p "$2" && mount --bind "$0/base" "$2"
  fi
  for folder in checkout home; do
    mount --bind "$0/$folder" "$0/$folder" && mount -o remount,bind,ro "$0/$folder"
  done
  exec setpriv --reuid=65534 --regid=65534 --clear-groups "${@:3}"
' "$place" "${hidden:-}" "$base" "$python" -m pytest -p no:cacheprovider "$@"
