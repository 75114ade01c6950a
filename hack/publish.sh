#!/usr/bin/env bash
# Pushes image and chart of dist/, which hack/release.sh wrote, with crane and Helm. It never moves a tag: one that exists with other
# content is an error, before anything is pushed.
#
#   hack/publish.sh         push
#   hack/publish.sh --sign  also sign both with cosign, without keys, and attest the bills of materials of the image; the identity is the
#                           workflow's
#
# HUB is the registry and path that dist/ was built with; HUB_USERNAME and HUB_PASSWORD are the account there (default: the
# machine's configuration). In a workflow the digests are the outputs image and chart.
set -euo pipefail
. "$(dirname "$0")/lib.sh"

[[ -n ${HUB:-} ]] || die "HUB is not set: the registry and path to push to, in GitHub the repository's variable HUB"
tar=$(compgen -G 'dist/istio-cni-image-*.tar') || die "there is no dist/, or it has no image: make release"
number=${tar#dist/istio-cni-image-}
number=${number%.tar}
image=$HUB/install-cni:$number chart=$HUB/charts/cni:$number package=dist/istio-cni-$number.tgz
layout=$(mktemp -d)
trap 'rm -rf "$layout"' EXIT
tar -C "$layout" -xf "$tar"
use_go
registry_tools

# unmoved refuses a tag that exists with another digest, or without the layer.
unmoved() { # TAG DIGEST
  local there
  if there=$(crane digest "$1" 2>&1 && crane manifest "$1"); then
    [[ $there == *"$2"* ]] || die "the tag $1 exists, with other content"
  else
    [[ $there == *_UNKNOWN* ]] || die "looking for the tag $1: $there"
  fi
}

if [[ -n ${HUB_PASSWORD:-} ]]; then
  crane auth login "${HUB%%/*}" --username "$HUB_USERNAME" --password-stdin <<<"$HUB_PASSWORD"
fi
unmoved "$image" "$(grep -o 'sha256:[0-9a-f]*' "$layout/index.json")"
unmoved "$chart" "$(sha256sum <"$package" | cut -d' ' -f1)"
pushed=$(crane push "$layout" "$image")
# Helm writes the time of the file into the manifest.
touch -d "$(tar --utc --full-time -tvzf "$package" | awk 'NR == 1 { print $4, $5, "UTC" }')" "$package"
plain=()
[[ $HUB != localhost:* ]] || plain=(--plain-http)
helm push "${plain[@]}" "$package" "oci://$HUB/charts"
digest=$(crane digest "$chart")
printf '%s\n' "image=${pushed#*@}" "chart=$digest" | tee -a "${GITHUB_OUTPUT:-/dev/null}"
[[ ${1:-} == --sign ]] || exit 0
cosign sign --yes --recursive "$pushed" "${chart%:*}@$digest"
for bom in dist/istio-cni-linux-*.cdx.json; do
  arch=$(basename "${bom#dist/istio-cni-linux-}" .cdx.json)
  cosign attest --yes --type cyclonedx --predicate "$bom" "${image%:*}@$(crane digest --platform "linux/$arch" "$pushed")"
done
