#!/usr/bin/env bash
# Generate the Python code of proto/ratoon, protoc's and ours, into a folder: scripts/proto.sh DESTINATION
# With --check, generate into a temporary folder instead and compare with what is checked in.
#
# The virtual path ratoon_proto/v1 is mapped onto proto/ratoon/v1, so that the generated modules
# import each other as ratoon_proto.v1 and leave the name `ratoon` to the service. The Tinker wire's
# messages (ratoon_proto/tinker) have neither RPCs nor value classes.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

bin="$PWD/.venv-proto/bin"
checked_in=proto/src

generate() {
  local destination=$1 sources=() file
  for file in proto/ratoon/v1/*.proto; do sources+=("ratoon_proto/v1/${file##*/}"); done
  local protoc=("$bin/python" -m grpc_tools.protoc -Iratoon_proto/v1=proto/ratoon/v1)
  PATH="$bin:$PATH" "${protoc[@]}" \
    --python_out="$destination" --mypy_out="quiet:$destination" "${sources[@]}"
  PATH="$bin:$PATH" "$bin/python" -m grpc_tools.protoc -Iratoon_proto/tinker=proto/ratoon/tinker \
    --python_out="$destination" --mypy_out="quiet:$destination" ratoon_proto/tinker/tinker.proto
  # Only service.proto declares a service; the other files' gRPC modules would be empty.
  PATH="$bin:$PATH" "${protoc[@]}" \
    --grpc_python_out="$destination" --mypy_grpc_out="quiet:$destination" \
    ratoon_proto/v1/service.proto
  # Comments are not in the generated code; the OpenAPI document has them.
  local set=$destination/descriptors.tmp
  "${protoc[@]}" --include_source_info --descriptor_set_out="$set" "${sources[@]}"
  local comments=$destination/ratoon_proto/v1/comments.json
  "$bin/python" scripts/proto_comments.py "$set" >"$comments"
  PYTHONPATH=$checked_in "$bin/python" scripts/proto_types.py "$set" "$comments" \
    >"$destination/ratoon_proto/types.py"
  rm "$set"
}

list_generated() {
  (cd "$1" && find ratoon_proto \( -name '*_pb2*.py*' -o -name comments.json -o -path ratoon_proto/types.py \) -not -path '*/__pycache__/*' | sort)
}

check() {
  local fresh
  fresh=$(mktemp -d)
  # The path is fixed now: `fresh` is out of scope when the trap runs.
  # shellcheck disable=SC2064
  trap "rm -rf '$fresh'" EXIT
  generate "$fresh"
  if ! diff <(list_generated "$checked_in") <(list_generated "$fresh"); then
    echo "proto: the checked-in files are not those that protoc writes; run 'make proto'" >&2
    return 1
  fi
  local file
  for file in $(list_generated "$fresh"); do
    if ! cmp "$checked_in/$file" "$fresh/$file"; then
      echo "proto: $checked_in/$file is stale; run 'make proto'" >&2
      return 1
    fi
  done
  echo "proto: generated code is fresh"
}

case "${1:-}" in
  --check) check ;;
  "") echo "usage: scripts/proto.sh DESTINATION | --check" >&2; exit 2 ;;
  *) generate "$1" ;;
esac
