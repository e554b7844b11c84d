#!/bin/sh
# Makes the venv DIR with tela and the extras given (comma separated), or says in one line what is missing and the remedy.
# Usage: PYTHON=python3 sh scripts/setup.sh DIR EXTRAS
set -eu
venv=$1
extras=$2
python=${PYTHON:-python3}

fail() {
    printf 'tela: error: %s\n  hint: %s\n' "$1" "$2" >&2
    exit 1
}

command -v "$python" >/dev/null 2>&1 ||
    fail "no $python found" "install Python 3.11 or later, or name one: make PYTHON=python3.12"
"$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' ||
    fail "$("$python" --version) is too old" "tela needs Python 3.11 or later; name one: make PYTHON=python3.12"
"$python" -c 'import ensurepip, venv' 2>/dev/null ||
    fail "this Python has no venv module" "Debian and Ubuntu: apt-get install python3-venv"

# fastecdsa, which libp2p needs, has no wheel for recent Pythons and is built from source with gmp.
if ! "$venv/bin/python" -c 'import fastecdsa' 2>/dev/null; then
    command -v cc >/dev/null 2>&1 || command -v gcc >/dev/null 2>&1 ||
        fail "no C compiler found" "Debian and Ubuntu: apt-get install gcc; Red Hat: dnf install gcc"
    printf '#include <gmp.h>\n' | "$(command -v cc || command -v gcc)" -E - >/dev/null 2>&1 ||
        fail "no gmp.h found" "Debian and Ubuntu: apt-get install libgmp-dev; Red Hat: dnf install gmp-devel"
    headers=$("$python" -c 'import sysconfig; print(sysconfig.get_path("include"))')
    test -e "$headers/Python.h" ||
        fail "no Python.h in $headers" "Debian and Ubuntu: apt-get install python3-dev; Red Hat: dnf install python3-devel"
fi

test -x "$venv/bin/python" || "$python" -m venv "$venv"
log=$venv/pip.log
printf 'installing tela[%s] into %s ...\n' "$extras" "$venv" >&2
if ! "$venv/bin/python" -m pip install --disable-pip-version-check --no-input \
    -c requirements/constraints.txt -e ".[$extras]" >"$log" 2>&1; then
    if grep -qiE 'connection|resolve|timed out|unreachable|no matching distribution' "$log"; then
        fail "pip could not download a package: $(grep -iE '^error' "$log" | tail -n 1)" \
            "check the network and the proxy settings of pip, then call again; the whole log is $log"
    fi
    fail "pip failed: $(grep -iE '^ *error' "$log" | tail -n 1)" "the whole log is $log"
fi
touch "$venv/.$extras" "$venv/.demo"
