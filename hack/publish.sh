#!/usr/bin/env bash
# Publishes dist/, which hack/release.sh wrote: verifies it, pushes image and chart to HUB, signs them, and makes the release on GitHub. The
# workflow release runs it, with cosign and gh.
#
#   hack/publish.sh            publish
#   hack/publish.sh --dry-run  verify, and print what would be done; needs neither cosign nor gh nor a registry
#
# HUB is registry and path, those that dist/ was built with; HUB_USERNAME and HUB_PASSWORD the account there (without: that of the machine's configuration),
# VERSION the tag, GH_TOKEN a token that may write releases.
set -euo pipefail
. "$(dirname "$0")/lib.sh"

case ${1:-} in
  --dry-run) dry=--dry-run ;;
  '') dry= ;;
  *) die "unknown option $1" ;;
esac
[[ -n ${VERSION:-} ]] || die "VERSION is not set: the tag, such as v0.2.0"
[[ -n ${HUB:-} || -n $dry ]] || die "HUB is not set: registry and path to push to, in GitHub the repository's variable HUB"
[[ -f dist/RELEASE_NOTES.md ]] || die "there is no dist/: make release VERSION=$VERSION"

# login writes the account to a configuration that ends with this script.
login() {
  local registry=${HUB%%/*}
  # The name under which clients look for the account of Docker Hub.
  [[ $registry != docker.io ]] || registry=https://index.docker.io/v1/
  DOCKER_CONFIG=$(mktemp -d)
  export DOCKER_CONFIG
  trap 'rm -rf "$DOCKER_CONFIG"' EXIT
  printf '{"auths": {"%s": {"auth": "%s"}}}\n' "$registry" "$(printf '%s:%s' "$HUB_USERNAME" "$HUB_PASSWORD" | base64 -w0)" \
    >"$DOCKER_CONFIG/config.json"
}

export VERSION
hack/release.sh --verify dist
[[ -n $dry ]] || grep -qF "\"tag\": \"$VERSION\"" dist/provenance.intoto.json || die "dist/ is a snapshot, not a build of the tag $VERSION"
export HUB=${HUB:-localhost/dry-run}
if [[ -z $dry && -n ${HUB_PASSWORD:-} ]]; then
  login
fi
hack/release.sh ${dry:+"$dry"} --push dist
hack/release.sh ${dry:+"$dry"} --sign dist

# Signing wrote a file into dist/, so the list is of now. Directories are in archives beside them.
mapfile -t files < <(find dist -maxdepth 1 -type f | LC_ALL=C sort)
command=(gh release create "$VERSION" --verify-tag --title "$VERSION" --notes-file dist/RELEASE_NOTES.md)
if [[ $VERSION == *-* ]]; then
  command+=(--prerelease)
fi
command+=("${files[@]}")
if [[ -n $dry ]]; then
  say "would run: ${command[*]}"
else
  "${command[@]}"
fi
