#!/usr/bin/env bash
# Runs the tests of what encodes and decodes for the kernel on ppc64le and s390x, which is big endian, under qemu's user mode.
#
#   hack/arch.sh             both
#   hack/arch.sh s390x       one
#
# qemu's user mode has neither nf_tables nor network namespaces, so the tests of packages with a test pattern below that need
# them are left out: their bytes are those that the others check.
set -euo pipefail
. "$(dirname "$0")/lib.sh"
hack/setup.sh arch
use_go

tests=(
  core/ruleset core/redirect node/nftables/decode
  'node/nftables/nfnetlink NothingIsPassedOver|NoOtherBytes|Attribute'
  'node/route Parse|Explain|Complete|V6Off'
)

dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
failed=()

one() { # ARCH PACKAGE [PATTERN]
  local out status=0
  CGO_ENABLED=0 GOOS=linux GOARCH=$1 go test -c -trimpath -tags "$tags" -o "$dir/test" "./internal/$2"
  out=$(cd "internal/$2" && "qemu-$1-static" "$dir/test" -test.count=1 -test.timeout=5m -test.run "${3:-.}" 2>&1) || status=$?
  if [[ $status -ne 0 || $out == *'no tests to run'* ]]; then
    printf '%s\n' "$out"
    failed+=("$1 $2")
  else
    say "$1: $2 passed"
  fi
}

read -r -a archs <<<"${*:-ppc64le s390x}"
for arch in "${archs[@]}"; do
  for entry in "${tests[@]}"; do
    read -r package pattern <<<"$entry"
    one "$arch" "$package" "$pattern"
  done
done
[[ ${#failed[@]} -eq 0 ]] || die "failed: ${failed[*]}"
