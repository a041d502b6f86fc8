#!/bin/sh
# The NEON variant of the update against the scalar one on this machine, whatever its CPU: the optim
# tests cross-compiled and run under qemu-user.
#   tests/cross/run-neon.sh BUILD_FOLDER
set -eu
root=$(cd "$(dirname "$0")/../.." && pwd)
build=${1:?a folder to build in}
cmake -S "$root/tests/cross" -B "$build" -G Ninja --toolchain "$root/tests/cross/aarch64.cmake"
cmake --build "$build"
ctest --test-dir "$build" --output-on-failure
