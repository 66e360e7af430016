#!/usr/bin/env bash
# Times a stranger's path from a clone: the first picture, attention result and trained token, then `make demo`.
# usage: make newcomer, or scripts/newcomer.sh [repository]; prints a line for each step, in seconds since its clone
set -euo pipefail
source=${1:-$(cd "$(dirname "$0")/.." && pwd)}
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
export PIP_DISABLE_PIP_VERSION_CHECK=1

clone() { start=$(date +%s%N); git clone --quiet "$source" "$work/$1"; cd "$work/$1"; }
step() { local tenths=$((($(date +%s%N) - start) / 100000000)); printf '%6d.%d s  %s\n' $((tenths / 10)) $((tenths % 10)) "$1"; }

echo "as a library"
clone library
${PYTHON:-python3} -m venv .venv
export PATH="$PWD/.venv/bin:$PATH"
pip install --quiet --constraint constraints.txt .
step "installed, the core compiled"
python - <<'PY'
from pathlib import Path
from saccade import mask

(mask.causal() & mask.window(127, 0)).draw(1024, 1024, "mask.svg")
assert Path("mask.svg").read_text().startswith("<svg")
PY
step "first picture"
python - <<'PY'
import numpy as np
import saccade
from saccade import mask

q, k, v = np.random.default_rng(0).standard_normal((3, 1, 1024, 8, 64), dtype=np.float32)
o = saccade.attention(q, k, v, mask.causal())
assert o.shape == q.shape and np.isfinite(o).all()
PY
step "first attention result"

echo "make demo"
clone demo
make demo >demo.log 2>&1 &
demo=$!
for heading in "1 of 4" "2 of 4" "3 of 4" "4 of 4"; do
  until grep -q "$heading" demo.log 2>/dev/null || ! kill -0 $demo 2>/dev/null; do sleep 0.1; done
  step "$heading"
done
wait $demo || { cat demo.log; exit 1; }
step "trained a model and sampled from it"
