#!/usr/bin/env bash
# Writes dist/: everything that a release consists of. The same commit, version, HUB, PLUGIN_URL and BUILDER give the same bytes:
# it is built in a clone of the commit, with the Go that the line toolchain of hack/release/go.mod names.
#
#   hack/release.sh v0.2.0             write dist/
#   hack/release.sh --check [VERSION]  also write it again elsewhere, with an empty build cache, compare, verify, and test
#                                      the verification; the default is a prerelease of the chart's version
#   hack/release.sh --verify [DIR]     check a dist/ or the downloaded files of a release; VERSION and HUB, if set, must be its own
#   hack/release.sh --push [DIR]       push image and chart to HUB, and print their digests; no tag is moved
#   hack/release.sh --sign [DIR]       sign with cosign, without keys: the identity is that of the workflow
#
# --dry-run before --push or --sign prints what would be done. Before a version, --dirty adds uncommitted changes of files
# that git knows.
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

here=$OLDPWD # of who calls
module=$(sed -n 's/^module //p' go.mod)

tools() {
  use_go
  (cd hack/release && CGO_ENABLED=0 go build -buildvcs=false -trimpath -ldflags '-s -w' -o ../../bin/release .)
}

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

# tree makes a clone of the commit, with no tag but that of the version. Files that git ignores or does not know are not there.
tree() { # DIRECTORY
  git clone -q --no-tags --no-checkout -c core.autocrlf=false -c core.hooksPath=/dev/null "$root" "$1"
  git -C "$1" checkout -q --detach "$revision"
  [[ -z $tag ]] || git -C "$1" -c tag.gpgSign=false tag "$tag"
  [[ -z $dirty ]] || git diff-index --binary -p HEAD | git -C "$1" apply --allow-empty
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

# pack packs the image of the programs and bills of materials in a directory.
pack() { # DIRECTORY OUT NAME
  local arch args=()
  for arch in $architectures; do
    args+=(--program "$arch=$1/istio-cni-linux-$arch,$1/istio-cni-linux-$arch.cdx.json")
  done
  packer
  bin/pack-image "${args[@]}" --name "$3" --created "$created" --out "$2" --tar "istio-cni-image-${3##*:}.tar"
}

bom() { # PROGRAM FILE
  bin/release bom --program "$1" --version "$version" --out "$2"
}

architectures='amd64 arm64 ppc64le s390x'

image() { # DIRECTORY
  local arch
  for arch in $architectures; do
    compile "$1/istio-cni-linux-$arch" linux "$arch" .
    bom "$1/istio-cni-linux-$arch" "$1/istio-cni-linux-$arch.cdx.json"
  done
  pack "$1" "$1" "${hub:-localhost/istio-cni}/install-cni:$number"
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

# write writes the files of a release into a directory, from the tree in which it is called.
write() { # DIRECTORY
  local out=$1
  mkdir "$out"
  notes >"$out/RELEASE_NOTES.md"
  release_go
  stamp release
  tools
  export RELEASE_VERSION=$version
  chart "$out"
  image "$out"
  plugin "$out"
  bin/release chart --dir "$out" --version "$version" --created "$created"
  tar --create --format=ustar --sort=name --mtime="@$created" --owner=0 --group=0 --numeric-owner --mode='u=rwX,go=rX' \
    -C "$out/chart" -f "$out/istio-cni-chart-$number.tar" blobs index.json oci-layout
  bin/release finish --dir "$out" --version "$version" --hub "$hub" --revision "$revision" --tag "$tag" --created "$created" \
    --builder "${BUILDER:-https://$module/blob/$revision/hack/release.sh}" ${dirty:+--dirty}
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

# given prints the whole path of a directory that the caller names, or that of dist/.
given() { # [DIRECTORY]
  local dir=${1:-$root/dist}
  [[ $dir == /* ]] || dir=$here/$dir
  [[ -d $dir ]] || die "there is no directory $dir"
  realpath -e -- "$dir"
}

provenance() { # DIRECTORY FIELD
  sed -n "s/^ *\"$2\": \"\([^\"]*\)\",*$/\1/p" "$1/provenance.intoto.json"
}

# verify checks a copy: a download has neither modes nor the layouts, whose tars it has. What needs no libraries is checked here: the
# manifest is the chart's rendering, and the image is what its programs make, by the name and time in the provenance.
verify() { # DIRECTORY
  local copy=$work/verified/dist odd layout report files name
  odd=$(find "$1" -mindepth 1 \( ! -type d ! -type f -o -type d -empty \))
  [[ -z $odd ]] || die "neither a file nor a directory with files: $odd"
  hack/setup.sh arch
  tools
  mkdir -p "$work/verified"
  cp -r "$1" "$copy"
  chmod -R u=rwX,go=rX "$copy"
  find "$copy" -maxdepth 1 -name 'istio-cni-linux-*' -exec chmod a+x {} +
  for layout in image chart; do
    files=("$copy/istio-cni-$layout"-*.tar)
    [[ ! -d $copy/$layout && -f ${files[0]} ]] || continue
    mkdir "$copy/$layout"
    tar -C "$copy/$layout" -xf "${files[0]}"
  done
  report=$(bin/release verify --dir "$copy" --version "${VERSION:-}" --hub "$hub")
  files=("$copy"/istio-cni-*.tgz)
  tar -C "$work/verified" -xzf "${files[0]}"
  hack/manifests.sh --of "$work/verified/cni" | cmp - "$copy/istio-cni.yaml" || die "$1/istio-cni.yaml is not the chart's default rendering"
  created=$(provenance "$copy" SOURCE_DATE_EPOCH)
  name=$(provenance "$copy" hub)
  number=$(provenance "$copy" version)
  (
    release_go
    pack "$copy" "$work/verified/image" "${name:-localhost/istio-cni}/install-cni:${number#v}" >/dev/null
  )
  files=("$work/verified/image"/*.tar)
  cmp "${files[0]}" "$copy/${files[0]##*/}" || die "$1/${files[0]##*/} is not the image of the programs beside it"
  rm -rf "$work/verified"
  say "$1: ${report#"$copy: "}"
}

# check builds again in another directory with a build cache of its own: the second build must not reuse the first. What must not
# matter is different: ignored files, another tag, settings of Go.
check() {
  local flags=(${unreleased:+--unreleased}) again=$work/again
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
  verify dist
  cp -r dist "$work/download"
  rm -r "$work/download/image" "$work/download/chart"
  chmod -R a-x,u+X "$work/download"
  (cd "$work/download" && sha256sum --quiet -c CHECKSUMS)
  verify "$work/download"
  rm -r "$work/download"
  (cd hack/release && RELEASE_DIST=$root/dist go test -count=1 ./...)
  HUB=${hub:-localhost/istio-cni} hack/release.sh --dry-run --push
  HUB=${hub:-localhost/istio-cni} hack/release.sh --dry-run --sign
}

# What is built is not in a file that git sees, which would make the tree dirty.
mkdir -p bin
for old in bin/dist.*; do # of a killed run
  pid=${old#bin/dist.}
  [[ -d /proc/${pid%%.*} ]] || rm -rf "$old"
done
work=$(mktemp -d "$root/bin/dist.$$.XXXXXX")
trap 'rm -rf "$work"' EXIT
case $mode in
  build) build "${1:-}" ;;
  check) check "${1:-}" ;;
  verify)
    dir=$(given "${1:-}")
    verify "$dir"
    ;;
  push)
    dir=$(given "${1:-}")
    tools
    bin/release push --dir "$dir" --hub "$hub" ${dry:+--dry-run}
    ;;
  sign)
    dir=$(given "${1:-}")
    tools
    commands=$(bin/release sign --dir "$dir" --hub "$hub" --out "$root/bin/predicate.json")
    while read -r -a command; do
      say "${command[*]}"
      [[ -n $dry ]] || "${command[@]}"
    done <<<"$commands"
    ;;
esac
