#!/usr/bin/env bash
# Checks that generated files are in step with their sources, and that tests
# with the tag "measure", which no test run compiles, compile. Changes
# nothing.
set -euo pipefail
. "$(dirname "$0")/lib.sh"
use_go

status=0

check() { # NAME COMMAND...
  local name=$1
  shift
  if "$@"; then
    say "verify: $name: ok"
  else
    say "verify: $name: OUT OF STEP"
    status=1
  fi
}

# check calls these functions by name.
# shellcheck disable=SC2317
formatted() {
  local files
  files=$(find . -name '*.go' -not -path './bin/*' -not -path '*/testdata/*' -exec gofmt -l {} +)
  [[ -z $files ]] || { printf '%s\n' "$files"; return 1; }
}

# shellcheck disable=SC2317
tidy() { (cd "$1" && go mod tidy -diff); }

# These tests measure and are run by hand.
# shellcheck disable=SC2317
measuring() { go vet -tags "$tags,measure" ./...; }

# The plugin of kubectl runs on all systems of kubectl, its tests on Linux.
# shellcheck disable=SC2317
everywhere() {
  local os
  for os in linux darwin windows; do GOOS=$os CGO_ENABLED=0 go build ./internal/applet/... ./internal/role/fleet/... || return 1; done
}

check gofmt formatted
check 'tests tagged measure' measuring
check 'kubectl plugin on linux, darwin and windows' everywhere
check go.mod tidy .
check hack/tools/go.mod tidy hack/tools
check hack/chart/go.mod tidy hack/chart
check hack/release/go.mod tidy hack/release
check e2e/go.mod tidy e2e
check docs/deps.txt hack/deps.sh check
check manifests/istio-cni.yaml hack/manifests.sh --check
exit "$status"
