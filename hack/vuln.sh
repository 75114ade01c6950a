#!/usr/bin/env bash
# govulncheck over the source and over the built binary.
#
# Exit codes: 0 no known vulnerability, 1 a vulnerability or an error, 75 the
# database was unreachable, so NOTHING WAS CHECKED. GOVULNDB is the URL of
# another database, for example file:///var/lib/vulndb.
set -euo pipefail
. "$(dirname "$0")/lib.sh"
use_go
tool govulncheck
hack/build.sh

unreachable=75
db=()
if [[ -n ${GOVULNDB:-} ]]; then
  db=(-db "$GOVULNDB")
fi

check() {
  local out status=0
  out=$("$tool_bin" "${db[@]}" "$@" 2>&1) || status=$?
  printf '%s\n' "$out"
  # govulncheck prints this if the database is unreachable; any other failure
  # is a failure.
  if [[ $status -ne 0 && $out == *"fetching vulnerabilities: "* ]]; then
    say "vuln: database unreachable, NOT CHECKED"
    exit "$unreachable"
  fi
  return "$status"
}

status=0
say "== source"
check ./... || status=1
say "== binary"
check -mode binary bin/istio-cni || status=1
exit "$status"
