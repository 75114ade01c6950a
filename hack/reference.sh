#!/usr/bin/env bash
# Builds the reference, Istio's own istio-cni with its istiod and istioctl, and
# Helm, and prints the path of their directory as the only line on stdout:
# install-cni, istio-cni, pilot-discovery, istioctl and helm are programs,
# chart is the reference's chart of istio-cni.
#
# The sources are modules of the Go module proxy, at the versions of
# e2e/reference/go.mod and e2e/helm/go.mod. Each is built once per version and
# compiler, and kept below bin/reference: 480 MB, and more than ten minutes on two
# cores. With REFERENCE_BIN nothing is built.
set -euo pipefail
. "$(dirname "$0")/lib.sh"

note() { printf 'reference: %s\n' "$*" >&2; }

if [[ -n ${REFERENCE_BIN:-} ]]; then
  for name in install-cni istio-cni pilot-discovery istioctl helm chart/Chart.yaml; do
    [[ -f $REFERENCE_BIN/$name ]] || die "REFERENCE_BIN=$REFERENCE_BIN has no $name"
  done
  realpath "$REFERENCE_BIN"
  exit
fi

use_go
# Istio's Makefile.core.mk builds its node agent and plugin with these tags (AGENT_TAGS): 30 MB less in each program, and
# a start that is as much cheaper. Without them a comparison with e2e/scale would be unfair.
tags=agent,disable_pgv,grpcnotrace,retrynotrace
stamp=$({ go env GOVERSION GOARCH && printf '%s\n' "$tags" && cat e2e/{reference,helm}/go.{mod,sum}; } | sha256sum | cut -c1-16)
dir=$root/bin/reference/$stamp

build() { # MODULE [-tags=TAGS] PACKAGE...
  local module=$1
  shift
  (cd "$module" && CGO_ENABLED=0 nice -n 15 go build -buildvcs=false -trimpath -ldflags '-s -w' -o "$dir.tmp/" "$@") >&2 ||
    die "$module was not built; $(free_mb "$(go env GOCACHE)") MB are free for Go's build cache"
}

if [[ ! -d $dir ]]; then
  need_space "$(go env GOCACHE)" 4000 "building the reference" "set REFERENCE_BIN"
  need_space "$(go env GOMODCACHE)" 1500 "the reference's modules" "set REFERENCE_BIN"
  need_space "$root" 500 "the reference" "set REFERENCE_BIN"
  version=$(cd e2e/reference && go list -m -f '{{.Version}}' istio.io/istio) ||
    die "the modules of e2e/reference cannot be listed: is the Go module proxy within reach?"
  note "building istio-cni, istiod and istioctl of istio.io/istio $version, and Helm (once; kept in bin/reference)"
  rm -rf "$dir.tmp"
  mkdir -p "$dir.tmp"
  started=$SECONDS
  build e2e/reference "-tags=$tags" istio.io/istio/cni/cmd/{install-cni,istio-cni}
  build e2e/reference istio.io/istio/{pilot/cmd/pilot-discovery,istioctl/cmd/istioctl}
  build e2e/helm helm.sh/helm/v3/cmd/helm
  source=$(cd e2e/reference && go list -m -f '{{.Dir}}' istio.io/istio)
  cp -r "$source/manifests/charts/istio-cni" "$dir.tmp/chart"
  chmod -R u+w "$dir.tmp/chart"
  mv "$dir.tmp" "$dir"
  find "$root/bin/reference" -mindepth 1 -maxdepth 1 ! -name "$stamp" -exec rm -rf {} +
  note "built in $((SECONDS - started)) s"
fi
printf '%s\n' "$dir"
