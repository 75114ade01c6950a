#!/usr/bin/env bash
# Runs the tests of the packages that decide and convert: no root, no network namespace, no race detector, and from the
# cache of go test whatever has not changed. It installs nothing. "make test" is what CI runs: all packages.
set -euo pipefail
. "$(dirname "$0")/lib.sh"
use_go

# Left out are packages whose tests need root: internal/node, and the agent's packages that own sockets or the node's files.
packages=(
  ./internal ./internal/core/... ./internal/kube/... ./internal/applet/...
  ./internal/agent/{eventrecorder,health,metrics,selector,serve,standalone,taint,teardown}
  ./internal/role/{redirector,repairer,tainter}
)
CGO_ENABLED=0 go test -timeout 5m ${RUN:+-run "$RUN"} "${packages[@]}"
