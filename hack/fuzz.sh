#!/usr/bin/env bash
# Runs every fuzz target of every package, one by one, for FUZZTIME each.
# Go writes a crasher to the package's testdata/fuzz: commit it with the fix.
set -euo pipefail
. "$(dirname "$0")/lib.sh"
use_go

fuzztime=${FUZZTIME:-10s}

# "go test -list" prints a package's targets and then a line with its name.
list=$(go test -list '^Fuzz' ./...) || { printf '%s\n' "$list"; die "the tests do not build"; }
targets=$(awk '/^Fuzz/ { names[++n] = $1 } $1 == "ok" { for (i = 1; i <= n; i++) print $2, names[i]; n = 0 }' <<<"$list")
[[ -n $targets ]] || die "found no fuzz target"

# At the end of -fuzztime the fuzzer of the toolchain sometimes reports
# "context deadline exceeded" as a failure of the target.
fuzz() { # PACKAGE TARGET
  go test -run '^$' -fuzz "^$2\$" -fuzztime "$fuzztime" -fuzzminimizetime 20x "$1" </dev/null 2>&1 | tee "$log" && return
  [[ $(grep -A 1 -e '--- FAIL' "$log") =~ ^"--- FAIL: $2 ("[0-9.]+$'s)\n    context deadline exceeded'$ ]]
}

log=$(mktemp)
trap 'rm -f "$log"' EXIT
failed=()
total=0
while read -r package target; do
  say "== $package $target ($fuzztime)"
  total=$((total + 1))
  fuzz "$package" "$target" || failed+=("$package $target")
done <<<"$targets"

if [[ ${#failed[@]} -gt 0 ]]; then
  printf 'failed: %s\n' "${failed[@]}"
fi
say "fuzz: $((total - ${#failed[@]})) of $total targets found nothing"
[[ ${#failed[@]} -eq 0 ]]
