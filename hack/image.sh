#!/usr/bin/env bash
# Packs bin/image/istio-cni.tar, an OCI image layout for amd64 and arm64, with
# software bills of materials (CycloneDX) next to it. It needs no container
# engine.
#
#   hack/image.sh            pack
#   hack/image.sh --check    also build a copy of the tree with an empty cache, and compare
#
# IMAGE is the name (default localhost/istio-cni/install-cni:VERSION of the
# chart), ARCHS the architectures. The same tree gives the same digest.
set -euo pipefail
. "$(dirname "$0")/lib.sh"
use_go

version=$(sed -n 's/^appVersion: *//p' manifests/istio-cni/Chart.yaml)
name=${IMAGE:-localhost/istio-cni/install-cni:$version}
read -r -a archs <<<"${ARCHS:-amd64 arm64}"
out=$root/bin/image

stamp image

pack() { # TREE DIRECTORY
  local tree=$1 dir=$2 arch args=()
  mkdir -p "$dir"
  for arch in "${archs[@]}"; do
    (cd "$tree" && CGO_ENABLED=0 GOOS=linux GOARCH=$arch go build "-buildvcs=$vcs" -trimpath -tags "$tags" -ldflags '-s -w' \
      -o "$dir/istio-cni-$arch" .)
    args+=(--program "$arch=$dir/istio-cni-$arch")
  done
  CGO_ENABLED=0 go build -buildvcs=false -trimpath -o bin/pack-image ./hack/image
  bin/pack-image "${args[@]}" --name "$name" --created "$created" --out "$dir"
}

case ${1:-pack} in
  pack) pack "$root" "$out" ;;
  --check)
    copy=$(mktemp -d)
    trap 'rm -rf "$copy"' EXIT
    mkdir "$copy/tree"
    tar --exclude=./bin -cf - . | tar -C "$copy/tree" -xf -
    pack "$root" "$out"
    # A build cache of its own: the second build must not reuse the first.
    GOCACHE=$copy/cache pack "$copy/tree" "$copy/image" >/dev/null
    for file in istio-cni.tar "${archs[@]/%/.cdx.json}"; do
      [[ $file == *.tar ]] || file=istio-cni-$file
      cmp "$out/$file" "$copy/image/$file" || die "two builds of the same tree differ in $file"
    done
    say "image: two builds give the same bytes"
    ;;
  *) die "unknown mode $1" ;;
esac
