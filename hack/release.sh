#!/usr/bin/env bash
# Writes dist/: everything that a release consists of. The same commit, version, HUB and PLUGIN_URL give the same bytes: it is built in a
# clone of the commit, with the Go that the line toolchain of hack/release/go.mod names. hack/publish.sh pushes it.
#
#   hack/release.sh v0.2.0             write dist/
#   hack/release.sh --check [VERSION]  also write it again elsewhere, with an empty build cache for amd64, compare, and
#                                      publish it to a registry on loopback; the default is a prerelease of the chart's version
#
# Before a version: --tagged fails without a git tag of the version's name, --dirty adds uncommitted changes of files that git knows.
#
# Release notes are the changelog's section of the version. Without one, snapshots and prereleases take the section Unreleased,
# and --unreleased does that for a release.
#
# A version with a git tag of its name is built from that commit only; without a tag dist/ is a snapshot, and says so. HUB is the
# registry and path to which install-cni and charts/cni are pushed: chart and manifest get it as the default of global.hub.
# PLUGIN_URL: see hack/kubectl-plugin.sh. .github/CONTRIBUTING.md has the files.
set -euo pipefail
. "$(dirname "$0")/lib.sh"

mode=build dirty='' unreleased='' tagged=''
while [[ ${1:-} == --* ]]; do
  case $1 in
    --dirty) dirty=yes ;;
    --unreleased) unreleased=yes ;;
    --tagged) tagged=yes ;;
    --check) mode=check ;;
    *) die "unknown option $1" ;;
  esac
  shift
done
[[ $# -le 1 ]] || die "more than one argument: $*"

hub=${HUB:-}
[[ $hub =~ ^([a-z0-9.:-]+(/[a-z0-9._-]+)*)?$ ]] || die "HUB is $hub: want a registry and a path, without scheme, tag or slash at the end"

module=$(sed -n 's/^module //p' go.mod)

# release_go clears what the environment and Go's own settings change in a program, and takes the one Go that releases are built with.
release_go() {
  local name want keep='GO(PATH|CACHE|MODCACHE|PROXY|SUMDB|NOSUMDB|NOPROXY|PRIVATE|INSECURE|TMPDIR)'
  want=$(sed -n 's/^toolchain //p' hack/release/go.mod)
  use_go
  for name in GOPATH GOCACHE GOMODCACHE GOPROXY GOSUMDB GONOSUMDB GONOPROXY GOPRIVATE GOINSECURE; do
    export "$name=$(cd / && go env "$name")"
  done
  for name in $(compgen -e | grep -E '^(C?GO[A-Z]|GZIP$|TAR_OPTIONS$|SOURCE_DATE_EPOCH$)' | grep -vxE "$keep"); do
    unset "$name"
  done
  export LC_ALL=C GOENV=off GOWORK=off GOTOOLCHAIN=$want GOAMD64=v1 GOARM64=v8.0 GOPPC64=power8
  [[ $(go env GOVERSION) == "$want" ]] || die "releases are built with $want alone: it is not here, and cannot be downloaded"
  PATH=$(go env GOROOT)/bin:$PATH
  GOTOOLCHAIN=local
}

# check_version sets version and number, which is the version of chart and image.
check_version() {
  local part='(0|[1-9][0-9]*)' word='(0|[1-9][0-9]*|[0-9]*[A-Za-z-][0-9A-Za-z-]*)'
  version=$1
  [[ -n $version ]] || die "want a version: make release VERSION=v0.2.0"
  # An image tag cannot have build metadata (+).
  [[ $version =~ ^v$part\.$part\.$part(-$word(\.$word)*)?$ ]] || die "version $version: want v and a semantic version without +, such as v0.2.0-rc.1"
  number=${version#v}
  [[ ${#number} -le 128 ]] || die "version $version is longer than the 128 characters of an image tag"
}

# check_tree sets revision and tag, and refuses a tree that is not what the version says.
check_tree() {
  local commit
  revision=$(git rev-parse --quiet --verify HEAD 2>/dev/null) || die "git cannot read a commit here: a release is of a commit"
  [[ -n $(git status --porcelain) ]] || dirty=''
  tag=''
  if commit=$(git rev-parse --quiet --verify "refs/tags/$version^{commit}"); then
    tag=$version
    [[ $commit == "$revision" ]] || die "the tag $version is commit $commit, and this is $revision: git checkout $version"
    [[ -z $(git status --porcelain) ]] || die "there is a tag $version, and the tree has uncommitted changes: git status"
    return
  fi
  [[ -z $tagged ]] || die "there is no tag $version"
  [[ -z $(git status --porcelain) || -n $dirty ]] || die "the tree has uncommitted changes (git status): commit them, or say --dirty"
  say "release: there is no tag $version: this is a snapshot of $revision${dirty:+ with uncommitted changes}"
}

# tree makes a clone of the commit, with no tag but the version's. Files that git ignores or does not know are not there.
tree() { # DIRECTORY
  git clone -q --no-tags --no-checkout -c core.autocrlf=false -c core.hooksPath=/dev/null "$root" "$1"
  git -C "$1" checkout -q --detach "$revision"
  [[ -z $tag ]] || git -C "$1" -c tag.gpgSign=false tag "$tag"
  [[ -z $dirty ]] || git diff-index --binary -p HEAD | git -C "$1" apply --index --allow-empty
  [[ -n $(git -C "$1" status --porcelain) ]] || dirty=''
}

# section prints the changelog's section of a version.
section() { awk -v want="$1" '/^## / { name = $2; gsub(/[][]/, "", name); on = name == want; next } on' docs/changelog.md; }

# notes prints the release notes; links to pages lead to the repository.
notes() {
  local text
  text=$(section "$number")
  [[ -n $text || $number != *-* ]] || text=$(section "${number%%-*}")
  if [[ -z $text && ( -n $unreleased || -z $tag || $number == *-* ) ]]; then
    text=$(section Unreleased)
    text=${text:-No changes that a user notices.}
  fi
  [[ -n $text ]] || die "docs/changelog.md has no section ## [$number] - DATE: rename Unreleased, or say --unreleased"
  printf '# istio-cni %s\n' "$version"
  [[ -z $hub ]] || printf '\n%s\n' "Image \`$hub/install-cni:$number\`, chart \`oci://$hub/charts/cni\` of version \`$number\`."
  printf '\n%s\n' "[How to verify it](https://$module/blob/${tag:-$revision}/docs/install.md#verifying-a-release)."
  [[ -n $tag ]] || printf '\nA snapshot of commit %s, not a release.\n' "$revision"
  printf '%s\n' "$text" | sed "s,](\([a-z-]*\.md\),](https://$module/blob/${tag:-$revision}/docs/\1,g"
}

# chart stages the chart with the version, and HUB as the default, and packs it.
chart() { # DIRECTORY
  local stage=$work/chart/cni
  mkdir -p "$work/chart"
  cp -R manifests/istio-cni "$stage"
  rm "$stage/.helmignore"
  sed -i -e "s/^version: .*/version: $number/" -e "s/^appVersion: .*/appVersion: $number/" "$stage/Chart.yaml"
  if [[ -n $hub ]]; then
    sed -i "s,^\( *\)hub: localhost/istio-cni$,\1hub: $hub," "$stage/values.yaml" "$stage/files/defaults.yaml"
    sed -i "s,\"localhost/istio-cni\",\"$hub\"," "$stage/README.md"
  fi
  tar --create --format=ustar --sort=name --mtime="@$created" --owner=0 --group=0 --numeric-owner --mode='u=rwX,go=rX' \
    -C "$work/chart" cni | gzip -9 -n >"$1/istio-cni-$number.tgz"
  hack/manifests.sh --of "$stage" >"$1/istio-cni.yaml"
}

architectures='amd64 arm64 ppc64le s390x'

image() { # DIRECTORY
  local arch args=()
  for arch in $architectures; do
    compile "$1/istio-cni-linux-$arch" linux "$arch" .
    programs+=("$1/istio-cni-linux-$arch=$1/istio-cni-linux-$arch.cdx.json")
    args+=(--program "$arch=$1/istio-cni-linux-$arch")
    # One platform shows whether the cache matters. Filling it takes a minute for each.
    unset PROGRAM_CACHE
  done
  packer
  bin/pack-image "${args[@]}" --name "${hub:-localhost/istio-cni}/install-cni:$number" --created "$created" \
    --out "$1" --tar "istio-cni-image-$number.tar"
}

plugin() { # DIRECTORY
  local file platform
  PLUGIN_OUT=$work/plugin hack/kubectl-plugin.sh
  cp "$work/plugin"/*.tar.gz "$1/"
  cp "$work/plugin/istio-cni.yaml" "$1/kubectl-istio_cni.yaml"
  for file in "$work/plugin"/*/kubectl-istio_cni*; do
    platform=$(basename "$(dirname "$file")")
    programs+=("$file=$1/kubectl-istio_cni-$platform.cdx.json")
  done
}

# write writes the files of a release into a directory, from the tree in which it is called. Image and plugin add to programs those that
# get a bill of materials.
write() { # DIRECTORY
  local out=$1 programs=()
  mkdir "$out"
  notes >"$out/RELEASE_NOTES.md"
  release_go
  stamp release
  export RELEASE_VERSION=$version
  chart "$out"
  image "$out"
  plugin "$out"
  (cd hack/release && CGO_ENABLED=0 go build -buildvcs=false -trimpath -o ../../bin/bom ./bom)
  bin/bom --version "$version" "${programs[@]}"
  (cd "$out" && sha256sum -- * >"$work/CHECKSUMS")
  mv "$work/CHECKSUMS" "$out"
  chmod -R u=rwX,go=rX "$out"
}

build() {
  check_version "$1"
  check_tree
  tree "$work/tree"
  (
    cd "$work/tree"
    write "$work/dist"
  )
  rm -rf dist "$work/tree"
  mv "$work/dist" dist
  say "release: dist/ has $version, $(du -sh dist | cut -f1)"
}

# listed fails if the bill of materials of a program lacks one of its modules.
listed() { # PROGRAM
  local modules missing
  modules=$(go version -m "$1" | awk '$1 == "dep" { print $2 "@" $3 }' | sort)
  missing=$(sed -n 's,.*"purl": "pkg:golang/\([^?"]*\).*,\1,p' "$1.cdx.json" | sort | comm -23 <(printf '%s\n' "$modules") -)
  [[ -n $modules && -z $missing ]] || die "$1.cdx.json lacks $missing"
}

# loopback publishes dist/ to a registry, twice, pulls image and chart, and expects that a tag is not moved. Nothing is signed.
loopback() {
  local log=$work/registry.log image chart text
  registry_tools
  mkdir "$work"/{cosign,image}
  printf '#!/bin/sh\necho "would run: cosign $*"\n' >"$work/cosign/cosign"
  chmod +x "$work/cosign/cosign"
  crane registry serve --address localhost:0 2>"$log" &
  trap 'kill %1; rm -rf "$work"' EXIT
  until grep -q 'serving on port' "$log"; do
    kill -0 %1 || die "the registry did not start: $(<"$log")"
    sleep 0.1
  done
  export HUB DOCKER_CONFIG=$work/docker HUB_USERNAME=jane HUB_PASSWORD=secret
  HUB=localhost:$(sed -n 's/.*serving on port //p' "$log")/mesh
  image=$HUB/install-cni:$number chart=$HUB/charts/cni
  PATH=$work/cosign:$PATH hack/publish.sh --sign
  hack/publish.sh
  tar -C "$work/image" -xf "dist/istio-cni-image-$number.tar"
  crane pull --format oci "$image" "$work/pulled"
  diff -r "$work/image/blobs" "$work/pulled/blobs" || die "another image is pulled than was pushed"
  helm pull --plain-http "oci://$chart" --version "$number" -d "$work/pulled"
  cmp "$work/pulled/cni-$number.tgz" "dist/istio-cni-$number.tgz" || die "another chart is pulled than was pushed"
  crane copy "$chart:$number" "$image" 2>"$work/log"
  if text=$(hack/publish.sh 2>&1) || [[ $text != *"the tag $image exists"* ]]; then
    die "a tag is moved: $text"
  fi
}

# check builds again in another directory. What must not matter is different: the build cache of one program, ignored files, another tag,
# settings of Go.
check() {
  local flags=(${unreleased:+--unreleased}) again=$work/again arch
  if [[ -z $1 ]]; then
    dirty=yes
    set -- "v$(sed -n 's/^version: *//p' manifests/istio-cni/Chart.yaml)-check"
  fi
  build "$1"
  [[ -z $dirty ]] || flags+=(--dirty)
  tree "$again"
  git -C "$again" -c tag.gpgSign=false tag v999.0.0
  echo 'not Go' | tee "$again/coverage.go" "$again/manifests/istio-cni/templates/coverage.yaml" >"$again/manifests/istio-cni/.values.yaml.swp"
  GOAMD64=v3 GOFLAGS=-gcflags=-N SOURCE_DATE_EPOCH=1 PROGRAM_CACHE=$work/cache "$again/hack/release.sh" "${flags[@]}" "$1" >"$work/log" || {
    cat "$work/log"
    die "the second build failed"
  }
  diff -rq dist "$again/dist" || die "two builds of the same commit differ"
  say "release: two builds give the same bytes"
  rm -rf "$work/cache" "$again"
  (cd dist && sha256sum --quiet -c CHECKSUMS)
  use_go
  (cd hack/release && go test -count=1 ./...)
  for arch in $architectures; do listed "dist/istio-cni-linux-$arch"; done
  "dist/istio-cni-linux-$(go env GOARCH)" version | grep -F "version $1,"
  loopback
}

# What is built is not in a file that git sees, which would make the tree dirty.
mkdir -p bin
for old in bin/dist.*; do # of a killed run
  pid=${old#bin/dist.}
  [[ -d /proc/${pid%%.*} ]] || rm -rf "$old"
done
work=$(mktemp -d "$root/bin/dist.$$.XXXXXX")
trap 'rm -rf "$work"' EXIT
"$mode" "${1:-}"
