#!/usr/bin/env bash
# Everything that needs a GPU, in one command: the tests, and then the benchmark. Under 8 minutes on an H200.
#
#   bash tests/gpu/run.sh [FOLDER]                      results go to FOLDER (default: a new one)
#   PYTHON=python3.12 bash tests/gpu/run.sh             with this Python; nothing is installed, nothing is downloaded
#   CBENGINE_GPU_BENCH_SECONDS=0 bash tests/gpu/run.sh  only the tests (default: 220 s of benchmark)
#   CBENGINE_GPU_DRYRUN=cpu bash tests/gpu/run.sh       without a GPU, to see that the code of it all is right
#
# Ends with 0 if all is well, 1 if something failed, 2 if there is no GPU.
set -uo pipefail
cd "$(dirname "$0")/../.."
PYTHON=${PYTHON:-python3}
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}" HF_HUB_OFFLINE=1 PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1
dry=${CBENGINE_GPU_DRYRUN:-}
bench=${CBENGINE_GPU_BENCH_SECONDS:-220}
limit=270
dump=120 # a test that hangs says where
if [ "$dry" = cpu ]; then
    limit=1500
    dump=0 # the interpreter takes its time, and a look at threads that run may crash Python 3.11
elif ! "$PYTHON" -c 'import sys, torch; sys.exit(not torch.cuda.is_available())'; then
    echo "no CUDA device that the torch of $PYTHON can use: nothing was tested" >&2
    exit 2
fi
results=${1:-$(mktemp -d)}
mkdir -p "$results"
"$PYTHON" -c 'import torch, transformers, triton, sys; print("Python", sys.version.split()[0], "torch", torch.__version__,
"transformers", transformers.__version__, "triton", triton.__version__)' || exit 1

# Each part is a process of its own, all at once: most of the time goes into compiling kernels, and a device that one part
# loses is not lost to the others.
part() {
    timeout -k 10 "$limit" "$PYTHON" -m pytest -c tests/gpu/pytest.ini --confcutdir=tests/gpu "tests/gpu/$1" -v --tb=short \
        --durations=5 -o faulthandler_timeout="$dump" 2>&1 | tee "$results/$1.log" | sed -u "s/^/[$1] /"
}
pids=()
for name in ops models engine; do
    part "$name" &
    pids+=($!)
done
failed=0
for pid in "${pids[@]}"; do
    wait "$pid" || failed=1
done
if [ "$bench" != 0 ]; then
    timeout -k 10 $((bench + 120)) "$PYTHON" benchmarks/gpu.py --seconds "$bench" --out "$results" 2>&1 | tee "$results/benchmark.log" \
        || failed=1
fi
for name in ops models engine; do
    echo "$name: $(tail -n 1 "$results/$name.log")"
done
echo "results are in $results"
exit "$failed"
