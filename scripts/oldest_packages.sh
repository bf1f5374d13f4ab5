#!/usr/bin/env bash
# An environment beside the main one, with the oldest packages that pyproject.toml allows. What it lacks (torch, the tools of the
# tests, the native code) it takes from the main one, so that nothing large is installed twice.
set -euo pipefail

python=$1
oldest=$2
main=$("$python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
uv=$(dirname "$python")/uv

rm -rf "$oldest"
"$python" -m venv --without-pip "$oldest"
# torch and what only torch needs stay the main environment's.
"$uv" pip compile pyproject.toml --extra train --resolution lowest-direct --python "$python" \
    --quiet --no-header --no-annotate --no-emit-index-url |
    grep -vE '^(torch|sympy|mpmath|networkx|setuptools)==' >"$oldest/packages.txt"
"$uv" pip install --quiet --no-deps --python "$oldest/bin/python" --requirement "$oldest/packages.txt"
# Behind its own packages, with the hooks of editable installs, which a plain path in a .pth file leaves out.
echo "import site; site.addsitedir('$main')" \
    >"$("$oldest/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/main_environment.pth"
echo "$oldest: $(wc -l <"$oldest/packages.txt") packages"
