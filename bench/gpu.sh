#!/usr/bin/env bash
# Everything to do on a GPU that is lent for a quarter of an hour, from the source tree alone; bench/gpu.py says what and how.
#
#   bench/gpu.sh [--cpu] [FOLDER] [STEP...]
#
# PYTHON names the interpreter (default: python3). Packages that `python -m bench.pack` put into gpu-pack are found.
cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit 1
export PYTHONPATH=.:gpu-pack/peers:gpu-pack/trainer${PYTHONPATH:+:$PYTHONPATH}
exec "${PYTHON:-python3}" -m bench.gpu "$@"
