#!/usr/bin/env bash
# Format and lint: scripts/check.sh [--fix]. clang-tidy, which takes minutes, is the Makefile's (it keeps stamps).
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

fix=no
if [ "${1:-}" = --fix ]; then fix=yes; fi
mapfile -t cpp < <(git ls-files '*.h' '*.cpp' '*.cu' '*.cuh' '*.c')
python=.venv/bin/python

if [ $fix = yes ]; then
  clang-format-14 -i "${cpp[@]}"
  $python -m ruff check --quiet --fix .
  $python -m ruff format --quiet .
else
  clang-format-14 --dry-run --Werror "${cpp[@]}"
  echo "clang-format: ${#cpp[@]} files are formatted"
  $python -m ruff check .
  $python -m ruff format --check .
fi
if [ -f scripts/lint.py ]; then $python scripts/lint.py; fi
