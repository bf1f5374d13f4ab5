#!/usr/bin/env bash
# Build the native module and install the project into the environment as an editable package. Incremental through build/.
set -euo pipefail

python=$1
venv=$(dirname "$(dirname "$python")")
bin=$(cd "$venv/bin" && pwd)
export PATH="$bin:$PATH" # the locked cmake and ninja before the system's

# Headers that create_venv.sh unpacked because the system has none.
settings=()
version=$("$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])')
include="$bin/../debian/usr/include"
if [ -f "$include/python$version/Python.h" ]; then
    include=$(cd "$include" && pwd)
    export CPATH="$include:$include/python$version${CPATH:+:$CPATH}"
    settings=(--config-settings "cmake.define.Python_INCLUDE_DIR=$include/python$version")
fi

log=$(mktemp)
trap 'rm -f "$log"' EXIT
if ! "$python" -m pip --disable-pip-version-check install --verbose --no-build-isolation --no-deps \
    "${settings[@]}" --editable . >"$log" 2>&1; then
    cat "$log" >&2
    echo "error: the native code did not build; the compiler's messages are above" >&2
    exit 1
fi
tail -n 1 "$log"
