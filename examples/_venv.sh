# shellcheck shell=bash
# Sourced by the scripts that need cbengine installed: one virtual environment, .venv in the root of the checkout.
#
#   prepare_venv EXTRAS    makes it, or brings it up to date, so that "$VENV_PYTHON" has cbengine[EXTRAS]
#
# A stamp remembers what was installed, so that a call with nothing to do takes no time. Works with the bash 3.2 of macOS.

ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
VENV="$ROOT/.venv"
VENV_PYTHON="$VENV/bin/python"
TORCH_VERSION=2.13.0
TORCH_CPU_INDEX=https://download.pytorch.org/whl/cpu

# libgomp's threads spin while they wait for work, by default so long that on a machine with few cores they take the core
# that the event loop needs, which makes every step many times slower. 10000 turns are a few microseconds: long enough
# to be quick, short enough to yield. It counts only if it is set before torch loads, which is why it is set here.
export GOMP_SPINCOUNT="${GOMP_SPINCOUNT:-10000}"
export PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_INPUT=1

say() { printf '>> %s\n' "$*" >&2; }

fail() {
  printf 'error: %s\n' "$*" >&2
  exit 1
}

# The first Python that is new enough: $PYTHON if it is set, else python3, else a newer one beside an old python3.
find_python() {
  local candidate
  for candidate in ${PYTHON:-python3 python3.13 python3.12 python3.11}; do
    if "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
      command -v "$candidate"
      return 0
    fi
  done
  fail "cbengine needs Python 3.11 or newer; found $(python3 --version 2>&1). Set PYTHON=/path/to/python to name another."
}

# Errors only: what pip warns of is about its own settings.
pip_install() { "$VENV_PYTHON" -m pip install --quiet --quiet "$@"; }

# pip_try LOG ARGS...: an attempt whose errors matter only if all others fail too.
pip_try() {
  local log=$1
  shift
  pip_install "$@" >>"$log" 2>&1
}

has_nvidia_card() { command -v nvidia-smi >/dev/null 2>&1 && nvidia-smi -L >/dev/null 2>&1; }

# torch from PyPI is the CUDA build on Linux, several GB that a machine without a card has no use for. The CPU build comes
# from pip's own configuration where that knows one (a mirror, a folder of wheels), else from torch's own index.
install_torch() {
  if "$VENV_PYTHON" -c 'import importlib.metadata as m; m.version("torch")' 2>/dev/null; then
    return 0
  fi
  if [ "$(uname -s)" != Linux ]; then
    say "Installing torch (about 100 MB) ..."
    pip_install "torch==$TORCH_VERSION"
  elif has_nvidia_card; then
    say "Installing torch with CUDA: several GB, this can take ten minutes or more ..."
    pip_install "torch==$TORCH_VERSION"
  else
    say "No NVIDIA card: installing the CPU build of torch (about 200 MB, a minute or two) ..."
    local log="$VENV/torch-install.log"
    : >"$log"
    pip_try "$log" "torch==$TORCH_VERSION+cpu" ||
      pip_try "$log" --retries 1 --timeout 20 --extra-index-url "$TORCH_CPU_INDEX" "torch==$TORCH_VERSION+cpu" ||
      { say "No CPU build to be had, taking torch from PyPI: several GB ..." && pip_try "$log" "torch==$TORCH_VERSION"; } ||
      { cat "$log" >&2 && fail "pip could not install torch $TORCH_VERSION (its messages are above)"; }
  fi
}

# What an up-to-date environment depends on: the project's requirements, this file, and the places of both.
venv_fingerprint() {
  cat "$ROOT/pyproject.toml" "$ROOT/examples/_venv.sh" | cksum
  printf '%s %s %s\n' "$ROOT" "$1" "$VENV_PYTHON"
}

prepare_venv() {
  local extras=$1 stamp="$VENV/cbengine-$1.stamp" python
  if [ -x "$VENV_PYTHON" ] && [ -f "$stamp" ] && [ "$(cat "$stamp")" = "$(venv_fingerprint "$extras")" ]; then
    return 0
  fi
  if ! "$VENV_PYTHON" -m pip --version >/dev/null 2>&1; then
    python=$(find_python) || exit 1
    say "Making a virtual environment in .venv with $("$python" --version) ..."
    rm -rf "$VENV"
    "$python" -m venv "$VENV" || fail "python -m venv failed; on Debian and Ubuntu: apt install python3-venv"
  fi
  install_torch || fail "pip could not install torch"
  say "Installing cbengine[$extras] and what it needs (about 100 MB, up to a minute) ..."
  pip_install --editable "${ROOT}[$extras]" || fail "pip could not install cbengine[$extras]"
  venv_fingerprint "$extras" >"$stamp"
}

# Lay down the named models (smollm2, gemma3), unless they are there.
prepare_models() {
  "$VENV_PYTHON" "$ROOT/examples/get_models.py" "$@" >/dev/null || fail "could not lay down the models: $*"
}
