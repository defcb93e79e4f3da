#!/usr/bin/env bash
# A run on a Cloud TPU VM of several hosts: the same command on every one of them, over ssh.
#
#   scripts/launch/tpu_vm.sh NAME ZONE --config=configs/llama_8b.py:v5e-16 --workdir=/shared/runs/llama_8b
#
# Needs gcloud here; on every host this repository in ~/jaxlm with its .venv (`pip install '.[tpu]'`), and --workdir and
# the text on a file system that all of them mount. Which host is which, only the metadata server of a TPU VM knows; it
# is asked there, and the answer goes to `jaxlm train` as flags. For several slices take jobset.yaml.
set -euo pipefail
PORT=${PORT:-28476}

on_host() {
  local id endpoints hosts
  ask() {
    curl --silent --fail --header 'Metadata-Flavor: Google' \
      "http://metadata.google.internal/computeMetadata/v1/instance/attributes/$1"
  }
  id=$(ask agent-worker-number)
  endpoints=$(ask worker-network-endpoints) # host,host,... or name:id:address,...
  IFS=, read -ra hosts <<<"$endpoints"
  if [ "${#hosts[@]}" -eq 1 ]; then
    exec "${PYTHON:-.venv/bin/python}" -m jaxlm train --num_processes=1 "$@"
  fi
  exec "${PYTHON:-.venv/bin/python}" -m jaxlm train "$@" \
    --coordinator="${hosts[0]##*:}:$PORT" --num_processes="${#hosts[@]}" --process_id="$id"
}

if [ "${1:-}" = --on-host ]; then
  on_host "${@:2}"
fi
if [ $# -lt 3 ]; then
  echo "usage: $0 NAME ZONE --config=... --workdir=..." >&2
  exit 2
fi
exec gcloud compute tpus tpu-vm ssh "$1" --zone="$2" --worker=all \
  --command="cd jaxlm && PORT=$PORT bash scripts/launch/tpu_vm.sh --on-host$(printf ' %q' "${@:3}")"
