#!/usr/bin/env bash
# Sets the machine up and runs the tests of the main module: unit, real network
# namespaces, scripts. Narrow it with PKG=./internal/core/... and RUN=TestName.
set -euo pipefail
. "$(dirname "$0")/lib.sh"
need_root "the tests program real network namespaces"
hack/setup.sh test
use_go

# Tests also start their own test binary. The race detector writes its reports
# of all these processes to files, so that a race fails the run even if no
# test checks the exit status of the process. atexit_sleep_ms=0 saves one
# second per process.
races=$(mktemp -d)
trap 'rm -rf "$races"' EXIT
export GORACE="atexit_sleep_ms=0 log_path=$races/race"

args=(-race -shuffle=on -count=1 -timeout "${TIMEOUT:-20m}" -exec "'$root/hack/in-netns.sh'")
if [[ -n ${RUN:-} ]]; then
  args+=(-run "$RUN")
fi
# PKG may have several patterns.
read -r -a packages <<<"${PKG:-./...}"
status=0
CGO_ENABLED=1 go test "${args[@]}" "${packages[@]}" || status=$?
if compgen -G "$races/race.*" >/dev/null; then
  cat "$races"/race.*
  die "DATA RACE, see above"
fi
exit "$status"
