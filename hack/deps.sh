#!/usr/bin/env bash
# Writes docs/deps.txt, the packages of other modules that are linked into the
# binary, so that a new dependency shows in review.
#
#   hack/deps.sh          rewrite it
#   hack/deps.sh check    fail when it is out of step
set -euo pipefail
. "$(dirname "$0")/lib.sh"
use_go

file=docs/deps.txt

linked() {
  printf '# Packages of other modules linked into istio-cni. Rewritten by "make deps".\n'
  CGO_ENABLED=0 GOOS=linux GOARCH=amd64 go list -tags "$tags" -deps -f \
    '{{if and (not .Standard) (not .Module.Main)}}{{.ImportPath}}{{end}}' . | LC_ALL=C sort
}

now=$(linked)
case ${1:-write} in
  write)
    mkdir -p docs
    printf '%s\n' "$now" >"$file"
    ;;
  check)
    [[ -e $file ]] || die "$file is missing: run make deps"
    diff -u "$file" <(printf '%s\n' "$now") || die "$file is out of step: run make deps and review the difference"
    ;;
  *) die "unknown mode $1" ;;
esac
