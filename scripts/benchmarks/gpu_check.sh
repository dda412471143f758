#!/usr/bin/env bash
# Checks values and compares one step with trl on one GPU, 6 minutes at most: bash scripts/benchmarks/gpu_check.sh --help
set -euo pipefail
root=$(cd "$(dirname "$0")/../.." && pwd)
python=python3
if [ -x "$root/.venv/bin/python" ]; then python=$root/.venv/bin/python; fi
export TOKENIZERS_PARALLELISM=false PYTHONWARNINGS=ignore::FutureWarning
if ! "$python" -c "import sys, importlib.util as u; sys.exit(u.find_spec('turngrpo') is None)"; then
  packages=$(mktemp -d) # the repository's root is the package, under whatever name it was checked out
  trap 'rm -rf "$packages"' EXIT
  ln -s "$root" "$packages/turngrpo"
  export PYTHONPATH=$packages${PYTHONPATH:+:$PYTHONPATH}
fi
timeout 360 "$python" "$root/scripts/benchmarks/gpu_check.py" "$@"
