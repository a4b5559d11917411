#!/usr/bin/env bash
# Install the four distributions of this checkout into a virtual environment. All that they need is of
# the versions and SHA-256 digests of torch.lock and requirements.lock (scripts/lock.sh writes them).
#
#   deploy/install.sh VENV [cpu|cuda]
#
# cpu   torch's CPU build (about 0.2 GB; the default one has 3 GB), from TORCH_INDEX where that is set,
#       else from PyTorch's own index: of the lock's version, but by whatever digest that index gives
# cuda  torch's default build, which brings its CUDA libraries; the kernels are compiled ahead, which
#       needs no GPU
#
# Honoured: PYTHON (default python3), TORCH_INDEX, PIP_* as pip reads them.
set -euo pipefail

if [ $# -lt 1 ] || [ $# -gt 2 ]; then
  echo "usage: $0 VENV [cpu|cuda]" >&2
  exit 2
fi
venv=$1
device=${2:-cpu}
case "$device" in
  cpu | cuda) ;;
  *)
    echo "$0: device is '$device', expected cpu or cuda" >&2
    exit 2
    ;;
esac

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
python=${PYTHON:-python3}
"$python" - <<'EOF'
import sys
if sys.version_info < (3, 11):
    sys.exit(f"python is {sys.version.split()[0]}, Ratoon needs 3.11 or newer")
EOF

"$python" -m venv "$venv"
# The locks name all that is needed; pip is not to look for more.
pip=("$venv/bin/python" -m pip install --quiet --disable-pip-version-check --no-deps)
"${pip[@]}" --require-hashes --requirement "$root/deploy/requirements.lock"
torch=$(grep --only-matching --extended-regexp '^torch==[0-9.]+' "$root/deploy/torch.lock")
if [ "$device" = cuda ]; then
  "${pip[@]}" --require-hashes --requirement "$root/deploy/torch.lock"
elif [ -n "${TORCH_INDEX:-}" ]; then
  "${pip[@]}" --index-url "$TORCH_INDEX" "$torch"
else
  # Which knows where that index is; nothing needs it later.
  "$venv/bin/uv" pip install --quiet --python "$venv/bin/python" --no-deps --torch-backend cpu "$torch"
fi
"$venv/bin/python" -m pip --quiet --disable-pip-version-check uninstall --yes uv
# Built from a copy: the checkout may be read-only, and a build writes beside the sources.
build=$(mktemp -d)
trap 'rm -rf "$build"' EXIT
for part in proto kernels clients/python service; do
  mkdir -p "$build/$part"
  # Links, to the license, the examples and the like, as what they lead to.
  cp -RL "$root/$part"/{pyproject.toml,README.md,LICENSE,src} "$build/$part/"
  find "$build/$part/src" \( -name '*.egg-info' -o -name cubins \) -prune -exec rm -rf {} +
done
# With the lock's setuptools: a build of its own environment would fetch another.
"${pip[@]}" --no-build-isolation "$build"/{proto,kernels,clients/python,service}
"$venv/bin/python" -m pip --disable-pip-version-check check >/dev/null
if [ "$device" = cuda ]; then
  "$venv/bin/python" -m ratoon_kernels.jit.prebuild
fi
"$venv/bin/ratoon" --help >/dev/null
echo "installed in $venv ($device)"
