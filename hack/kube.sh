#!/usr/bin/env bash
# Builds the servers of Kubernetes that the tests in e2e/ run, as one binary,
# and prints its path as the only line on stdout.
#
# The binary is built once per version of its sources and of the compiler, and
# kept below bin/kube. A build takes four to six minutes on two cores and 3 GB
# in Go's build cache, which may be deleted afterwards ("go clean -cache").
# With KUBE_BIN nothing is built.
set -euo pipefail
. "$(dirname "$0")/lib.sh"

note() { printf 'kube: %s\n' "$*" >&2; }

if [[ -n ${KUBE_BIN:-} ]]; then
  [[ -x $KUBE_BIN ]] || die "KUBE_BIN=$KUBE_BIN is not an executable file"
  realpath "$KUBE_BIN"
  exit
fi

use_go
stamp=$({ go env GOVERSION GOARCH && cat e2e/kube/go.mod e2e/kube/go.sum e2e/kube/main.go; } | sha256sum | cut -c1-16)
dir=$root/bin/kube/$stamp
if [[ ! -x $dir/kube ]]; then
  need_space "$(go env GOCACHE)" 5000 "building Kubernetes" "set KUBE_BIN"
  need_space "$(go env GOMODCACHE)" 1500 "the modules of Kubernetes" "set KUBE_BIN"
  need_space "$root" 300 "the binary" "set KUBE_BIN"
  version=$(cd e2e/kube && go list -m -f '{{.Version}}' k8s.io/kubernetes) ||
    die "the modules of e2e/kube cannot be listed: is the Go module proxy within reach?"
  note "building Kubernetes $version (once; kept in bin/kube)"
  about=k8s.io/component-base/version
  minor=${version#v1.}
  mkdir -p "$dir"
  started=$SECONDS
  (
    cd e2e/kube
    flags="-s -w -X $about.gitVersion=$version -X $about.gitMajor=1 -X $about.gitMinor=${minor%%.*}"
    CGO_ENABLED=0 nice -n 15 go build -buildvcs=false -trimpath -o "$dir/kube.tmp" \
      -ldflags "$flags -X k8s.io/client-go/pkg/version.gitVersion=$version" .
  ) >&2 || die "Kubernetes was not built; $(free_mb "$(go env GOCACHE)") MB are free for Go's build cache"
  mv "$dir/kube.tmp" "$dir/kube"
  find "$root/bin/kube" -mindepth 1 -maxdepth 1 ! -name "$stamp" -exec rm -rf {} +
  note "built in $((SECONDS - started)) s"
fi
printf '%s\n' "$dir/kube"
