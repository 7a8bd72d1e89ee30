#!/usr/bin/env bash
# Run the tests, several files at once. The default leaves out those marked `slow`: every room and every claim of
# exactness, in five minutes on two quiet cores. --all: every test, in eighteen.
# usage: launch/test.sh [--all] [PYTEST_ARGUMENT ...]
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh" dev
cd "$root"

marks="not slow"
[ "${1:-}" != --all ] || { marks="" && shift; }
# By file, as fixtures are shared by a file's tests, in the order of tests/conftest.py. Each worker runs one test at a
# time, which may start some ranks; half of them wait for processes or clocks, so there is one worker more than cores.
cores="$(getconf _NPROCESSORS_ONLN)"
workers=$((cores < 5 ? cores + 1 : 8))
exec python -m pytest -m "$marks" --numprocesses "$workers" --dist loadfile --no-loadscope-reorder "$@"
