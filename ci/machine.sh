#!/usr/bin/env bash
# What the README presumes: Python with venv, a C++ compiler, git. ccache is used when it can be had.
set -euo pipefail
missing=()
command -v c++ >/dev/null || missing+=(g++)
command -v git >/dev/null || missing+=(git)
python3 -c 'import venv, ensurepip' 2>/dev/null || missing+=(python3-venv python3-dev)
command -v ccache >/dev/null || missing+=(ccache)
command -v qemu-aarch64 >/dev/null || missing+=(qemu-user)
command -v aarch64-linux-gnu-g++ >/dev/null || missing+=(g++-aarch64-linux-gnu)
command -v clang++ >/dev/null || missing+=(clang)
if [ ${#missing[@]} -gt 0 ] && command -v apt-get >/dev/null && [ "$(id -u)" = 0 ]; then
  apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq "${missing[@]}" || true
fi
command -v c++ >/dev/null || { echo "no C++ compiler: install g++" >&2; exit 1; }
