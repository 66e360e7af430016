#!/usr/bin/env bash
# a newcomer's path, timed from an empty folder: clone, first attention result, first picture, first token
# usage: scripts/newcomer.sh [repository]; writes a line a step, seconds since the start
set -euo pipefail
source=${1:-$(cd "$(dirname "$0")/.." && pwd)}
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
begin=$(date +%s%N)
step() { local tenths=$((($(date +%s%N) - begin) / 100000000)); printf '%6d.%d s  %s\n' $((tenths / 10)) $((tenths % 10)) "$1"; }

git clone --quiet "$source" saccade
step "cloned"
cd saccade
${PYTHON:-python3} -m venv .venv
export PATH="$PWD/.venv/bin:$PATH"
export PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_QUIET=1 PIP_CONSTRAINT="$PWD/constraints.txt"
pip wheel --no-deps -w dist .
wheel=$(echo "$PWD"/dist/saccade-*.whl)
pip install "$wheel"
step "installed, the core compiled"

cd "$work"
python - <<'PY'
import numpy as np
import saccade
from saccade import mask

q, k, v = np.random.default_rng(0).standard_normal((3, 1, 1024, 8, 64), dtype=np.float32)
o = saccade.attention(q, k, v, mask.causal())
assert o.shape == q.shape and np.isfinite(o).all()
PY
step "first attention result"

python - <<'PY'
from pathlib import Path
from saccade import mask

(mask.causal() & mask.window(127, 0)).draw(1024, 1024, "mask.svg")
assert Path("mask.svg").read_text().startswith("<svg")
PY
step "first picture"

pip install "$wheel[train]"
step "installed what training wants"
saccade train --steps 20 --out run >/dev/null
step "20 steps of training"
test -n "$(saccade generate --model run --tokens 1 2>/dev/null)"
step "first token"
