#!/usr/bin/env bash
# Measures the coverage of the whole test run. Processes that tests start from
# the test binary write their counters to the same place.
set -euo pipefail
. "$(dirname "$0")/lib.sh"
need_root "the tests program real network namespaces"
hack/setup.sh test
use_go

CGO_ENABLED=0 go test -count=1 -timeout "${TIMEOUT:-20m}" -exec "'$root/hack/in-netns.sh'" \
  -coverpkg=./... -coverprofile=coverage.out ./...
go tool cover -html=coverage.out -o coverage.html
go tool cover -func=coverage.out | tail -n 1
say "details in coverage.html"
