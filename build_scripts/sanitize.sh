#!/usr/bin/env bash
# The tests of the native library with GCC's address and undefined-behaviour sanitizers, on a copy of what is committed: about five minutes.
#     build_scripts/sanitize.sh [PYTHON]
set -euo pipefail
python=$(command -v "${1:-.venv/bin/python}")
copy=$(mktemp -d)
trap 'rm -rf "$copy"' EXIT
git clone -q "$(dirname "$0")/.." "$copy"
cd "$copy"
library=trtllm_v4tree/native/_ops$("$python" -c 'import sysconfig; print(sysconfig.get_config_var("EXT_SUFFIX"))')
g++ -O1 -g -fno-omit-frame-pointer -fsanitize=address,undefined -fno-sanitize-recover=undefined -fno-sanitize=alignment \
    -pthread -std=c++17 -fvisibility=hidden -Wno-psabi -fPIC -shared trtllm_v4tree/native/src/*.cc -o "$library"
export PYTHONPATH=$copy UBSAN_OPTIONS=print_stacktrace=1 ASAN_OPTIONS=detect_leaks=0:handle_segv=0
LD_PRELOAD="$(g++ -print-file-name=libasan.so) $(g++ -print-file-name=libubsan.so)" \
    "$python" -m pytest -q -p no:cacheprovider tests/test_native*.py tests/test_region.py tests/test_fuse.py tests/test_bfloat16.py
