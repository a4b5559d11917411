#!/usr/bin/env bash
# Run the CUDA kernels under compute-sanitizer's memcheck and racecheck and record what they say:
#   scripts/sanitize-gpu.sh [RESULT]      (benchmarks/results/h200/sanitizer.json)
# Exits 0 where both are clean and all values are right. PYTHON names the interpreter.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

result=${1:-benchmarks/results/h200/sanitizer.json}
python=${PYTHON:-$([ -x .venv/bin/python ] && echo .venv/bin/python || echo python3)}
sanitizer=${COMPUTE_SANITIZER:-compute-sanitizer}
logs=$(mktemp -d)
trap 'rm -rf "$logs"' EXIT

# With the caching allocator tensors share allocations, and a read past one of them is in another.
export PYTORCH_NO_CUDA_MEMORY_CACHING=1

entries=()
for tool in memcheck racecheck; do
  status=0
  # The statuses of API calls are checked by their callers; cuda-bindings probes for symbols.
  [ "$tool" = memcheck ] && options=(--report-api-errors no) || options=()
  "$sanitizer" --tool "$tool" "${options[@]}" --error-exitcode 1 \
    "$python" -m tests.kernels.sanitize_case >"$logs/$tool" 2>&1 || status=$?
  entries+=("$tool:$status:$logs/$tool")
done
"$python" -m benchmarks.kernels.sanitizer --out "$result" "${entries[@]}"
