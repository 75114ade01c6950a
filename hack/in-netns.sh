#!/bin/sh
# Runs a command in a new network namespace with loopback up. The test scripts
# give it to "go test -exec", so that a test which forgets to make its own
# namespace cannot touch the firewall or the routes of the machine.
set -eu
# The words in single quotes are for the inner shell.
# shellcheck disable=SC2016
exec unshare --net -- sh -c 'ip link set lo up && exec "$@"' in-netns "$@"
