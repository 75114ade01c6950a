#!/usr/bin/env bash
# Builds bin/istio-cni: static, stripped, without this machine's paths.
#
# Go derives the version from the checkout, which needs a readable git
# repository. -buildvcs=auto fails if git refuses the directory (another
# owner) or there is no commit yet, so the script checks that first.
set -euo pipefail
. "$(dirname "$0")/lib.sh"
use_go

vcs=auto
if ! git -C "$root" rev-parse --quiet --verify HEAD >/dev/null 2>&1; then
  vcs=false
  say "build: git cannot read a commit here; the binary will carry no revision"
fi

CGO_ENABLED=0 go build "-buildvcs=$vcs" -trimpath -tags "$tags" -ldflags '-s -w' -o bin/istio-cni .

version=$(go version -m bin/istio-cni | awk '$1 == "mod" { print $3 }')
say "built bin/istio-cni, $(stat -c %s bin/istio-cni | numfmt --to=iec), version $version"
