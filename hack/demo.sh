#!/usr/bin/env bash
# Runs the built plugin at the end of a real CNI chain, in network namespaces,
# without a cluster.
set -euo pipefail
. "$(dirname "$0")/lib.sh"
need_root "the demo makes network namespaces"
use_go
[[ -x bin/istio-cni ]] || die "bin/istio-cni is missing: run make build first"
CGO_ENABLED=0 go build -buildvcs=false -trimpath -o bin/demo ./hack/demo
exec bin/demo bin/istio-cni
