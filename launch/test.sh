#!/usr/bin/env bash
# Run the tests. usage: launch/test.sh [pytest arguments]
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh" dev
cd "$root"
exec python -m pytest "$@"
