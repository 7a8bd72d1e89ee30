#!/usr/bin/env bash
# Train on 32 nodes of 8 GPUs, or any other number, as one Slurm job that resumes automatically after its time limit, a
# preemption, a lost node or a failed rank.
#
# usage: sbatch [sbatch options] launch/slurm_256gpu.sh [--] [KEY=VALUE ...]        settings of train.py
#   sbatch launch/slurm_256gpu.sh +experiment=gla_1b_16k sp.size=8 data.global_batch=32
#   sbatch --nodes 4 --time 2:00:00 --partition h100 launch/slurm_256gpu.sh -- train.steps=1000
#
# The #SBATCH lines below are defaults; sbatch's command line overrides each. Environment variables:
#   RUN_DIR         the run's folder, also after a requeue; default runs/JOBNAME-JOBID, or run_dir=… among the settings.
#                   An earlier job's folder resumes from its last checkpoint
#   PYTHON          default: .venv/bin/python of this repository, else python of the PATH
#   RANKS_PER_NODE  default: the job's GPUs per node; required with --gpus-per-node 0, on CPUs
#   TRAIN_NODES     nodes to train on, if more are allocated: the rest are spares, which replace nodes that fail the
#                   checks; default: all
#   CHECKS          stop (default): a fault found by the checks ends the job; warn: it is only reported; off: no checks
#   RESTARTS        consecutive starts that may fail without a new checkpoint, default 3; a start that fails after a new
#                   checkpoint is always repeated
#   CACHE_DIR       compiled kernels, on each node's own disk; its files are executed, so the folder must be yours and
#                   not writable by others; default /tmp/zeco-cache-UID-RANDOM, a name stored in ~/.cache/zeco-train for
#                   the next job
#   HEAD_ADDRESS, PORT   rendezvous endpoint; default: the first training node, and a random port per start
#   CLUSTER_INTERFACE    network interface of the cluster's own network, for example ib0; default: all interfaces
# Trusted networks only: the connections between ranks (TCPStore, gloo, NCCL) have no authentication, and ranks exchange
# pickled objects over them, so anyone who can connect to them can run code as you. Each start has a random id and port.
# If nodes have more than one network, set CLUSTER_INTERFACE: rendezvous, the checks' clock, the ranks' store, gloo and
# NCCL then listen only on it.
# Save and stop for good: scancel JOB. Save and restart: scancel --batch --signal=USR1 JOB.
#SBATCH --job-name=zeco
#SBATCH --nodes=32
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --exclusive
#SBATCH --mem=0
#SBATCH --time=24:00:00
#SBATCH --signal=B:USR1@300
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=%x-%j.out
set -euo pipefail

say() { echo "$(date +%FT%T) $*"; }
fail() {
  echo "error: $*" >&2
  exit 2
}

[ -n "${SLURM_JOB_ID:-}" ] || fail "this is a script for sbatch: sbatch $0 $*; on one machine: torchrun --standalone train.py"
# Slurm runs a copy of this file, so its path is not that of the repository.
root="$SLURM_SUBMIT_DIR"
if [ ! -f "$root/launch/slurm_node.py" ]; then
  script="$(scontrol show job "$SLURM_JOB_ID" | sed -n 's/^ *Command=\([^ ]*\).*/\1/p')"
  root="$(cd "$(dirname "$script")/.." && pwd)"
fi
[ -f "$root/launch/slurm_node.py" ] || fail "$root is not the repository; submit launch/slurm_256gpu.sh by its path"

[ "${1:-}" != -- ] || shift
settings=()
for setting in "$@"; do
  case "$setting" in
    run_dir=*) RUN_DIR="${RUN_DIR:-${setting#run_dir=}}" ;;
    *) settings+=("$setting") ;;
  esac
done
name="${SLURM_JOB_NAME//[^A-Za-z0-9._-]/_}"
run_dir="${RUN_DIR:-runs/$name-$SLURM_JOB_ID}"
case "$run_dir" in \'*\' | \"*\") run_dir="${run_dir:1:-1}" ;; esac
[[ "$run_dir" = /* ]] || run_dir="$SLURM_SUBMIT_DIR/$run_dir"
[[ " $*" = *" name="* ]] || settings+=("name=$(basename "$run_dir")")
settings+=("run_dir=$run_dir")
[ ! -L "$run_dir/slurm" ] || fail "run_dir=$run_dir: slurm is a link, and this script's files would go elsewhere; remove it"

# Set by --gpus-per-node or by --gres; the first may have a GPU type before the number.
gpus="${SLURM_GPUS_PER_NODE:-${SLURM_GPUS_ON_NODE:-0}}"
gpus="${gpus##*:}"
ranks="${RANKS_PER_NODE:-$gpus}"
[ "$ranks" -gt 0 ] 2>/dev/null || fail "RANKS_PER_NODE=$ranks: the job has no GPUs; say how many ranks a node runs"
nodes="${TRAIN_NODES:-$SLURM_JOB_NUM_NODES}"
[ "$nodes" -gt 0 ] 2>/dev/null && [ "$nodes" -le "$SLURM_JOB_NUM_NODES" ] ||
  fail "TRAIN_NODES=$nodes: must be 1 to $SLURM_JOB_NUM_NODES, the nodes of the job"
[[ "${CHECKS:=stop}" =~ ^(stop|warn|off)$ ]] || fail "CHECKS=$CHECKS: must be stop, warn or off"
[[ "${RESTARTS:=3}" =~ ^[0-9]+$ ]] || fail "RESTARTS=$RESTARTS: must be a number"
[[ "${PORT:=0}" =~ ^(0|[1-9][0-9]{0,8})$ ]] || fail "PORT=$PORT: must be a number"
# Leave room for up to a hundred more, for the starts of a job.
[ "$PORT" = 0 ] || { [ "$PORT" -ge 1024 ] && [ "$PORT" -le 65400 ]; } || fail "PORT=$PORT: must be 1024 to 65400"
if [ -z "${PYTHON:-}" ]; then
  PYTHON="$root/.venv/bin/python"
  [ -x "$PYTHON" ] || PYTHON="$(command -v python || command -v python3)" || fail "PYTHON: no python found; name one"
fi
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
export HEAD_ADDRESS HEAD_PORT RENDEZVOUS_ID
# Ignore TMPDIR, which may exist for this node or job only.
CACHE_DIR="${CACHE_DIR:-$(cd "$root" && env -u TMPDIR "$PYTHON" -m zeco_train.system.code_cache)}" || exit 2
export CACHE_DIR
# How long a launcher waits for its ranks to save after SIGTERM, in addition to Slurm's KillWait and GraceTime.
export TORCH_ELASTIC_SHUTDOWN_TIMEOUT="${TORCH_ELASTIC_SHUTDOWN_TIMEOUT:-120}"

if [ -n "${CLUSTER_INTERFACE:-}" ]; then
  export CLUSTER_INTERFACE GLOO_SOCKET_IFNAME="${GLOO_SOCKET_IFNAME:-$CLUSTER_INTERFACE}"
  # Without the "=" NCCL treats it as a prefix of names.
  export NCCL_SOCKET_IFNAME="${NCCL_SOCKET_IFNAME:-=$CLUSTER_INTERFACE}"
fi

warned="" ended="" step=""
# Sent before the time limit or a preemption: ranks save and exit with code 75.
trap 'warned=1; say "warning signal: saving"; [ -z "$step" ] || kill -USR1 "$step" 2>/dev/null || true' USR1
# Slurm ends the job (scancel, requeue, time limit), and signals the ranks itself.
trap 'ended=1' TERM

# Run one task on each training node; the exit code is the largest of theirs.
on_nodes() {
  local -a where=(--nodes="$1" --ntasks="$1" --ntasks-per-node=1)
  shift
  [ -z "$excluded" ] || where+=(--exclude="$excluded")
  srun "${where[@]}" --cpu-bind=none --kill-on-bad-exit=0 --wait=120 "$@" &
  step=$!
  local code=0
  # Signals interrupt `wait`.
  while kill -0 "$step" 2>/dev/null; do wait "$step" || true; done
  wait "$step" || code=$?
  step=""
  return "$code"
}

newest_checkpoint() { (cd "$run_dir/checkpoints" 2>/dev/null && compgen -G 'step_????????' | sort | tail -n 1) || echo "the start"; }

requeue() {
  say "requeue: $1; goes on from $(newest_checkpoint) of $run_dir"
  scontrol requeue "$SLURM_JOB_ID" || fail "Slurm does not requeue the job; sbatch … run_dir=$run_dir goes on from there"
  # Wait for Slurm to end the job: a job that exits by itself is not requeued.
  while [ -z "$ended" ]; do sleep 1; done
  exit 0
}

# Rendezvous host: HEAD_ADDRESS if given, else the first node that is not excluded.
head_address() {
  local host
  for host in "${hosts[@]}"; do
    [[ ",$excluded," = *",$host,"* ]] || break
  done
  if [ -n "$given_address" ]; then
    echo "$given_address"
  elif [ -n "${CLUSTER_INTERFACE:-}" ]; then
    srun --nodes=1 --ntasks=1 --nodelist="$host" "$PYTHON" "$root/launch/slurm_checks.py" address
  else
    scontrol show node "$host" | sed -n 's/.*NodeAddr=\([^ ]*\).*/\1/p'
  fi
}

# Random bytes, in hexadecimal.
random() { od -An -v -tx1 -N"$1" /dev/urandom | tr -d ' \n'; }

# The first node of the job is that of this script.
check() {
  local checks=("$PYTHON" "$root/launch/slurm_checks.py") report="$output/checks.json" code=0 ready clock
  exec {ready}< <(exec "${checks[@]}" clock)
  clock=$!
  read -r -u "$ready" || exit 2
  on_nodes "$SLURM_JOB_NUM_NODES" "${checks[@]}" node --ranks "$ranks" --run-dir "$run_dir" $([ "$gpus" = 0 ] || echo --gpus) \
    >"$output/checks.txt" || true
  kill "$clock"
  exec {ready}<&-
  [ -z "$warned$ended" ] || return 0
  "${checks[@]}" judge --need "$nodes" --report "$report" <"$output/checks.txt" || code=$?
  excluded="$("$PYTHON" -c 'import json, sys; print(",".join(json.load(open(sys.argv[1]))["bad"]))' "$report" 2>/dev/null)" || true
  # Exclude nodes only if enough remain; otherwise CHECKS=warn trains on all of them.
  [ "$nodes" -lt "$SLURM_JOB_NUM_NODES" ] && [ "$code" -eq 0 ] || excluded=""
  [ "$code" -eq 0 ] || [ "$CHECKS" = warn ] || fail "the checks above found faults (CHECKS=warn starts all the same)"
}

hosts=($(scontrol show hostnames "$SLURM_JOB_NODELIST"))
export NODE_NAMES="${hosts[*]}"
failures=0 excluded="" given_address="${HEAD_ADDRESS:-}"
for ((attempt = 0; ; attempt++)); do
  output="$run_dir/slurm/$SLURM_JOB_ID.${SLURM_RESTART_COUNT:-0}.$attempt"
  mkdir -p "$output"
  # Each attempt uses another port: the previous one may still be in use.
  port="$PORT"
  # Below Linux's ephemeral ports; the next port is used by the checks.
  [ "$port" != 0 ] || port=$((20000 + 0x$(random 2) % 6000 * 2))
  HEAD_PORT=$((port + attempt % 50 * 2)) RENDEZVOUS_ID="$(random 16)"
  say "job $SLURM_JOB_ID, start ${SLURM_RESTART_COUNT:-0}.$attempt: $nodes nodes × $ranks ranks ($SLURM_JOB_NODELIST), $run_dir"
  excluded=""
  HEAD_ADDRESS="$(head_address)" || exit 2
  [ "$CHECKS" = off ] || check
  HEAD_ADDRESS="$(head_address)" || exit 2
  before="$(newest_checkpoint)" code=75
  if [ -z "$warned$ended" ]; then
    code=0
    on_nodes "$nodes" "$PYTHON" "$root/launch/slurm_node.py" --nodes "$nodes" --ranks "$ranks" --output "$output" \
      -- "$root/train.py" ${settings[@]+"${settings[@]}"} || code=$?
  fi
  [ -z "$ended" ] || exit 143
  case "$code" in
    0) say "finished"; exit 0 ;;
    10?) exit "$((code - 100))" ;;
    75) requeue "saved" ;;
  esac
  [ -z "$warned" ] || requeue "the ranks ended with code $code after the warning"
  if [ "$(newest_checkpoint)" = "$before" ]; then failures=$((failures + 1)); else failures=0; fi
  [ "$failures" -le "$RESTARTS" ] ||
    fail "$failures starts in a row failed without a new checkpoint, the last with code $code; see $output"
  say "ranks failed (code $code): starting again from $(newest_checkpoint), $failures of $RESTARTS without a new checkpoint"
done
