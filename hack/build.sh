#!/usr/bin/env bash
# Builds bin/istio-cni: static, stripped, without this machine's paths.
set -euo pipefail
. "$(dirname "$0")/lib.sh"
use_go

stamp build
compile bin/istio-cni linux "$(go env GOARCH)" .

say "built bin/istio-cni, $(stat -c %s bin/istio-cni | numfmt --to=iec), version $snapshot"
