#!/usr/bin/env bash
# Run the tests, several files in parallel. The default skips those marked `slow`, and still covers every package and
# every claim of exactness; limit: three minutes on two idle cores. --all: every test but those of
# whole matrices (lab/campaigns/matrices.py); limit: twelve minutes.
# usage: launch/test.sh [--all] [PYTEST_ARGUMENT ...]
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh" dev
cd "$root"

# Hundreds of processes would compile all modules again.
unset PYTHONDONTWRITEBYTECODE

marks="not slow"
[ "${1:-}" != --all ] || { marks="not campaign" && shift; }
# Distribute by file, since a file's tests share fixtures, in the order of tests/conftest.py. Each worker runs one test
# at a time, which may start several ranks; half of them wait for processes or timers: one worker more than cores.
cores="$(getconf _NPROCESSORS_ONLN)"
workers=$((cores < 5 ? cores + 1 : 8))
exec python -m pytest -m "$marks" --numprocesses "$workers" --dist loadfile --no-loadscope-reorder "$@"
