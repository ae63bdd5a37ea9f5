#!/usr/bin/env bash
# On a machine with a GPU: its tests, compute-sanitizer on small shapes, the fastest tiling, and the measurements, from the
# source tree alone.
#
#   bench/gpu.sh [--cpu] [OUT] [STEP...]     steps: selfcheck tests sanitize tune bench; all, the default, is these in order
#
# Each step ends within 9 minutes, so that it fits a loan of a GPU, and one that hangs costs only itself; the exit status
# is 1 if any failed. Results go to the folder OUT (default: $OUT, else gpu-results), at most 8 files; gpu.json of bench
# is for bench/results, tuning.json of tune for rlplus.use_tuning. PYTHON names the interpreter (default: python3); packages
# that travel along, as bench/README.md has them, are found through PYTHONPATH. --cpu: the same steps with fewer tests, in
# Triton's interpreter and with the quick suite, to try the script.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit 1

cpu=
if [ "${1:-}" = --cpu ]; then cpu=1; shift; fi
out=$(realpath -m "${1:-${OUT:-gpu-results}}")
[ $# -gt 0 ] && shift
steps=("$@")
[ "${steps[*]:-all}" = all ] && steps=(selfcheck tests sanitize tune bench)
mkdir -p "$out" || exit 1
python=${PYTHON:-python3}
export PYTHONPATH=.${PYTHONPATH:+:$PYTHONPATH} PYTHONUNBUFFERED=1
pytest=("$python" -m pytest -q)
summary=$out/summary.txt
failed=0

say() { echo "$*" | tee -a "$summary"; }

# step NAME SECONDS LOG COMMAND...: run it, its output in LOG, and note how it ended.
step() {
    local name=$1 limit=$2 log=$out/$3 start=$SECONDS status
    shift 3
    timeout --kill-after=10 "$limit" "$@" >> "$log" 2>&1
    status=$?
    case $status in
        0) say "$name: passed in $((SECONDS - start)) s" ;;
        124 | 137) say "$name: stopped after $limit s" ;;
        *) say "$name: FAILED with status $status after $((SECONDS - start)) s" ;;
    esac
    if [ $status -ne 0 ]; then failed=1; tail -n 25 "$log"; fi
}

# sanitizer TOOL: small shapes under compute-sanitizer, where it and the GPU can.
sanitizer() {
    local tool=$1 small=(tests/test_gpu.py -k test_small) run reason
    # Without torch's cache of memory each tensor is an allocation of its own, whose end the tool can see.
    run=(env PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --tool "$tool" --report-api-errors no --error-exitcode 9)
    if [ -n "$cpu" ]; then
        say "$tool: without the tool, on the CPU"
        step "$tool" 240 sanitizer.log "${pytest[@]}" tests/test_gemm_kernel.py -k far_apart
    elif ! command -v compute-sanitizer > /dev/null; then
        say "$tool: skipped, compute-sanitizer is not installed"
    elif ! reason=$(timeout --kill-after=10 60 "${run[@]}" "$python" -c 'import torch; torch.ones(1).cuda()' 2>&1); then
        echo "$reason" >> "$out/sanitizer.log"
        say "$tool: skipped, it does not run here: $(grep -im1 'support\|error\|denied' <<< "$reason" || echo 'no reason given')"
    else
        step "$tool" 190 sanitizer.log "${run[@]}" "${pytest[@]}" "${small[@]}"
    fi
}

environment='import sys, torch, triton
print("Python", sys.version.split()[0], "torch", torch.__version__, "triton", triton.__version__)
print(*(torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())) or ["no GPU"])'
selfcheck='import sys, torch
from rlplus.ops.selfcheck import judge
from rlplus.ops.verdicts import verdict_on
if torch.cuda.is_available():
    dtypes = (torch.bfloat16, torch.float16, torch.float32)
    found = {dtype: verdict_on(torch.device("cuda", 0), dtype) for dtype in dtypes}
else:
    found = {torch.float32: judge("cpu", "float32")}
print(*found.items(), sep="\n")
sys.exit(any(verdict.status != "passed" for verdict in found.values()))'
say "$(date -u +%FT%TZ) $(git rev-parse --short HEAD 2> /dev/null || echo 'no git')"
say "$("$python" -c "$environment" 2>&1 | tail -n 5)"
if [ -z "$cpu" ] && ! "$python" -c 'import sys, torch; sys.exit(not torch.cuda.is_available())'; then
    say "want a CUDA device, or --cpu; got none"
    exit 1
fi

for name in "${steps[@]}"; do
    case $name in
        selfcheck)
            # A check of its own, whatever earlier ones found.
            RLPLUS_CACHE=$(mktemp -d) TRITON_INTERPRET=${cpu:-0} step selfcheck 500 tests.log "$python" -c "$selfcheck"
            ;;
        tests)
            files=(tests/test_gpu.py tests/test_gemm_kernel.py)
            more=(tests/test_kernels.py tests/test_exponentials.py tests/test_token_kernel.py tests/test_buffer_kernels.py)
            [ -n "$cpu" ] || files+=("${more[@]}")
            if "$python" -c 'import xdist' 2> /dev/null; then workers=(-n 6); else workers=(); fi
            step tests 520 tests.log "${pytest[@]}" "${workers[@]}" --junitxml="$out/tests.xml" "${files[@]}"
            ;;
        sanitize)
            sanitizer memcheck
            sanitizer racecheck
            ;;
        tune)
            # The head of Qwen2.5-7B, as in the main case of bench.
            head=(--head 151936 3584 --seconds 440)
            [ -n "$cpu" ] && head=(--head 300 32 --dtype float32 --tokens 16 --max-scratch-mb 1)
            TRITON_INTERPRET=${cpu:-0} step tune 520 bench.log "$python" -m bench tune "${head[@]}" --output "$out/tuning.json"
            ;;
        bench)
            suite=gpu
            [ -n "$cpu" ] && suite=quick
            step bench 530 bench.log "$python" -m bench --suite "$suite" --output "$out"
            ;;
        *)
            say "want steps among selfcheck, tests, sanitize, tune, bench, or all alone; got '$name'"
            failed=1
            ;;
    esac
done
say "$([ $failed -eq 0 ] && echo "all passed" || echo "something failed"); results in $out"
exit $failed
