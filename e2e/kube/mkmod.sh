#!/usr/bin/env bash
# Regenerates go.mod and go.sum of this directory, or of oldest/, for a version
# of Kubernetes:
#
#   e2e/kube/mkmod.sh v1.36.3
#   e2e/kube/mkmod.sh v1.25.0 oldest
#
# Kubernetes requires its staging modules at v0.0.0, which needs replace
# directives. etcd has the version that this Kubernetes requires.
set -euo pipefail
version=${1:?want a version of k8s.io/kubernetes, such as v1.36.3}
cd "$(dirname "${BASH_SOURCE[0]}")/${2:-.}"
rm -f go.mod go.sum
go mod init "github.com/meshcni/istio-cni/e2e/kube${2:+/$2}"
go mod edit -go="$(go env GOVERSION | sed -E 's/^go([0-9]+\.[0-9]+).*/\1.0/')"
requirements=$(go mod download -json "k8s.io/kubernetes@$version" | sed -n 's/.*"GoMod": "\(.*\)",*/\1/p')
go mod edit -require "k8s.io/kubernetes@$version"
awk '$1 ~ /^k8s.io\// && $2 == "v0.0.0" { print $1 }' "$requirements" | while read -r part; do
  go mod edit -replace "$part=$part@v0${version#v1}"
done
go mod tidy
