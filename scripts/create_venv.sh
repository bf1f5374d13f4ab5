#!/usr/bin/env bash
# Create the virtual environment, after checking for what only the system can provide. Needs no root where it can be avoided.
#
# Debian and Ubuntu ship Python without pip for environments (python3-venv) and without headers (python3-dev). Both are
# fetched as packages and unpacked inside the environment when they are missing; only if that fails too is there
# something to install by hand. Rejected: asking for root up front.
set -euo pipefail

python=${1:-}
venv=$2

fail() {
    echo "error: $*" >&2
    exit 1
}

package_hint() { # what to install, on systems with and without apt
    if command -v apt-get >/dev/null; then echo "run: sudo apt-get install $1"; else echo "install your system's $2"; fi
}

# unpack_debian_packages DIR PACKAGE...: download without root and unpack under DIR.
unpack_debian_packages() {
    local target=$1 download
    shift
    command -v apt-get >/dev/null && command -v dpkg-deb >/dev/null || return 1
    download=$(mktemp -d)
    if ! (cd "$download" && apt-get download "$@") >"$download/log" 2>&1; then
        rm -rf "$download"
        return 1
    fi
    mkdir -p "$target"
    for package in "$download"/*.deb; do dpkg-deb -x "$package" "$target" || return 1; done
    rm -rf "$download"
}

tested() { "$1" -c 'import sys; sys.exit(sys.version_info >= (3, 14))' 2>/dev/null; }
new_enough() { "$1" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; }

if [ -z "$python" ]; then
    for candidate in python3 python3.13 python3.12 python3.11; do
        if new_enough "$candidate" && tested "$candidate"; then python=$candidate && break; fi
    done
    [ -n "$python" ] || fail "no Python 3.11 to 3.13 found: $(package_hint python3 "Python 3.11, 3.12 or 3.13")," \
        "or name one that is not on the PATH: make setup PYTHON=/path/to/python3.12"
fi
example="name another, for example: make setup PYTHON=python3.12"
command -v "$python" >/dev/null || fail "PYTHON is $python: there is no such program; $example"
version=$("$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null) ||
    version=
[[ $version =~ ^[0-9]+\.[0-9]+$ ]] || fail "PYTHON is $python: it does not run as a Python; $example"
new_enough "$python" || fail "PYTHON is $python: it is Python $version, 3.11 or newer is needed; $example"
mkdir -p "$venv" 2>/dev/null && [ -w "$venv" ] ||
    fail "cannot write to $PWD/$venv: copy the project to a folder of your own, or change its owner"
"$python" -c 'import venv' 2>/dev/null ||
    fail "PYTHON is $python: it has no venv module; $(package_hint "python$version-venv" "Python venv package")"
compiler=${CXX:-c++}
command -v "${compiler%% *}" >/dev/null ||
    fail "no C++ compiler ($compiler) found: $(package_hint g++ "C++ compiler (GCC 12 or newer, or Clang)") or set CXX"
echo 'int main() { return 0; }' | $compiler -std=c++20 -x c++ -fsyntax-only - 2>/dev/null ||
    fail "$compiler does not compile C++20: install a newer one and name it, for example: CXX=g++-12 make setup"

# 1. The environment, with pip.
if "$python" -c 'import venv, ensurepip; ensurepip.version()' 2>/dev/null; then
    "$python" -m venv "$venv"
else
    echo "python3-venv is not installed; fetching pip into $venv instead"
    "$python" -m venv --without-pip "$venv"
    if ! "$venv/bin/python" -m pip --version >/dev/null 2>&1; then
        unpack_debian_packages "$venv/debian" python3-pip-whl ||
            fail "$python cannot install pip into an environment: $(package_hint "python$version-venv" "Python venv package")"
        wheel=$(find "$venv/debian" -name 'pip-*.whl' -print -quit)
        "$venv/bin/python" "$wheel/pip" --disable-pip-version-check install --quiet --no-index "$wheel"
    fi
fi

# 2. Python's headers, for the native code.
headers=$("$venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("include"))')
if [ ! -f "$headers/Python.h" ] && [ ! -f "$venv/debian/usr/include/python$version/Python.h" ]; then
    echo "Python's headers are not installed; fetching them into $venv instead"
    unpack_debian_packages "$venv/debian" "libpython$version-dev" ||
        fail "$headers/Python.h is missing, the native code needs it: $(package_hint "python$version-dev" "Python headers")"
fi
