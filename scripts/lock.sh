#!/usr/bin/env bash
# Resolve requirements.lock from pyproject.toml for every supported Python; pyproject's [tool.uv] pins torch and says what is left out.
set -euo pipefail

uv=$1
fresh=$(mktemp)
trap 'rm -f "$fresh"' EXIT
{
    echo "# Exact versions of everything, development tools included. Written by 'make lock':"
    echo "# uv pip compile pyproject.toml --extra dev --universal --python-version 3.11 --fork-strategy fewest"
    echo "# torch's CUDA libraries are not listed: a CUDA build of torch brings its own."
    "$uv" pip compile pyproject.toml --extra dev --universal --python-version 3.11 --fork-strategy fewest \
        --no-emit-index-url --no-header --annotation-style line |
        sed 's/antiphon (pyproject.toml)/antiphon/; s/-c ([^)]*), //; s/-c [^ ,]*, //g'
} >"$fresh"
grep -q '^torch==[0-9.]* ' "$fresh" || { echo "error: torch is not pinned to a plain version in the result" >&2; exit 1; }
cp "$fresh" requirements.lock
echo "requirements.lock: $(grep -c '==' requirements.lock) packages"
