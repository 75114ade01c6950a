#!/usr/bin/env bash
# Packs bin/image/istio-cni.tar, an OCI image layout for amd64 and arm64. It needs no container engine. The same tree gives the
# same digest; hack/release.sh packs what is released.
#
# IMAGE is the name (default localhost/istio-cni/install-cni:VERSION of the
# chart), ARCHS the architectures.
set -euo pipefail
. "$(dirname "$0")/lib.sh"
use_go

version=$(sed -n 's/^appVersion: *//p' manifests/istio-cni/Chart.yaml)
read -r -a archs <<<"${ARCHS:-amd64 arm64}"
out=$root/bin/image

stamp image
mkdir -p "$out"
for arch in "${archs[@]}"; do
  compile "$out/istio-cni-$arch" linux "$arch" .
  args+=(--program "$arch=$out/istio-cni-$arch")
done
packer
bin/pack-image "${args[@]}" --name "${IMAGE:-localhost/istio-cni/install-cni:$version}" --created "$created" --out "$out"
