#!/usr/bin/env bash
# Runs the benchmarks COUNT times, summarises them, and prints which targets
# of docs/performance.md are met. With BASE=<revision> it also runs them in a
# worktree of that revision and compares the two. BENCH=<pattern> and
# PKG=<packages> select benchmarks, BENCHTIME is the time of each (1s, or
# 100x). Benchmarks that program the kernel need root.
set -euo pipefail
. "$(dirname "$0")/lib.sh"
use_go
tool benchstat
read -r -a packages <<<"${PKG:-./...}"

out=$root/bin/bench
mkdir -p "$out"

measure() { # DIRECTORY FILE
  local exec=()
  if [[ $(id -u) -eq 0 ]]; then
    exec=(-exec "'$root/hack/in-netns.sh'")
  fi
  (cd "$1" && go test -tags "$tags" -run '^$' -bench "${BENCH:-.}" -benchtime "${BENCHTIME:-1s}" -benchmem \
    -count "${COUNT:-6}" -timeout 90m "${exec[@]}" "${packages[@]}") |
    tee "$2" | grep -E '^(Benchmark|FAIL|panic)|^---' || true
  # The pipe above hides go test's exit status, so it is read from the output.
  ! grep -q '^FAIL' "$2" || die "a benchmark failed, see $2"
}

measure "$root" "$out/new.txt"
if [[ -z ${BASE:-} ]]; then
  "$tool_bin" "$out/new.txt"
  awk -f hack/bench/targets.awk "$out/new.txt"
  exit
fi

tree=$(mktemp -d)
trap 'git worktree remove --force "$tree"' EXIT
git worktree add --quiet --detach "$tree" "$BASE"
measure "$tree" "$out/base.txt"
"$tool_bin" "$out/base.txt" "$out/new.txt"
