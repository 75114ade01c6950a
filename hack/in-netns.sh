#!/bin/sh
# Runs a command in a new network namespace with loopback up. The test scripts
# pass it to "go test -exec", so that a test without a namespace of its own
# cannot change the firewall or the routes of the machine.
set -eu
# The inner shell expands the variables in single quotes.
# shellcheck disable=SC2016
exec unshare --net -- sh -c 'ip link set lo up && exec "$@"' in-netns "$@"
