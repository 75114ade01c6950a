#!/usr/bin/env bash
# Sets the machine up and runs every test: unit, real network namespaces,
# scripts. Narrow it with PKG=./internal/core/... and RUN=TestName.
set -euo pipefail
. "$(dirname "$0")/lib.sh"
need_root "the tests program real network namespaces"
hack/setup.sh
use_go

args=(-race -shuffle=on -count=1 -timeout "${TIMEOUT:-20m}" -exec "'$root/hack/in-netns.sh'")
if [[ -n ${RUN:-} ]]; then
  args+=(-run "$RUN")
fi
# Several patterns may stand in PKG.
read -r -a packages <<<"${PKG:-./...}"
CGO_ENABLED=1 exec go test "${args[@]}" "${packages[@]}"
