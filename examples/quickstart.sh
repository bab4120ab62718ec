#!/usr/bin/env bash
# From a fresh checkout to a small language model answering several prompts at once. Needs Python 3.11+ and pip.
# The first call downloads torch, transformers and the model (under 1 GB without an NVIDIA card); later ones start at once.
#
#   bash examples/quickstart.sh                  three prompts
#   bash examples/quickstart.sh "Tell me a joke" "What is rain?"
set -euo pipefail
# shellcheck source=examples/_venv.sh
source "$(dirname "${BASH_SOURCE[0]}")/_venv.sh"

prepare_venv "cli,gguf"
prepare_models smollm2
exec "$VENV_PYTHON" "$ROOT/examples/quickstart.py" "$@"
