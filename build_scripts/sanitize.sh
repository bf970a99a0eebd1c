#!/usr/bin/env bash
# The tests of the native library with GCC's sanitizers, on a copy of what is committed: addresses and undefined behaviour (four minutes), then
# data races of its threads (two; what ONNX Runtime does among its own threads is not looked at).
#     build_scripts/sanitize.sh [PYTHON]
set -euo pipefail
python=$(command -v "${1:-.venv/bin/python}")
copy=$(mktemp -d)
trap 'rm -rf "$copy"' EXIT
git clone -q "$(dirname "$0")/.." "$copy"
cd "$copy"
library=trtllm_v4tree/native/_ops$("$python" -c 'import sysconfig; print(sysconfig.get_config_var("EXT_SUFFIX"))')
export PYTHONPATH=$copy UBSAN_OPTIONS=print_stacktrace=1 ASAN_OPTIONS=detect_leaks=0:handle_segv=0
export TSAN_OPTIONS=ignore_noninstrumented_modules=1:halt_on_error=1

# compiled FLAG.. : the library with a sanitizer
compiled() {
    g++ -O1 -g -fno-omit-frame-pointer "$@" -pthread -std=c++17 -fvisibility=hidden -Wno-psabi -fPIC -shared \
        trtllm_v4tree/native/src/*.cc -o "$library"
}

# tested RUNTIME.. -- ARGUMENT.. : pytest with the runtimes of a sanitizer loaded first
tested() {
    local preload=""
    while [ "$1" != -- ]; do preload+="$(g++ -print-file-name="$1") " && shift; done
    shift
    LD_PRELOAD=$preload "$python" -m pytest -q -x -p no:cacheprovider "$@"
}

compiled -fsanitize=address,undefined -fno-sanitize-recover=undefined -fno-sanitize=alignment
tested libasan.so libubsan.so -- tests/test_native*.py tests/test_region.py tests/test_fuse.py tests/test_bfloat16.py
compiled -fsanitize=thread
tested libtsan.so -- tests/test_region.py tests/test_native.py -k "region or threads or wait or pool or share"
