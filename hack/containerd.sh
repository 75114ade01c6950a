#!/usr/bin/env bash
# Builds containerd 2 with its shim, runc and CNI plugins, and prints the path
# of their directory as the only line on stdout: containerd,
# containerd-shim-runc-v2 and runc, and below cni the plugins.
#
# The sources are modules of the Go module proxy, at the versions of
# e2e/containerd/go.mod. They are built once per version and compiler, and kept
# below bin/containerd: 80 MB, and two to five minutes on two cores. With
# CONTAINERD_BIN nothing is built.
set -euo pipefail
. "$(dirname "$0")/lib.sh"

note() { printf 'containerd: %s\n' "$*" >&2; }

if [[ -n ${CONTAINERD_BIN:-} ]]; then
  for name in containerd containerd-shim-runc-v2 runc cni/{bridge,host-local,loopback,portmap}; do
    [[ -x $CONTAINERD_BIN/$name ]] || die "CONTAINERD_BIN=$CONTAINERD_BIN has no program $name"
  done
  realpath "$CONTAINERD_BIN"
  exit
fi

hack/setup.sh containerd >&2
use_go
stamp=$({ go env GOVERSION GOARCH && cat e2e/containerd/go.{mod,sum}; } | sha256sum | cut -c1-16)
dir=$root/bin/containerd/$stamp

build() { # DIRECTORY ARGUMENT...
  mkdir -p "$dir.tmp/$1"
  (cd e2e/containerd && nice -n 15 go build -buildvcs=false -trimpath -ldflags '-s -w' -o "$dir.tmp/$1/" "${@:2}") >&2 ||
    die "containerd was not built; $(free_mb "$(go env GOCACHE)") MB are free for Go's build cache"
}

if [[ ! -d $dir ]]; then
  need_space "$(go env GOCACHE)" 1000 "building containerd" "set CONTAINERD_BIN"
  need_space "$(go env GOMODCACHE)" 800 "containerd's modules" "set CONTAINERD_BIN"
  need_space "$root" 100 "containerd" "set CONTAINERD_BIN"
  version=$(cd e2e/containerd && go list -m -f '{{.Version}}' github.com/containerd/containerd/v2) ||
    die "the modules of e2e/containerd cannot be listed: is the Go module proxy within reach?"
  note "building containerd $version (once; kept in bin/containerd)"
  rm -rf "$dir.tmp"
  started=$SECONDS
  # A pause container has a seccomp profile, for which runc needs libseccomp.
  CGO_ENABLED=1 build . -tags seccomp,netgo,osusergo github.com/opencontainers/runc
  export CGO_ENABLED=0
  build . github.com/containerd/containerd/v2/cmd/containerd{,-shim-runc-v2}
  build cni github.com/containernetworking/plugins/plugins/{ipam/host-local,main/bridge,main/loopback,meta/portmap}
  mv "$dir.tmp" "$dir"
  find "$root/bin/containerd" -mindepth 1 -maxdepth 1 ! -name "$stamp" -exec rm -rf {} +
  note "built in $((SECONDS - started)) s"
fi
printf '%s\n' "$dir"
