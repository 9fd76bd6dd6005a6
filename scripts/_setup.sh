# Sourced by the other scripts: goes to the repository root and finds or makes an environment.
#
#   . scripts/_setup.sh; use_environment test|docs|dev      sets $python
#   use_clients                                        the same, with the libraries of scripts/clients.txt, or fails
#
# The environment is .venv in the root. A script whose first argument is --torch VERSION gets one of that version of
# torch in .venvs instead; with --python VERSION, beside it or alone, one of that version of Python, which must be
# installed. The options are taken away from its arguments here, so every script has them. Set FSDP2_PYTHON to use an
# interpreter of your own as it is.

# Where there is no GPU, an exact version is asked for first: of a wider range pip takes the newest, which may
# exist for CUDA only and fetch several gigabytes.
torch_without_gpu="torch==2.13.0"
torch_with_gpu="torch>=2.11"
# The newest release of each version that --torch knows.
torch_releases="2.11.0 2.12.1 2.13.0 2.14.1 2.15.0"

root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
cd "$root"
environment=.venv
torch_asked="" # as the user wrote it: 2.15, or 2.15.0
torch_release=""
python_asked=""

say() { printf '%s\n' "$*" >&2; }

fail() {
    say "error: $*"
    exit 1
}

choose_torch() {
    local release
    for release in $torch_releases; do
        if [ "$1" = "${release%.*}" ]; then
            torch_release="$release"
        elif [[ "$1" =~ ^"${release%.*}".[0-9]+$ ]]; then
            torch_release="$1" # another release of a known version
        fi
    done
    [ -n "$torch_release" ] ||
        fail "--torch takes one of ${torch_releases// /, }, or the first two numbers of one; found '$1'"
    torch_asked="$1"
}

choose_python() {
    [[ "$1" =~ ^3\.[0-9]+$ ]] || fail "--python takes the first two numbers of a version, as 3.10; found '$1'"
    python_asked="$1"
}

# Sourced without arguments, a file sees those of the script, and its `shift` takes them from the script.
while :; do
    case "${1:-}" in
    --torch | --python)
        "choose_${1#--}" "${2:-}"
        shift 2
        ;;
    --torch=* | --python=*)
        one="${1#--}"
        "choose_${one%%=*}" "${one#*=}"
        shift
        ;;
    *) break ;;
    esac
done
if [ -n "$torch_release$python_asked" ]; then
    one="${torch_release:+torch-$torch_release}${torch_release:+${python_asked:+-}}${python_asked:+python-$python_asked}"
    environment=".venvs/$one"
fi

use_environment() {
    local wanted="$1" system="${PYTHON:-python${python_asked:-3}}"
    if [ -n "${FSDP2_PYTHON:-}" ]; then
        use_interpreter "$FSDP2_PYTHON"
        return
    fi
    python="$root/$environment/bin/python"
    "$system" -c "import sys; sys.exit(sys.version_info < (3, 10) or '${python_asked#3.}' not in
        ('', str(sys.version_info.minor)))" ||
        fail "$system is missing or not Python ${python_asked:-3.10 or newer}; install that, or set PYTHON to its path"
    mkdir -p "$environment"
    if command -v flock >/dev/null; then
        exec 9>"$environment/.lock"
        flock 9 # another script may be setting up at this moment
    fi
    is_set_up "$wanted" || set_up "$wanted" "$system"
    exec 9>&-
}

use_interpreter() {
    local found
    python="$1"
    found="$("$python" -c 'import torch; print(torch.__version__)')" ||
        fail "FSDP2_PYTHON is $python, and it cannot import torch"
    case "$found" in
    "$torch_asked" | "$torch_asked"[.+]*) ;;
    *)
        [ -z "$torch_asked" ] || fail "FSDP2_PYTHON is $python, which has torch $found, and --torch asks for" \
            "$torch_asked; unset FSDP2_PYTHON to have an environment made"
        ;;
    esac
    export PYTHONPATH="$root${PYTHONPATH:+:$PYTHONPATH}"
}

fingerprint() { cat pyproject.toml scripts/_setup.sh scripts/clients.txt | cksum; }

# What `dev` installs includes what `docs` does, and that what `test` does.
is_set_up() {
    local level levels="$1"
    [ -x "$python" ] || return 1
    case "$1" in
    test) levels="test docs dev" ;;
    docs) levels="docs dev" ;;
    esac
    for level in $levels; do
        [ "$(cat "$environment/.set-up-$level" 2>/dev/null)" = "$(fingerprint)" ] && return 0
    done
    return 1
}

set_up() {
    local wanted="$1" system="$2" torch="$torch_without_gpu"
    if nvidia-smi -L >/dev/null 2>&1; then
        torch="$torch_with_gpu"
    fi
    if [ -n "$torch_release" ]; then
        torch="torch==$torch_release"
    fi
    say "setting up $environment ($wanted, $torch)"
    if ! "$python" -m pip --version >/dev/null 2>&1; then
        "$system" -m venv "$environment" || fail "$system -m venv failed; is the venv module installed?"
    fi
    pip_install "$system" "$torch"
    if command -v flock >/dev/null; then
        exec 8<pyproject.toml
        flock 8 # pip builds in the root, which is the same for all environments
    fi
    pip_install "$system" -e ".[$wanted]"
    exec 8<&-
    fingerprint >"$environment/.set-up-$wanted"
}

pip_install() {
    local system="$1" found
    shift
    rm -f "$environment/pip.log"
    "$python" -m pip install --quiet --disable-pip-version-check --log "$environment/pip.log" "$@" && return
    say "error: pip could not install $* into $environment; its messages are above, more is in $environment/pip.log."
    if grep -o 'The user requested (constraint).*' "$environment/pip.log" >&2; then # --quiet keeps this back
        say "A constraint may be a cap in pip's configuration on this machine ('pip config list' shows where it is)."
        say "PIP_CONFIG_FILE=/dev/null before the command lifts what such files say, for that command alone."
    fi
    if [ -z "$torch_asked" ] && found="$("$system" -c 'import torch; print(torch.__version__)' 2>/dev/null)"; then
        say "$system itself has torch $found: if pip cannot reach a package index here, run"
        say "this script again with FSDP2_PYTHON=$system to use that one as it is."
    fi
    exit 1
}

# Other libraries may be out of reach where torch is not: this says which and goes on, and returns 1 if there are none.
# They have an environment of their own, and whatever they ask for, the torch that is tested stays.
use_clients() {
    local line torch found=""
    if [ -n "${FSDP2_PYTHON:-}" ]; then
        use_interpreter "$FSDP2_PYTHON"
        "$python" -c 'import transformers' && return
        say "FSDP2_PYTHON is $python, which is used as it is, and it cannot import transformers"
        return 1
    fi
    environment=".venvs/clients${torch_release:+-torch-$torch_release}${python_asked:+-python-$python_asked}"
    use_environment test
    if command -v flock >/dev/null; then
        exec 9>"$environment/.lock"
        flock 9
    fi
    if [ "$(cat "$environment/.set-up-clients" 2>/dev/null)" != "$(fingerprint)" ]; then
        say "adding the libraries of scripts/clients.txt to $environment"
        torch="$("$python" -c 'from importlib.metadata import version; print(version("torch"))')"
        printf 'torch==%s\n' "$torch" >"$environment/constraints.txt"
        if add_clients -r scripts/clients.txt; then
            found=all
        else
            say "pip could not install them together beside torch $torch; its messages are above. One by one:"
            while read -r line; do
                if add_clients "$line"; then
                    found="$line"
                else
                    say "cannot be had: $line"
                fi
            done < <(grep -v '^#' scripts/clients.txt)
        fi
        [ -z "$found" ] || fingerprint >"$environment/.set-up-clients"
    else
        found=before
    fi
    exec 9>&-
    [ -n "$found" ]
}

add_clients() {
    "$python" -m pip install --quiet --disable-pip-version-check -c "$environment/constraints.txt" "$@"
}
