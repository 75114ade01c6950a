#!/usr/bin/env bash
# Writes dist/: everything that a release consists of. The same commit, version and HUB give the same bytes.
#
#   hack/release.sh v0.2.0             write dist/
#   hack/release.sh --check [VERSION]  also write it again from a copy of the tree with an empty build cache, compare, verify,
#                                      and test the verification; the default is a prerelease of the chart's version
#   hack/release.sh --verify [DIR]     check a dist/ from the outside; with VERSION set it must be that version
#   hack/release.sh --push [DIR]       push image and chart to HUB, and print their digests; no tag is moved
#   hack/release.sh --sign [DIR]       sign with cosign, without keys: the identity is that of the workflow
#
# --dry-run before --push or --sign prints what would be done. Before a version, --dirty allows uncommitted changes.
#
# Release notes are the changelog's section of the version. Without one, snapshots and prereleases take the section Unreleased,
# and --unreleased does that for a release.
#
# A version with a git tag of its name is built from that commit only; without a tag dist/ is a snapshot, and says so. HUB is
# registry and path, to which install-cni and charts/cni are pushed: chart and manifest get it as the default of global.hub.
# BUILDER is the URI in the provenance of what builds, PLUGIN_URL see hack/kubectl-plugin.sh. .github/CONTRIBUTING.md has the files.
set -euo pipefail
. "$(dirname "$0")/lib.sh"

mode=build dirty='' unreleased='' dry=''
while [[ ${1:-} == --* ]]; do
  case $1 in
    --dirty) dirty=yes ;;
    --unreleased) unreleased=yes ;;
    --dry-run) dry=yes ;;
    --check | --verify | --push | --sign) mode=${1#--} ;;
    *) die "unknown option $1" ;;
  esac
  shift
done
[[ $# -le 1 ]] || die "more than one argument: $*"

hub=${HUB:-}
[[ $hub =~ ^([a-z0-9.:-]+(/[a-z0-9._-]+)*)?$ ]] || die "HUB is $hub: want a registry and a path, without scheme, tag or slash at the end"

module=$(sed -n 's/^module //p' go.mod)

tools() {
  use_go
  (cd hack/release && CGO_ENABLED=0 go build -buildvcs=false -trimpath -ldflags '-s -w' -o "$root/bin/release" .)
}

# check_version sets version and number, which is the version of chart and image.
check_version() {
  local part='(0|[1-9][0-9]*)' word='(0|[1-9][0-9]*|[0-9]*[A-Za-z-][0-9A-Za-z-]*)'
  version=$1
  [[ -n $version ]] || die "want a version: make release VERSION=v0.2.0"
  [[ $version == v* ]] || die "version $version: want a v at the start, such as v0.2.0"
  [[ $version != *+* ]] || die "version $version: image tags cannot have build metadata (+)"
  [[ $version =~ ^v$part\.$part\.$part(-$word(\.$word)*)?$ ]] || die "version $version is no semantic version, such as v0.2.0 or v0.2.0-rc.1"
  number=${version#v}
  [[ ${#number} -le 128 ]] || die "version $version is longer than the 128 characters of an image tag"
}

# check_tree sets revision and tag, and refuses a tree that is not what the version says.
check_tree() {
  local commit
  revision=$(git rev-parse --quiet --verify HEAD 2>/dev/null) || die "git cannot read a commit here: a release is of a commit"
  [[ -d .git ]] || die "Go reads no commit in a linked worktree, and programs would have no revision: git clone"
  [[ -n $(git status --porcelain) ]] || dirty=''
  tag=''
  if commit=$(git rev-parse --quiet --verify "refs/tags/$version^{commit}"); then
    tag=$version
    [[ $commit == "$revision" ]] || die "the tag $version is commit $commit, and this is $revision: git checkout $version"
    [[ -z $(git status --porcelain) ]] || die "there is a tag $version, and the tree has uncommitted changes: git status"
    return
  fi
  [[ -z $(git status --porcelain) || -n $dirty ]] || die "the tree has uncommitted changes (git status): commit them, or say --dirty"
  say "release: there is no tag $version: this is a snapshot of $revision${dirty:+ with uncommitted changes}"
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
  fi
  tar --create --format=ustar --sort=name --mtime="@$created" --owner=0 --group=0 --numeric-owner --mode='u=rwX,go=rX' \
    -C "$work/chart" cni | gzip -9 -n >"$1/istio-cni-$number.tgz"
  hack/manifests.sh --of "$stage" >"$1/istio-cni.yaml"
}

bom() { # PROGRAM FILE
  bin/release bom --program "$1" --version "$version" --out "$2"
}

image() { # DIRECTORY
  local arch args=()
  for arch in amd64 arm64 ppc64le s390x; do
    compile "$1/istio-cni-linux-$arch" linux "$arch" .
    bom "$1/istio-cni-linux-$arch" "$1/istio-cni-linux-$arch.cdx.json"
    args+=(--program "$arch=$1/istio-cni-linux-$arch,$1/istio-cni-linux-$arch.cdx.json")
  done
  packer
  bin/pack-image "${args[@]}" --name "${hub:-localhost/istio-cni}/install-cni:$number" --created "$created" \
    --out "$1" --tar "istio-cni-image-$number.tar"
  mkdir "$1/image"
  tar -C "$1/image" -xf "$1/istio-cni-image-$number.tar"
}

plugin() { # DIRECTORY
  local file platform
  PLUGIN_OUT=$work/plugin hack/kubectl-plugin.sh
  cp "$work/plugin"/*.tar.gz "$1/"
  cp "$work/plugin/istio-cni.yaml" "$1/kubectl-istio_cni.yaml"
  for file in "$work/plugin"/*/kubectl-istio_cni*; do
    platform=$(basename "$(dirname "$file")")
    bom "$file" "$1/kubectl-istio_cni-$platform.cdx.json"
  done
}

build() {
  local out=$work/dist
  check_version "$1"
  check_tree
  stamp release
  notes >"$work/notes"
  tools
  export RELEASE_VERSION=$version
  mkdir "$out"
  mv "$work/notes" "$out/RELEASE_NOTES.md"
  chart "$out"
  image "$out"
  plugin "$out"
  bin/release finish --dir "$out" --version "$version" --hub "$hub" --revision "$revision" --tag "$tag" --created "$created" \
    --builder "${BUILDER:-https://$module/blob/$revision/hack/release.sh}" ${dirty:+--dirty}
  chmod -R u=rwX,go=rX "$out"
  rm -rf dist
  mv "$out" dist
  say "release: dist/ has $version, $(du -sh dist | cut -f1)"
}

# verify calls what needs no libraries here: the manifest is the chart's rendering.
verify() { # DIRECTORY
  local charts
  hack/setup.sh arch
  tools
  bin/release verify --dir "$1" --version "${VERSION:-}"
  charts=("$1"/istio-cni-*.tgz)
  mkdir -p "$work/verified"
  tar -C "$work/verified" -xzf "${charts[0]}"
  hack/manifests.sh --of "$work/verified/cni" | cmp - "$1/istio-cni.yaml" || die "$1/istio-cni.yaml is not the chart's default rendering"
}

# check builds again from a copy of the tree, with a build cache of its own: the second build must not reuse the first.
check() {
  local flags=(${unreleased:+--unreleased})
  if [[ -z $1 ]]; then
    dirty=yes
    set -- "v$(sed -n 's/^version: *//p' manifests/istio-cni/Chart.yaml)-check"
  fi
  [[ -z $dirty ]] || flags+=(--dirty)
  build "$1"
  mkdir "$work/tree"
  tar --exclude=./bin --exclude=./dist -cf - . | tar -C "$work/tree" -xf -
  PROGRAM_CACHE=$work/cache "$work/tree/hack/release.sh" "${flags[@]}" "$1" >"$work/log" || {
    cat "$work/log"
    die "the second build failed"
  }
  rm -rf "$work/cache"
  diff -rq dist "$work/tree/dist" || die "two builds of the same tree differ"
  say "release: two builds give the same bytes"
  rm -rf "$work/tree"
  verify dist
  (cd hack/release && RELEASE_DIST=$root/dist go test -count=1 ./...)
  HUB=${hub:-localhost/istio-cni} hack/release.sh --dry-run --push
  HUB=${hub:-localhost/istio-cni} hack/release.sh --dry-run --sign
}

# What is built is not in a file that git sees, which would make the tree dirty.
mkdir -p bin
work=$(mktemp -d "$root/bin/dist.XXXXXX")
trap 'rm -rf "$work"' EXIT
case $mode in
  build) build "${1:-}" ;;
  check) check "${1:-}" ;;
  verify) verify "${1:-dist}" ;;
  push)
    tools
    bin/release push --dir "${1:-dist}" --hub "$hub" ${dry:+--dry-run}
    ;;
  sign)
    tools
    commands=$(bin/release sign --dir "${1:-dist}" --hub "$hub" --out "$root/bin/predicate.json")
    while read -r -a command; do
      say "${command[*]}"
      [[ -n $dry ]] || "${command[@]}"
    done <<<"$commands"
    ;;
esac
