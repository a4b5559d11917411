#!/usr/bin/env bash
# Write deploy/torch.lock and deploy/requirements.lock: what deploy/install.sh installs, by version and
# SHA-256, at the versions of constraints.txt. The first has torch and what only its default build needs.
#   PYTHON  the interpreter that builds our distributions' metadata (python3)
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
"${PYTHON:-python3}" -m venv "$scratch/venv"
"$scratch/venv/bin/python" -m pip install --quiet --disable-pip-version-check uv

parts=(proto kernels clients/python service) own=()
for part in "${parts[@]}"; do
  mkdir -p "$scratch/$part" "$scratch/wheels"
  cp -RL "$part"/{pyproject.toml,README.md,LICENSE,src} "$scratch/$part/"
  "$scratch/venv/bin/python" -m pip wheel --quiet --no-deps --wheel-dir "$scratch/wheels" "$scratch/$part"
done
for wheel in "$scratch"/wheels/*.whl; do
  name=$(basename "$wheel")
  own+=(--no-emit-package "${name%%-*}")
done

# Our distributions are built beside what the lock installs, so setuptools is of it; uv gets torch.
echo 'ratoon[s3]
setuptools>=77
uv' >"$scratch/wanted.txt"
compile() {
  "$scratch/venv/bin/uv" pip compile --quiet --universal --python-version 3.11 --generate-hashes \
    --no-annotate --find-links "$scratch/wheels" --constraint constraints.txt "${own[@]}" \
    --custom-compile-command scripts/lock.sh "$@"
}
compile "$scratch/wanted.txt" >"$scratch/all.lock"
mapfile -t cuda < <(grep --only-matching --extended-regexp '^(torch|triton|cuda-|nvidia-)[a-z0-9-]*' "$scratch/all.lock")
for name in "${cuda[@]}"; do without+=(--no-emit-package "$name"); done
compile "${without[@]}" "$scratch/wanted.txt" >deploy/requirements.lock
mapfile -t others < <(grep --only-matching --extended-regexp '^[a-z0-9-]+' deploy/requirements.lock)
for name in "${others[@]}"; do outside+=(--no-emit-package "$name"); done
compile "${outside[@]}" "$scratch/wanted.txt" >deploy/torch.lock
