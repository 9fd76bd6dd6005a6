# Sourced by the other scripts: goes to the repository root and finds or makes an environment.
#
#   . scripts/_setup.sh; use_environment test|dev      sets $python
#   add_ecosystem                                      adds transformers and peft to it, or fails
#
# The environment is .venv in the root. Set FSDP2_PYTHON to use an interpreter of your own as it is.

# Where there is no GPU, an exact version is asked for first: of a wider range pip takes the newest, which may
# exist for CUDA only and fetch several gigabytes.
torch_without_gpu="torch==2.13.0"
torch_with_gpu="torch>=2.11"

root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
cd "$root"

say() { printf '%s\n' "$*" >&2; }

fail() {
    say "error: $*"
    exit 1
}

use_environment() {
    local wanted="$1" system="${PYTHON:-python3}"
    if [ -n "${FSDP2_PYTHON:-}" ]; then
        python="$FSDP2_PYTHON"
        "$python" -c 'import torch' || fail "FSDP2_PYTHON is $python, and it cannot import torch"
        export PYTHONPATH="$root${PYTHONPATH:+:$PYTHONPATH}"
        return
    fi
    python="$root/.venv/bin/python"
    "$system" -c 'import sys; sys.exit(sys.version_info < (3, 10))' ||
        fail "$system is missing or older than Python 3.10; set PYTHON to a newer one"
    mkdir -p .venv
    if command -v flock >/dev/null; then
        exec 9>.venv/.lock
        flock 9 # another script may be setting up at this moment
    fi
    is_set_up "$wanted" || set_up "$wanted" "$system"
    exec 9>&-
}

fingerprint() { cat pyproject.toml scripts/_setup.sh | cksum; }

# What `dev` installs includes what `test` does.
is_set_up() {
    local level
    [ -x "$python" ] || return 1
    for level in "$1" dev; do
        [ "$(cat ".venv/.set-up-$level" 2>/dev/null)" = "$(fingerprint)" ] && return 0
    done
    return 1
}

set_up() {
    local wanted="$1" system="$2" torch="$torch_without_gpu"
    if nvidia-smi -L >/dev/null 2>&1; then
        torch="$torch_with_gpu"
    fi
    say "setting up .venv ($wanted)"
    if ! "$python" -m pip --version >/dev/null 2>&1; then
        "$system" -m venv .venv || fail "$system -m venv failed; is the venv module installed?"
    fi
    pip_install "$system" "$torch"
    pip_install "$system" -e ".[$wanted]"
    fingerprint >".venv/.set-up-$wanted"
}

pip_install() {
    local system="$1" found
    shift
    "$python" -m pip install --quiet --disable-pip-version-check "$@" && return
    say "error: pip could not install $* into .venv; its messages are above."
    if found="$("$system" -c 'import torch; print(torch.__version__)' 2>/dev/null)"; then
        say "$system itself has torch $found: if pip cannot reach a package index here, run"
        say "this script again with FSDP2_PYTHON=$system to use that one as it is."
    fi
    exit 1
}

# Other libraries may be out of reach where torch is not: this says why and returns, it does not end the script.
# Whatever they ask for, the torch that is tested stays.
add_ecosystem() {
    local torch
    if [ -n "${FSDP2_PYTHON:-}" ]; then
        "$python" -c 'import transformers, peft' && return
        say "FSDP2_PYTHON is $python, which is used as it is, and it cannot import transformers and peft"
        return 1
    fi
    if command -v flock >/dev/null; then
        exec 9>.venv/.lock
        flock 9
    fi
    if [ "$(cat .venv/.set-up-ecosystem 2>/dev/null)" != "$(fingerprint)" ]; then
        say "adding transformers and peft to .venv"
        torch="$("$python" -c 'from importlib.metadata import version; print(version("torch"))')"
        printf 'torch==%s\n' "$torch" >.venv/constraints.txt
        if ! "$python" -m pip install --quiet --disable-pip-version-check -c .venv/constraints.txt \
            -e ".[ecosystem]"; then
            exec 9>&-
            say "pip could not install them beside torch $torch; its messages are above"
            return 1
        fi
        fingerprint >.venv/.set-up-ecosystem
    fi
    exec 9>&-
}
