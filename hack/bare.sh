#!/usr/bin/env bash
# Runs the README's first commands, "make demo" and "make test", as a new user does: on a Debian 12 with only make, git and
# ca-certificates. The exit status is 0 only if both pass, and the demo prints what the README shows of it.
#
#   hack/bare.sh             both
#   hack/bare.sh COMMAND...  another command, for example hack/bare.sh bash
#
# debootstrap --variant=minbase creates the root file system, and pivot_root enters it in mount, PID and IPC namespaces. It
# contains a clean clone of HEAD, without uncommitted changes, and has /proc, /sys with the cgroups, /dev, and this machine's
# network, over which hack/setup.sh installs the rest, Go included.
#
# This machine provides the settings of apt and Go: package sources, keys, proxies and certificates. To save ten minutes it
# also provides Go's module and build cache. Both are safe: modules are checked against go.sum, build cache entries are keyed
# by the hash of compilers, flags and sources, and the toolchain itself is downloaded each time.
#
# The kernel removes the mounts with the namespaces; the root file system is removed at the end.
set -euo pipefail
. "$(dirname "$0")/lib.sh"

suite=bookworm

# commands prints the commands of the README's first block of sh, so that both are in step.
# shellcheck disable=SC2016 # backquotes of Markdown
commands() { sed -n '/^```sh/,/^```$/ { s/^\(make [a-z0-9-]*\) .*/\1/p; /^```$/q }' README.md; }

# shown prints the README's console of the demo, which its output must have.
# shellcheck disable=SC2016
shown() { sed -n '/^<!-- test: bare -->$/{n;/^```console$/{:line;n;/^```$/q;p;b line}}' README.md; }

# environment prints the proxies and Go module settings of this machine as NAME=VALUE.
environment() {
  local name value
  for name in http_proxy https_proxy no_proxy HTTP_PROXY HTTPS_PROXY NO_PROXY; do
    [[ -z ${!name:-} ]] || printf '%s=%s\n' "$name" "${!name}"
  done
  for name in GOPROXY GOSUMDB GOPRIVATE GONOPROXY GONOSUMDB GOINSECURE; do
    value=$("$go_bin" env "$name")
    [[ -z $value ]] || printf '%s=%s\n' "$name" "$value"
  done
}

# mirror prints the mirror of the suite in this machine's apt sources, or nothing: debootstrap has a default.
mirror() {
  # shellcheck disable=SC2016 # apt-get's own variables
  apt-get indextargets --format '$(RELEASE) $(COMPONENT) $(SITE)' 'Created-By: Packages' 2>/dev/null |
    awk -v suite="$suite" '$1 == suite && $2 == "main" { print $3; exit }'
}

make_root() { # DIRECTORY
  local new=$1 from part
  from=$(mirror)
  if [[ -z ${http_proxy:-} ]]; then
    eval "$(apt-config shell http_proxy Acquire::http::Proxy)"
    export http_proxy
  fi
  debootstrap --variant=minbase --include=make,git,ca-certificates "$suite" "$new" ${from:+"$from"} >"$new.log" 2>&1 || {
    cat "$new.log" >&2
    die "debootstrap failed"
  }
  if [[ -n $from ]]; then
    rm -f "$new/etc/apt/sources.list"
    for part in /etc/apt/{sources.list,sources.list.d,apt.conf,apt.conf.d,auth.conf.d,keyrings,trusted.gpg.d} /usr/share/keyrings; do
      [[ ! -e $part ]] || cp -a "$part" "$new$(dirname "$part")/"
    done
  fi
  if [[ -n $(find /usr/local/share/ca-certificates -name '*.crt' 2>/dev/null) ]]; then
    cp -aL /usr/local/share/ca-certificates "$new/usr/local/share/"
    chroot "$new" update-ca-certificates >/dev/null
  fi
  cp -L /etc/resolv.conf /etc/hosts "$new/etc/"
}

# enter mounts the file systems and makes the new root the root of the mount namespace.
enter() { # DIRECTORY
  local new=$1 modules builds
  modules=$("$go_bin" env GOMODCACHE)
  builds=$("$go_bin" env GOCACHE)
  mkdir -p "$modules" "$builds" "$new/root/go/pkg/mod" "$new/root/.cache/go-build"
  mount --bind "$new" "$new"
  mount -t proc proc "$new/proc"
  mount --rbind /sys "$new/sys"
  mount --rbind /dev "$new/dev"
  mount -t tmpfs -o mode=1777 tmpfs "$new/dev/shm"
  mount -t tmpfs -o mode=755 tmpfs "$new/run"
  mount --bind "$modules" "$new/root/go/pkg/mod"
  mount --bind "$builds" "$new/root/.cache/go-build"
  cd "$new"
  mkdir mnt/host
  pivot_root . mnt/host
  cd /
  umount -l /mnt/host
  rmdir /mnt/host
}

# inside is the first process of the namespaces.
inside() { # DIRECTORY COMMAND...
  local new=$1/root run list console settings status=0 started
  shift
  find_go || die "no Go with caches and settings to use: run hack/setup.sh"
  list=$(commands)
  [[ $list == $'make demo\nmake test' ]] || die "the README's first commands are no longer make demo and make test: $list"
  console=$(shown)
  [[ -n $console ]] || die "the README has no console of the demo"
  mapfile -t settings < <(environment)
  started=$SECONDS
  make_root "$new"
  git clone --quiet "$root" "$new/root/istio-cni"
  say "bare: made a Debian of $(chroot "$new" dpkg-query -f '.\n' -W | wc -l) packages in $((SECONDS - started)) s"
  enter "$new"
  run=(env -i -C /root/istio-cni HOME=/root LANG=C.UTF-8 PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin
    ${CI:+CI="$CI"} "${settings[@]}")
  if [[ $# -gt 0 ]]; then
    "${run[@]}" "$@"
    return
  fi
  while read -r -a words; do
    say "bare: ${words[*]}"
    started=$SECONDS
    if "${run[@]}" "${words[@]}" </dev/null | tee -a /tmp/bare.log; then
      say "bare: ${words[*]}: passed in $((SECONDS - started)) s"
    else
      say "bare: ${words[*]}: FAILED with status $? in $((SECONDS - started)) s"
      status=1
    fi
  done <<<"$list"
  if [[ $(</tmp/bare.log) != *"$console"* ]]; then
    say "bare: FAILED: the demo does not print what the README shows:"$'\n'"$console"
    status=1
  fi
  return "$status"
}

if [[ ${1:-} == --inside ]]; then
  shift
  inside "$@"
  exit
fi

need_root "it makes and enters a root file system"
hack/setup.sh bare
need_space "${TMPDIR:-/var/tmp}" 3000 "a bare Debian" "set TMPDIR"
if [[ -n $(git status --porcelain --untracked-files=no) ]]; then
  say "bare: uncommitted changes are not included"
fi
dir=$(mktemp -d "${TMPDIR:-/var/tmp}/istio-cni-bare.XXXXXX")
# Processes that were just killed may still create files.
trap 'rm -rf --one-file-system "$dir" 2>/dev/null || { sleep 2; rm -rf --one-file-system "$dir"; }' EXIT
# unshare blocks SIGTERM and SIGINT; SIGKILL ends it and the namespaces.
trap 'kill -KILL "$child"; exit 143' TERM INT HUP
unshare --mount --propagation private --pid --ipc --fork --kill-child --mount-proc "$0" --inside "$dir" "$@" <&0 &
child=$!
wait "$child"
