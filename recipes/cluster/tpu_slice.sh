#!/bin/bash
# %%mark
# Trains %%layout on every host of a Cloud TPU slice; words after the command come last:
#   %%command
# 1. The same command starts on all hosts; JAX finds the others by itself (run.distributed=auto).
# 2. dp*pp*fsdp*ep*tp*cp of the mesh is the number of chips in the slice.
# 3. Every host has ppctl (`pip install 'ppctl[tpu]'`), and run.dir on a file system that all hosts mount.
# 4. Before maintenance or preemption a host gets SIGTERM: all processes save the same step before they leave.
# 5. The same line resumes; a crash is started again MAX_RESTARTS times at most. Exit codes 2 (wrong request) and 4 (loss not
#    finite) are final.
set -uo pipefail
set -- %%request "$@"

: "${TPU_NAME:?the name of the slice}" "${ZONE:?the zone of the slice}"
MAX_RESTARTS=${MAX_RESTARTS:-10}
request=$(for word in "$@"; do printf ' %q' "$word"; done)

for ((restarts = 0; ; restarts++)); do
  gcloud compute tpus tpu-vm ssh "$TPU_NAME" --zone="$ZONE" --worker=all \
    --command="ppctl train run.distributed=auto run.platform=tpu$request"
  code=$?
  case $code in
    0 | 2 | 4) exit "$code" ;;
  esac
  if ((restarts >= MAX_RESTARTS)); then
    echo "ppctl: exit code $code after $restarts restarts (MAX_RESTARTS=$MAX_RESTARTS)" >&2
    exit "$code"
  fi
  echo "ppctl: exit code $code, restart $((restarts + 1)) of $MAX_RESTARTS" >&2
done
