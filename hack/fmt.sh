#!/usr/bin/env bash
# Rewrites the Go code with the formatters of .golangci.yml (gofumpt, gci).
set -euo pipefail
. "$(dirname "$0")/lib.sh"
use_go
tool golangci-lint
"$tool_bin" fmt ./...
