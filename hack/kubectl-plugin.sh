#!/usr/bin/env bash
# Builds the kubectl plugin "kubectl istio-cni" for linux, darwin and windows, amd64 and arm64, into bin/kubectl-plugin: programs,
# an archive of each, and istio-cni.yaml, their manifest for krew.
#
#   hack/kubectl-plugin.sh            build
#   hack/kubectl-plugin.sh --check    also build again, and compare
#
# PLUGIN_URL is the directory from which krew downloads the archives. The same
# tree gives the same bytes.
set -euo pipefail
. "$(dirname "$0")/lib.sh"
use_go

version=v$(sed -n 's/^appVersion: *//p' manifests/istio-cni/Chart.yaml)
home=https://$(go list -m)
url=${PLUGIN_URL:-$home/releases/download/$version}

stamp kubectl-plugin

# one builds and packs one program, and prints its part of the manifest.
one() { # DIRECTORY OS ARCH
  local dir=$1/$2-$3 program=kubectl-istio_cni archive=kubectl-istio_cni-$2-$3.tar.gz
  [[ $2 != windows ]] || program+=.exe
  mkdir -p "$dir"
  CGO_ENABLED=0 GOOS=$2 GOARCH=$3 go build "-buildvcs=$vcs" -trimpath -ldflags '-s -w' -o "$dir/$program" ./internal/role/fleet/kubectl-istio_cni
  install -m 644 LICENSE "$dir/LICENSE"
  tar --create --format=ustar --sort=name --mtime="@$created" --owner=0 --group=0 --numeric-owner --mode='u=rwX,go=rX' \
    -C "$dir" "$program" LICENSE | gzip -9 -n >"$1/$archive"
  cat <<EOF
  - selector:
      matchLabels: {os: $2, arch: $3}
    uri: $url/$archive
    sha256: $(sha256sum "$1/$archive" | cut -d' ' -f1)
    bin: $program
EOF
}

all() { # DIRECTORY
  rm -rf "$1"
  mkdir -p "$1"
  cat <<EOF
apiVersion: krew.googlecontainertools.github.com/v1alpha2
kind: Plugin
metadata:
  name: istio-cni
spec:
  version: $version
  homepage: $home
  shortDescription: Shows which pods bypass the Istio mesh, and why
  description: |
    Runs the commands of istio-cni's node agents by kubectl exec, and merges
    their answers: pods and the state of their redirection, the reason for it,
    the way of a packet through the live rules, checks of all nodes, and a
    bundle for bug reports.
  caveats: |
    Needs istio-cni's node agent in the cluster, and the right to list pods in
    its namespace and to create pods/exec there.
  platforms:
EOF
  for os in linux darwin windows; do
    for arch in amd64 arm64; do one "$1" "$os" "$arch"; done
  done
}

build() { # DIRECTORY
  local manifest
  manifest=$(all "$1")
  printf '%s\n' "$manifest" >"$1/istio-cni.yaml"
}

out=$root/bin/kubectl-plugin
build "$out"
say "built $out: $(find "$out" -name '*.tar.gz' | wc -l) archives, and istio-cni.yaml for krew, version $version"
case ${1:-build} in
  build) ;;
  --check)
    copy=$(mktemp -d)
    trap 'rm -rf "$copy"' EXIT
    # A build cache of its own: the second build must not reuse the first.
    GOCACHE=$copy/cache build "$copy/plugin"
    diff -r "$out" "$copy/plugin" || die "two builds of the same tree differ"
    say "kubectl-plugin: two builds give the same bytes"
    ;;
  *) die "unknown mode $1" ;;
esac
