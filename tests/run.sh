#!/usr/bin/env bash
# Run the tests on a fresh checkout or a used one. Arguments go to pytest:
#
#   bash tests/run.sh                   everything but what is marked slow or gpu
#   bash tests/run.sh tests/project -x
#   bash tests/run.sh -m slow
set -euo pipefail
# shellcheck source=examples/_venv.sh
source "$(dirname "${BASH_SOURCE[0]}")/../examples/_venv.sh"

prepare_venv dev
prepare_models smollm2 gemma3
cd "$ROOT"
exec "$VENV_PYTHON" -m pytest "$@"
