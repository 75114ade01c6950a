#!/usr/bin/env bash
# Builds the kubectl plugin "kubectl istio-cni" for linux, darwin and windows, amd64 and arm64, into bin/kubectl-plugin: programs,
# an archive of each, and istio-cni.yaml, their manifest for krew.
#
# RELEASE_VERSION is the version (default: the chart's), PLUGIN_OUT another directory, and PLUGIN_URL the directory from which krew
# downloads the archives. The same tree gives the same bytes; hack/release.sh has that checked.
set -euo pipefail
. "$(dirname "$0")/lib.sh"
use_go

version=${RELEASE_VERSION:-v$(sed -n 's/^appVersion: *//p' manifests/istio-cni/Chart.yaml)}
home=https://$(go list -m)
url=${PLUGIN_URL:-$home/releases/download/$version}

stamp kubectl-plugin

# one builds and packs one program, and prints its part of the manifest.
one() { # DIRECTORY OS ARCH
  local dir=$1/$2-$3 program=kubectl-istio_cni archive=kubectl-istio_cni-$2-$3.tar.gz
  [[ $2 != windows ]] || program+=.exe
  mkdir -p "$dir"
  compile "$dir/$program" "$2" "$3" ./internal/role/fleet/kubectl-istio_cni
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
    Needs istio-cni's node agent in the cluster, and the right to list
    DaemonSets, nodes, and pods in its namespace, and to create pods/exec there.
  platforms:
EOF
  for os in linux darwin windows; do
    for arch in amd64 arm64; do one "$1" "$os" "$arch"; done
  done
}

out=${PLUGIN_OUT:-$root/bin/kubectl-plugin}
manifest=$(all "$out")
printf '%s\n' "$manifest" >"$out/istio-cni.yaml"
say "built $out: $(find "$out" -name '*.tar.gz' | wc -l) archives, and istio-cni.yaml for krew, version $version"
