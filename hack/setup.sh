#!/usr/bin/env bash
# Installs the packages that the tests and the demo need on a minimal Debian.
#
#   hack/setup.sh         compiler, Go, iptables, nftables, iproute2, reference CNI plugins
#   hack/setup.sh test    the same, and the shells that the completion is for
#   hack/setup.sh e2e     the same, and for a node of Kubernetes: containerd, runc, conntrack
#   hack/setup.sh containerd  libseccomp and a compiler, for hack/containerd.sh
#   hack/setup.sh arch    qemu's user mode, for programs of other architectures
#   hack/setup.sh vm      qemu and what hack/vm.sh makes a machine of
#   hack/setup.sh page    a browser, for e2e/page alone
#   hack/setup.sh lint    for the linters: Go and shellcheck
#   hack/setup.sh bare    for hack/bare.sh: Go and debootstrap
#
# Safe to repeat: it checks for the files and commands themselves. If all
# exist it prints nothing and uses neither apt nor the network.
set -euo pipefail
. "$(dirname "$0")/lib.sh"

export DEBIAN_FRONTEND=noninteractive

missing=()

# want PACKAGE FILE: FILE is a command, or a path if it has a slash.
want() {
  if [[ $2 == */* ]]; then
    [[ -e $2 ]] || missing+=("$1")
  else
    type -P "$2" >/dev/null || missing+=("$1")
  fi
}

# quietly COMMAND... prints the command's output only if it fails.
quietly() {
  local log status=0
  log=$(mktemp)
  "$@" >"$log" 2>&1 </dev/null || status=$?
  if [[ $status -ne 0 ]]; then
    cat "$log" >&2
  fi
  rm -f "$log"
  return "$status"
}

apt_ready=
apt_install() {
  need_root "setup: missing here: $*"
  type -P apt-get >/dev/null || die "this is not a Debian machine; install these by hand: $*"
  if [[ -z $apt_ready ]]; then
    say "setup: updating the package lists"
    # One unreachable source may not matter; a missing package fails below.
    quietly apt-get -o DPkg::Lock::Timeout=300 update || say "setup: apt-get update failed, using the existing lists"
    apt_ready=yes
  fi
  say "setup: installing $*"
  quietly apt-get -o DPkg::Lock::Timeout=300 -y --no-install-recommends install "$@" ||
    die "apt-get could not install: $*"
}

# fetch_go downloads the toolchain module that Go itself would use, with the
# old Go, which verifies it by the checksum database, and unpacks it like Go
# 1.21 and later: module zips have neither file modes nor go.mod files.
fetch_go() { # OLD_GO
  local want dest tmp dir module
  want=$(go_wanted)
  dest=$(go_cache)
  module=golang.org/toolchain@v0.0.1-go$want.linux-$(cd / && "$1" env GOARCH)
  say "setup: fetching Go $want through the Go module proxy with Go $(go_version "$1")"
  mkdir -p "$(dirname "$dest")"
  tmp=$(mktemp -d "$dest.XXXXXX")
  (
    cd "$tmp"
    printf 'module bootstrap\n' >go.mod
    GOFLAGS='' GOMODCACHE=$tmp/mod quietly "$1" mod download "$module"
  ) || die "could not fetch $module"
  dir=$tmp/mod/$module
  chmod -R u+w "$tmp/mod"
  find "$dir/src" -name _go.mod -execdir mv {} go.mod \;
  find "$dir/bin" "$dir/pkg/tool" -type f -exec chmod 0755 {} +
  rm -rf "$dest"
  mv "$dir" "$dest"
  rm -rf "$tmp"
}

want ca-certificates /etc/ssl/certs/ca-certificates.crt
want git git
want make make
case ${1:-all} in
  e2e)
    want containerd containerd
    want runc runc
    want conntrack conntrack
    want busybox-static /bin/busybox
    ;;&
  test)
    want zsh zsh
    want fish fish
    ;;&
  all | test | e2e)
    want iptables iptables
    want iptables iptables-legacy
    want nftables nft
    want iproute2 ip
    want util-linux unshare
    want mount mount
    want strace strace
    want containernetworking-plugins /usr/lib/cni/bridge
    want gcc gcc
    want libc6-dev /usr/include/stdlib.h
    ;;
  containerd)
    want libseccomp-dev /usr/include/seccomp.h
    want pkg-config pkg-config
    want gcc gcc
    want libc6-dev /usr/include/stdlib.h
    ;;
  arch) want qemu-user-static qemu-s390x-static ;;
  vm)
    want qemu-system-x86 qemu-system-x86_64
    want busybox-static busybox
    want kmod depmod
    want cpio cpio
    ;;
  page) want chromium chromium ;;
  lint) want shellcheck shellcheck ;;
  bare)
    want debootstrap debootstrap
    want util-linux unshare
    want mount mount
    ;;
  *) die "unknown mode $1" ;;
esac
if [[ ${#missing[@]} -gt 0 ]]; then
  mapfile -t missing < <(printf '%s\n' "${missing[@]}" | sort -u)
  apt_install "${missing[@]}"
fi

if ! find_go; then
  old=$(type -P go || true)
  if [[ -z $old ]]; then
    apt_install golang-go
    old=$(type -P go) || die "golang-go has no go command"
  fi
  find_go || fetch_go "$old"
  find_go || die "no usable Go; install Go $(go_wanted) in /usr/local/go"
fi
