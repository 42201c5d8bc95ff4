#!/bin/sh
# The main job on one machine; arguments are overrides, e.g. quant.scheme=fp8
exec qurl train "$(dirname "$0")/recipes/quickstart.toml" "$@"
