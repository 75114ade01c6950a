#!/usr/bin/env bash
# Builds the servers of Kubernetes that the tests in e2e/ run, as one binary,
# and prints its path as the only line on stdout.
#
# The binary is built once per version of its sources and of the compiler, and
# kept below bin/kube. A build takes four to six minutes on two cores and 3 GB
# in Go's build cache, which may be deleted afterwards ("go clean -cache").
# With KUBE_BIN nothing is built. --oldest builds the oldest Kubernetes that the
# chart supports instead, with the module e2e/kube/oldest.
set -euo pipefail
. "$(dirname "$0")/lib.sh"

note() { printf 'kube: %s\n' "$*" >&2; }

if [[ -n ${KUBE_BIN:-} ]]; then
  [[ -x $KUBE_BIN ]] || die "KUBE_BIN=$KUBE_BIN is not an executable file"
  realpath "$KUBE_BIN"
  exit
fi

use_go
module=e2e/kube kept=$root/bin/kube
if [[ ${1:-} == --oldest ]]; then
  module=e2e/kube/oldest kept=$root/bin/kube-oldest
fi
stamp=$({ go env GOVERSION GOARCH && cat "$module"/{go.mod,go.sum,main.go,kubelet.go}; } | sha256sum | cut -c1-16)
dir=$kept/$stamp
if [[ ! -x $dir/kube ]]; then
  need_space "$(go env GOCACHE)" 5000 "building Kubernetes" "set KUBE_BIN"
  need_space "$(go env GOMODCACHE)" 1500 "the modules of Kubernetes" "set KUBE_BIN"
  need_space "$root" 300 "the binary" "set KUBE_BIN"
  version=$(cd "$module" && go list -m -f '{{.Version}}' k8s.io/kubernetes) ||
    die "the modules of $module cannot be listed: is the Go module proxy within reach?"
  note "building Kubernetes $version (once; kept in ${kept#"$root/"})"
  about=k8s.io/component-base/version
  minor=${version#v1.}
  mkdir -p "$dir"
  started=$SECONDS
  (
    cd "$module"
    flags="-s -w -X $about.gitVersion=$version -X $about.gitMajor=1 -X $about.gitMinor=${minor%%.*}"
    CGO_ENABLED=0 nice -n 15 go build -buildvcs=false -trimpath -o "$dir/kube.tmp" \
      -ldflags "$flags -X k8s.io/client-go/pkg/version.gitVersion=$version" .
  ) >&2 || die "Kubernetes was not built; $(free_mb "$(go env GOCACHE)") MB are free for Go's build cache"
  mv "$dir/kube.tmp" "$dir/kube"
  find "$kept" -mindepth 1 -maxdepth 1 ! -name "$stamp" -exec rm -rf {} +
  note "built in $((SECONDS - started)) s"
fi
printf '%s\n' "$dir/kube"
