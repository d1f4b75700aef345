#!/usr/bin/env bash
# Runs the laws, real ranks and the examples on other versions of torch and Python, each in an environment of its own.
#
#   dev/matrix.sh --list            what would run
#   dev/matrix.sh                   all of them, one after the other: about 10 minutes and 6 GB each
#   dev/matrix.sh 2.14.1:3.13 ...   some
#
# TORCH_INDEX is an index that has builds of torch for the CPU alone. An environment is removed when its tests have passed.
set -uo pipefail
cd "$(dirname "$0")/.."

ALL=(2.9.0:3.11 2.11.0:3.11 2.13.0:3.11 2.14.1:3.11 2.14.1:3.12 2.14.1:3.13)
# What decides whether a version will do: the laws and the kernels' bits, trainings on real ranks, what users copy.
TESTS=(
  tests/testing tests/kernels tests/laws tests/compressors tests/transports tests/session
  tests/trainings/test_gloo.py tests/trainings/test_compiled_models.py tests/gradients tests/fsdp tests/failure
  tests/optimizer_hooks tests/checkpoint tests/examples
)

[[ "${1:-}" == --list ]] && { printf '%s\n' "${ALL[@]}"; exit; }
failed=()
for each in "${@:-${ALL[@]}}"; do
  torch=${each%%:*} python=python${each#*:}
  [[ $each == *:* ]] || python=python3
  command -v "$python" >/dev/null || { echo "$each: no $python here, left out"; failed+=("$each"); continue; }
  env=build/matrix/$torch-${python#python}
  "$python" -m venv "$env" &&
    "$env/bin/pip" install --quiet ${TORCH_INDEX:+--index-url "$TORCH_INDEX"} "torch==$torch" &&
    "$env/bin/pip" install --quiet "torch==$torch" -e '.[all,dev]' &&
    "$env/bin/python" -m pytest -q --forks 4 -k "not torchtitan" "${TESTS[@]}" >"$env.log" 2>&1
  code=$?
  echo "torch $torch, $("$env/bin/python" --version): $(tail -1 "$env.log" 2>/dev/null || echo 'not installed')"
  if [[ $code == 0 ]]; then rm -rf "$env"; else failed+=("$each"); fi
done
[[ ${#failed[@]} == 0 ]] || { echo "failed: ${failed[*]} (logs in build/matrix)"; exit 1; }
