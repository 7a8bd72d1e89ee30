# Sourced by the other scripts: creates the virtual environment in $VENV (default .venv) if needed, and activates it.
# usage: source launch/environment.sh [EXTRA [ARGUMENT ...]]
#   EXTRA      a set of optional dependencies of pyproject.toml
#   ARGUMENT   the calling script's arguments: on -h or --help, prints its first comment and exits
# VENV=none uses $PYTHON (default python, or python3) and installs nothing: for machines that have all packages.

extra="${1:-}"
case " ${*:2} " in *" -h "* | *" --help "*) sed -n '2,/^[^#]/s/^# \{0,1\}//p' "$0" && exit ;; esac
root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
VENV="${VENV:-$root/.venv}"

fail() {
  echo "error: $*" >&2
  exit 1
}

find_python() {
  local candidate
  for candidate in "${PYTHON:-}" python3 python3.13 python3.12 python3.11; do
    if [ -n "$candidate" ] && "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
      echo "$candidate"
      return
    fi
  done
  return 1
}

install() {
  local stamp="$VENV/.zeco-train-${extra:-base}" want log
  # The folder is part of the stamp: the editable install points to it.
  want="$root $(cksum <"$root/pyproject.toml")"
  [ "$(cat "$stamp" 2>/dev/null)" = "$want" ] && return
  if [ ! -x "$VENV/bin/python" ]; then
    local python
    python="$(find_python)" || fail "no Python ≥ 3.11 found; install one, or name it: PYTHON=/path/to/python3 $0"
    echo "making a virtual environment in $VENV"
    "$python" -m venv "$VENV" || fail "$python -m venv $VENV failed (Debian and Ubuntu: apt install python3-venv)"
  fi
  log="$VENV/install.log"
  echo "installing packages (log: $log)"
  {
    # Keep an existing torch, for example that of a GPU machine.
    "$VENV/bin/python" -c 'import torch' 2>/dev/null || "$VENV/bin/python" -m pip install torch==2.13.0
    "$VENV/bin/python" -m pip install -e "$root${extra:+[$extra]}"
  } >"$log" 2>&1 || {
    tail -n 5 "$log" >&2
    fail "pip could not install the packages; the whole output is in $log"
  }
  echo "$want" >"$stamp"
}

if [ "$VENV" = none ]; then
  PYTHON="${PYTHON:-$(command -v python || command -v python3 || echo python)}"
  # Found, not imported: that would take two seconds.
  "$PYTHON" -c 'import sys; from importlib.util import find_spec
assert sys.version_info >= (3, 11) and all(map(find_spec, ("torch", "hydra", "matplotlib")))' 2>/dev/null ||
    fail "VENV=none: $PYTHON must be a Python ≥ 3.11 that has the packages of pyproject.toml; or unset VENV"
  return
fi

# Scripts started concurrently must not both install.
mkdir -p "$(dirname "$VENV")"
if command -v flock >/dev/null; then
  exec 9>"$VENV.lock"
  flock 9
fi
install
exec 9>&-
export PATH="$VENV/bin:$PATH"
PYTHON="$VENV/bin/python"
