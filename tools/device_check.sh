#!/bin/bash
# Build, check and time the CUDA kernels on a machine with a GPU, nvcc, CMake, ninja and Python, without a network.
#
#   tools/device_check.sh pack OUT.tar.gz     here: the patched upstream tree and this repository, in one archive
#   tools/device_check.sh build DIR           there, in the unpacked archive: only build
#   tools/device_check.sh run DIR [STEP...]   there, in the unpacked archive: build in DIR, then the steps, by default
#                                             check sanitize time model
# Steps: check (grid against the CPU), sanitize (compute-sanitizer on a small grid), time (kernels), parts (what an f16 window
# and a key bias add to attention), model (llama-bench on an 8B-shaped random model), streams (eight of 32K), long (a context of
# 1,000,000 tokens, half an hour of prefill); over caches filled from a short prefix: depth (decode at 0, 32K, 128K and at
# MILLION=1000000 tokens), depthstreams (eight of 32K), prefill128k (512 and 2048 tokens), windows (the same without and with f16
# windows); evaluate (pykvq eval) and retrieval (planted facts in a real MODEL, which oscar2 wants calibrated); bandwidth (decode attention as a share
# of a device copy, and what ncu counts), transforms (the cost of calibrated data), join (norm and RoPE in launches of their own and joined, at depth
# 0), calibrate (statistics of the 8B shape), layer (the kernels of a layer by ncu), pip (the pip form of the build, and pykvq doctor on it), tests
# (pytest -m cuda). The last four and those on filled caches need numpy, diskcache, filelock, jinja2, platformdirs, pyyaml and typing_extensions in
# python3, calibrate click, rich and scipy too.
# The default steps take eight minutes on 16 cores and one H200, five of them the build. DEPTHS=131072 TYPES="f16 turbo3"
# REPEAT=2 MODEL=FILE ARCH=90 set what the names say.
set -euo pipefail
cd "$(dirname "$0")/.."

pack() {
    local out=$1 tree
    tree=$(python3 tools/vendor.py)
    local stage
    stage=$(mktemp -d)
    mkdir -p "$stage/pykvq-device/upstream/vendor/llama.cpp"
    git ls-files -z --cached --others --exclude-standard | tar --ignore-failed-read --null -T - -cf - | tar -xf - -C "$stage/pykvq-device"
    (cd "$tree" && tar -cf - LICENSE.md llama_cpp) | tar -xf - -C "$stage/pykvq-device/upstream"
    (cd "$tree/vendor/llama.cpp" && tar --exclude=ggml/src/ggml-vulkan --exclude=ggml/src/ggml-sycl \
        --exclude=ggml/src/ggml-opencl --exclude=ggml/src/ggml-hexagon --exclude=ggml/src/ggml-webgpu --exclude=ggml/src/ggml-cann \
        -cf - CMakeLists.txt LICENSE cmake common ggml include src tools vendor gguf-py licenses) | tar -xf - -C "$stage/pykvq-device/upstream/vendor/llama.cpp"
    # fixed time stamps: an object built from one archive stays valid for the next where the source did not change
    find "$stage" -exec touch -h -d 2020-01-01 {} +
    tar -czf "$out" -C "$stage" pykvq-device
    rm -rf "$stage"
    ls -l "$out"
}

build() {
    local dir=$1
    # the default architecture is the machine's own; the programs are the few that the steps use
    cmake -S . -B "$dir" -G Ninja -DCMAKE_BUILD_TYPE=Release -DGGML_CUDA=ON -DGGML_NATIVE=ON -DLLAMA_OPENSSL=OFF -DLLAMA_CURL=OFF \
        -DCMAKE_CUDA_ARCHITECTURES="${ARCH:-native}" -DPYKVQ_UPSTREAM_DIR="$PWD/upstream" -DPYKVQ_BUILD_TESTS=ON > "$dir.configure.log" 2>&1 || { tail -30 "$dir.configure.log"; exit 1; }
    cmake --build "$dir" --target test-kvq-cuda llama-bench llama-batched-bench > "$dir.build.log" 2>&1 || { grep -E "error|FAILED" -A8 "$dir.build.log" | head -60; exit 1; }
}

random_model() {
    local gguf=${MODEL:-/tmp/random-qwen3-8b.gguf}
    [ -f "$gguf" ] || PYTHONPATH=upstream/vendor/llama.cpp/gguf-py python3 tools/random_gguf.py "$gguf"
    echo "$gguf"
}

# Python over the libraries of the build
py() {
    local dir
    dir=$(realpath "$1"); shift
    PYTHONPATH="$PWD:$PWD/upstream:$PWD/upstream/vendor/llama.cpp/gguf-py${PYTHONPATH:+:$PYTHONPATH}" LLAMA_CPP_LIB_PATH="$dir/bin" \
        PYKVQ_CUDA_TEST="$(program "$dir" test-kvq-cuda)" python3 -X faulthandler "$@"
}

depth() {
    local dir=$1 name=$2; shift 2
    py "$dir" tools/bench_depth.py "$(random_model)" --gpu-layers 99 --repeats "${REPEAT:-5}" --json "$dir.$name.json" "$@"
}

program() { find "$1" -type f -name "$2" -perm -u+x | head -1; }

step() {
    local dir=$1
    case $2 in
    check)    # the CPU's reference takes the time: a part of the grid for every two cores
              local n=$(( ($(nproc) + 1) / 2 )) jobs=() failed=0
              for i in $(seq $n); do
                  "$(program "$dir" test-kvq-cuda)" --part $i/$n > "$dir.check-$i.log" 2>&1 & jobs+=($!)
              done
              for i in $(seq $n); do wait ${jobs[i-1]} || failed=1; grep -hE "FAIL|checks," "$dir.check-$i.log" || tail -1 "$dir.check-$i.log"; done
              [ $failed = 0 ] ;;
    sanitize) for tool in memcheck racecheck; do
                  compute-sanitizer --tool $tool --print-limit 5 "$(program "$dir" test-kvq-cuda)" quick
              done ;;
    time)     "$(program "$dir" test-kvq-cuda)" time ;;
    parts)    "$(program "$dir" test-kvq-cuda)" parts ;;
    model)    local gguf bench
              gguf=$(random_model) bench=$(program "$dir" llama-bench)
              for t in ${TYPES:-f16 turbo2 turbo3 turbo4}; do
                  "$bench" -m "$gguf" -ngl 99 -fa 1 -ctk $t -ctv $t -p 512 -n 32 -d ${DEPTHS:-0,32768} -r ${REPEAT:-2} -o md 2>&1 | grep -E "\| (qwen|model)|error|kvq" || true
              done ;;
    streams)  local gguf
              gguf=$(random_model)
              for t in ${TYPES:-f16 turbo2 turbo3 turbo4}; do
                  "$(program "$dir" llama-batched-bench)" -m "$gguf" -ngl 99 -fa on -ctk $t -ctv $t -c 263168 -npp 32768 -ntg 64 -npl 8 -pps -b 2048 -ub 512 2>&1 | grep -E "^\|" | tail -1 | sed "s/^/$t /"
              done ;;
    long)     local gguf
              gguf=$(random_model)
              for t in ${TYPES:-turbo2}; do
                  "$(program "$dir" llama-bench)" -m "$gguf" -ngl 99 -fa 1 -ctk $t -ctv $t -p 0 -n 16 -d 1000000 -r 1 -b 2048 -ub 2048 -o md 2>&1 | grep -E "\| qwen|error|kvq|fail" || true
              done ;;
    depth)    depth "$dir" depth --types ${TYPES:-f16 turbo2 turbo3 turbo4} --depths ${DEPTHS:-0 32768 131072}
              depth "$dir" million --types ${TYPES:-f16 turbo2 turbo3} --depths ${MILLION:-1000000} --tokens 16 --repeats 3 ;;
    depthstreams) depth "$dir" streams --types ${TYPES:-f16 turbo2 turbo3 turbo4} --depths ${DEPTHS:-32768} --streams 8 ;;
    prefill128k) for n in 512 2048; do
                  depth "$dir" prefill-$n --types ${TYPES:-f16 turbo2 turbo3 turbo4} --depths ${DEPTHS:-131072} --tokens 4 --prefill $n --ubatch $n
              done ;;
    windows)  for w in 0,0 64,256; do
                  depth "$dir" "windows-$w" --window $w --types ${TYPES:-f16 turbo2 turbo3 turbo4} --depths ${DEPTHS:-0 131072}
              done ;;
    evaluate) # of a real MODEL, as docs/data holds it; exit 1 is a verdict
              PYKVQ_CACHE_DIR="$(realpath "$dir").cache" py "$dir" -c "from pykvq.cli import main; main()" eval "$MODEL" -ngl 99 --json --quiet \
                  > "$dir.eval-$(basename "$MODEL" .gguf).json" || [ $? = 1 ] ;;
    retrieval) py "$dir" tools/measure_retrieval.py "$MODEL" --gpu-layers 99 --contexts ${CONTEXTS:-4096 16384} --types ${TYPES:-turbo2 turbo3 oscar2 oscar2,turbo3} \
                  --windows 0,0 64,256 --texts ${TEXTS:-4} --json > "$dir.retrieval-$(basename "$MODEL" .gguf).json" ;;
    bandwidth) "$(program "$dir" test-kvq-cuda)" bandwidth
              # the counters need a driver that lets them be read; --clock-control none leaves the card as it is
              GGML_CUDA_DISABLE_GRAPHS=1 ncu --clock-control none --kernel-name regex:kvq_decode --filter-mode per-launch-config --launch-skip 2 --launch-count 1 \
                  --metrics gpu__time_duration.sum,dram__bytes_read.sum,dram__throughput.avg.pct_of_peak_sustained_elapsed,sm__inst_issued.avg.pct_of_peak_sustained_active \
                  "$(program "$dir" test-kvq-cuda)" bandwidth 2>&1 | grep -E "kvq_decode|gpu__|dram__|sm__|rror" || true ;;
    transforms) local gguf copy=/tmp/calibrated-random.gguf
              gguf=$(random_model)
              ln -sf "$gguf" "$copy"
              py "$dir" tests/models/calibrated.py "$copy"
              for kvq in off auto; do
                  MODEL=$copy depth "$dir" "transforms-$kvq" --kvq $kvq --types ${TYPES:-f16 turbo2 turbo3} --depths ${DEPTHS:-0 32768}
              done
              MODEL=$copy TYPES= depth "$dir" transforms-oscar2 --types f16 oscar2,turbo2 --depths ${DEPTHS:-0 32768} ;;
    join)     # norm and RoPE left to upstream, those of the keys joined, those of the queries too, transforms and writes too
              local gguf copy=/tmp/calibrated-random.gguf
              gguf=$(random_model)
              ln -sf "$gguf" "$copy"
              py "$dir" tests/models/calibrated.py "$copy"
              for join in 0 1 2 3; do
                  KVQ_CUDA_JOIN=$join depth "$dir" "join-$join" --types ${TYPES:-f16 turbo2 turbo3 turbo4} --depths ${DEPTHS:-0}
                  KVQ_CUDA_JOIN=$join MODEL=$copy depth "$dir" "join-$join-calibrated" --types f16 turbo2 oscar2,turbo2 --depths ${DEPTHS:-0}
              done ;;
    calibrate) time py "$dir" -c "from pykvq.cli import main; main()" calibrate "$(random_model)" --gpu-layers 99 --tokens "${TOKENS:-4096}" --restart -o "$dir.statistics.npz" ;;
    pip)      # needs scikit-build-core in python3; over the objects that are there, so only the other programs are compiled
              local site
              site=$(realpath "$dir").site
              time CMAKE_ARGS="-DGGML_CUDA=on -DPYKVQ_UPSTREAM_DIR=$PWD/upstream" python3 -m pip install . -v --no-deps --no-index --no-build-isolation \
                  --upgrade --target "$site" -C build-dir="$(realpath "$dir")" > "$dir.pip.log" 2>&1 || { tail -30 "$dir.pip.log"; exit 1; }
              (cd / && PYTHONPATH="$site:$OLDPWD/upstream/vendor/llama.cpp/gguf-py${PYTHONPATH:+:$PYTHONPATH}" "$site/bin/pykvq" doctor) ;;
    layer)    # kernels in a row of decode at depth 0, with their times: MODEL and TYPES choose, calibrated or not
              for t in ${TYPES:-turbo2}; do
                  GGML_CUDA_DISABLE_GRAPHS=1 ncu --clock-control none --launch-skip 1500 --launch-count 48 --metrics gpu__time_duration.sum \
                      "$(program "$dir" llama-bench)" -m "$(random_model)" -ngl 99 -fa 1 -ctk $t -ctv $t -p 0 -n 8 -r 1 --no-warmup 2>&1 | grep -E "Context|gpu__time|rror" || true
              done ;;
    tests)    py "$dir" -m pytest -q -m cuda tests/cuda -p no:cacheprovider ;;
    *)        echo "unknown step $2"; exit 2 ;;
    esac
}

case ${1:-} in
pack) pack "$2" ;;
build) build "$2" ;;
run)  dir=$2; shift 2
      [ $# -gt 0 ] || set -- check sanitize time model
      date; build "$dir"; date
      for s in "$@"; do echo "== $s"; step "$dir" "$s"; date; done ;;
*)    sed -n '2,17p' "$0"; exit 2 ;;
esac
