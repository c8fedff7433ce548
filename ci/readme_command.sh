#!/usr/bin/env bash
# Prints the command that README.md gives after the marker <!-- command: NAME -->.
set -euo pipefail
name=${1:?usage: readme_command.sh NAME}
cd "$(dirname "$0")/.."
text=$(awk -v m="<!-- command: $name -->" '$0 == m {on = 1; next} on && /^```/ {if (seen) exit; seen = 1; next} on && seen' README.md)
[ -n "$text" ] || { echo "README.md has no command after <!-- command: $name -->" >&2; exit 1; }
printf '%s\n' "$text"
