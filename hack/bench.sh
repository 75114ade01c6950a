#!/usr/bin/env bash
# Runs the benchmarks COUNT times, summarises them, and prints which targets
# are met, and what a start, the audit and the agent's memory cost. With
# BASE=<revision> it also runs them in a worktree of that revision and compares
# the two. BENCH=<pattern> and PKG=<packages> select benchmarks, without the
# other figures; BENCHTIME is the time of each (1s, or 100x). With REFERENCE_BIN,
# as hack/reference.sh prints it, the plugin is compared with the reference's:
# each program is written anew, since its layout in memory decides what a start
# costs, and page faults are printed. Benchmarks that
# program the kernel need root.
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
  (cd "$1" && go test -tags "$tags" -run '^$' -bench "${BENCH:-.}" -benchtime "${BENCHTIME:-1s}" \
    -count "${COUNT:-6}" -timeout 90m "${exec[@]}" "${packages[@]}") |
    tee "$2" | grep -E '^(Benchmark|FAIL|panic)|^---' || true
  # The pipe above hides go test's exit status, so it is read from the output.
  ! grep -q '^FAIL' "$2" || die "a benchmark failed, see $2"
}

# costs prints what tests measure: start, audit, and memory of the agent.
costs() {
  go test -v -count 1 -tags "measure,$tags" -exec "'$root/hack/in-netns.sh'" \
    -run '^Test(TheProgramIsSmall|AStartInitialisesLittle|CostOfTheAudit|Agent_ManyPods)$' \
    . ./internal/agent/nodepods ./internal/role/installer >"$out/costs.txt" || die "a measurement failed, see $out/costs.txt"
  grep -E '_test.go:[0-9]+: ' "$out/costs.txt"
}

measure "$root" "$out/new.txt"
if [[ -z ${BASE:-} ]]; then
  "$tool_bin" "$out/new.txt"
  awk -f hack/bench/targets.awk "$out/new.txt"
  [[ -n ${BENCH:-}${PKG:-} ]] || costs
  exit
fi

tree=$(mktemp -d)
trap 'git worktree remove --force "$tree"' EXIT
git worktree add --quiet --detach "$tree" "$BASE"
measure "$tree" "$out/base.txt"
"$tool_bin" "$out/base.txt" "$out/new.txt"
