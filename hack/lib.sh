# shellcheck shell=bash
# Shared by every script here; sourced, never run.
#
# Promises: $root is the root of the repository and the current directory;
# use_go puts a Go that can build this module first in PATH, or exits with an
# error that names the solution. It installs nothing: setup.sh does.

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
cd "$root" || exit

# iptables, nft and ip are in these directories, which a user's PATH often
# lacks.
PATH=$PATH:/usr/local/sbin:/usr/sbin:/sbin

# Without this tag the flag library links its manual page generator, whose
# initialisation costs every start of the program, and so every pod, 3 ms.
# shellcheck disable=SC2034 # used by the scripts that source this
tags=urfave_cli_no_docs

say() { printf '%s\n' "$*"; }

die() {
  printf '%s: %s\n' "${0##*/}" "$*" >&2
  exit 1
}

need_root() {
  [[ $(id -u) -eq 0 ]] || die "needs root: $1"
}

# go_wanted prints the version in go.mod's go line.
go_wanted() { sed -n 's/^go \([0-9][0-9.]*\).*/\1/p' "$root/go.mod"; }

# go_cache is the directory into which setup.sh unpacks Go if the machine's Go
# cannot download a toolchain by itself.
go_cache() { printf '%s\n' "${XDG_CACHE_HOME:-${HOME:-/root}/.cache}/istio-cni/go$(go_wanted)"; }

# go_version BIN prints the version of BIN itself, without switching
# toolchains: it runs outside of the module with GOTOOLCHAIN=local.
go_version() {
  (cd / && GOTOOLCHAIN=local "$1" version 2>/dev/null) |
    sed -n 's/^go version go\([0-9]*\.[0-9.]*[0-9]\).*/\1/p'
}

at_least() { # HAVE WANT
  [[ -n $1 ]] && printf '%s\n%s\n' "$2" "$1" | sort -V -C
}

go_candidates() {
  type -aP go || true
  printf '%s\n' /usr/local/go/bin/go "$(go_cache)/bin/go"
  find /usr/lib -maxdepth 1 -name 'go-*' 2>/dev/null | sort -rV | sed 's,$,/bin/go,'
}

# find_go sets go_bin to the first Go that is new enough, else to one that can
# download the toolchain itself (1.21 and up), with go_switch set to auto.
# Debian's Go has GOTOOLCHAIN=local as its default, so it is set explicitly.
find_go() {
  local want bin have fallback=
  want=$(go_wanted)
  while read -r bin; do
    [[ -x $bin ]] || continue
    have=$(go_version "$bin")
    if at_least "$have" "$want"; then
      go_bin=$bin go_switch=
      return 0
    fi
    if [[ -z $fallback ]] && at_least "$have" 1.21; then
      fallback=$bin
    fi
  done < <(go_candidates)
  go_bin=$fallback go_switch=auto
  [[ -n $fallback ]]
}

use_go() {
  find_go || die "no Go $(go_wanted) or newer here (and none that can fetch it): run hack/setup.sh as root"
  PATH=$(dirname "$go_bin"):$PATH
  export PATH
  if [[ -n $go_switch ]]; then
    export GOTOOLCHAIN=$go_switch
  fi
}

# free_mb DIR prints the free space of DIR or of its nearest existing parent.
free_mb() {
  local dir=$1
  until [[ -d $dir ]]; do dir=$(dirname "$dir"); done
  df -Pm "$dir" | awk 'NR == 2 { print $4 }'
}

# need_space exits before a build that would fill the disk.
need_space() { # DIR MB WHAT ELSE
  local free
  free=$(free_mb "$1")
  [[ $free -ge $2 ]] || die "$3 needs $2 MB in $1, and $free MB are free: free some, or $4"
}

# tool NAME builds a tool of hack/tools if its pinned versions or the compiler
# have changed, and sets tool_bin to its path. The first build of the linter
# takes some minutes.
tool() {
  local pkg stamp dir
  pkg=$(cd hack/tools && go list -f '{{.ImportPath}}' tool | grep -E "/$1\$") ||
    die "hack/tools/go.mod has no tool named $1"
  stamp=$({ go env GOVERSION && cat hack/tools/go.mod hack/tools/go.sum; } | sha256sum | cut -c1-16)
  dir=$root/bin/tools/$stamp
  tool_bin=$dir/$1
  if [[ ! -x $tool_bin ]]; then
    say "building $1 (once; kept in bin/tools)"
    find bin/tools -mindepth 1 -maxdepth 1 ! -name "$stamp" -exec rm -rf {} + 2>/dev/null || true
    mkdir -p "$dir"
    (cd hack/tools && CGO_ENABLED=0 go build -buildvcs=false -trimpath -ldflags '-s -w' -o "$tool_bin.tmp" "$pkg")
    mv "$tool_bin.tmp" "$tool_bin"
  fi
}

# stamp sets created, the time in seconds of what is built, vcs, the value of go build -buildvcs, and snapshot, the version of programs
# that are no release. -buildvcs=auto fails if git refuses the directory (another owner) or there is no commit yet: without a readable
# commit programs have no revision, and archives and images no timestamp.
# shellcheck disable=SC2034 # the scripts read them
stamp() { # NAME
  vcs=auto
  created=0
  if git rev-parse --quiet --verify HEAD >/dev/null 2>&1; then
    created=$(git log -1 --format=%ct)
  else
    vcs=false
    say "$1: git cannot read a commit here; the programs will carry no revision"
  fi
  created=${SOURCE_DATE_EPOCH:-$created}
  snapshot=v$(sed -n 's/^version: *//p' manifests/istio-cni/Chart.yaml)-dev
}

# compile builds a program as it is released: static, stripped, without paths of this machine. RELEASE_VERSION is its version,
# else the snapshot's. PROGRAM_CACHE is another build cache. Call stamp first.
compile() { # FILE OS ARCH PACKAGE
  local linked=$1.linked
  GOCACHE=${PROGRAM_CACHE:-$(go env GOCACHE)} CGO_ENABLED=0 GOOS=$2 GOARCH=$3 go build "-buildvcs=$vcs" -trimpath -tags "$tags" \
    -ldflags "-s -w -X $(go list -m)/internal/applet.release=${RELEASE_VERSION:-$snapshot}" -o "$linked" "$4"
  lay "$linked" "$1"
  rm "$linked"
}

# lay writes a program anew in large blocks. The linker writes it through a mapping, so that it lies in memory in single pages: each
# start then costs up to 1.7 times as much.
lay() { # FROM TO
  rm -f "$2"
  dd if="$1" of="$2" bs=64M status=none
  chmod 755 "$2"
}

# packer builds bin/pack-image.
packer() { (cd hack/release && CGO_ENABLED=0 go build -buildvcs=false -trimpath -o ../../bin/pack-image ./image); }

# registry_tools builds crane and Helm, and puts them first in PATH.
registry_tools() {
  (cd hack/release && CGO_ENABLED=0 go build -buildvcs=false -trimpath -o ../../bin/publish/ github.com/google/go-containerregistry/cmd/crane)
  (cd e2e/helm && CGO_ENABLED=0 go build -buildvcs=false -trimpath -o ../../bin/publish/ helm.sh/helm/v3/cmd/helm)
  PATH=$root/bin/publish:$PATH
}
