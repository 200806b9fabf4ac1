# Sourced by the scripts beside it: goes to the repository root and defines
#     prepare [EXTRA...]    sees to a .venv that holds fusedattn, editable, with these extras; at once where it does already
# A .venv that was here before is used as it is and never removed.

set -euo pipefail
CDPATH='' cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.."

say() { printf '%s\n' "$@" >&2; }

# A command may exist and still not work (a pyenv shim of a version that is not active), so each is run.
new_enough() { "$1" -c 'import sys; sys.exit(sys.version_info < (3, 10))' >/dev/null 2>&1; }
has_uv() { uv --version >/dev/null 2>&1; }

# .venv/unfinished stands until .venv is whole: after an interruption the next run starts over.
begin_venv() { rm -rf .venv && mkdir .venv && : >.venv/unfinished; }

make_venv() {
    local python usable='' said=''
    for python in python3 python3.13 python3.12 python3.11 python3.10; do
        new_enough "$python" || continue
        usable=${usable:-$python}
        begin_venv
        if said=$("$python" -m venv .venv 2>&1); then
            rm .venv/unfinished
            return
        fi
    done
    if has_uv; then
        begin_venv
        if uv venv --quiet --allow-existing --python "${usable:->=3.10,<3.14}" .venv >&2; then
            rm .venv/unfinished
            return
        fi
    fi
    rm -rf .venv
    if [ -z "$usable" ]; then
        say "fusedattn needs Python 3.10 or newer: python3 here is $(python3 -c \
            'import sys; print("%d.%d.%d" % sys.version_info[:3])' 2>/dev/null || echo missing)," \
            "and no python3.10 to python3.13 on PATH works. Install one of them, or uv, which brings its own."
    else
        say "$said" "fusedattn: $usable -m venv could not make .venv. Either of these helps:" \
            "    apt install python3-venv    (Debian, Ubuntu)" \
            "    uv on PATH                  (https://docs.astral.sh/uv)"
    fi
    exit 1
}

# A subshell, so that its variables and its lock (two scripts at once would both install) end with it.
prepare() (
    if command -v flock >/dev/null; then flock 9 || true; fi
    stamp=.venv/fusedattn-installed
    state=$({ cat pyproject.toml && pwd; } | cksum)
    stale=''
    [ -x .venv/bin/python ] || stale=yes
    for extra in base "$@"; do
        grep -qsxF "$state $extra" "$stamp" || stale=yes
    done
    [ -n "$stale" ] || exit 0

    if [ -e .venv/unfinished ]; then rm -rf .venv; fi
    if [ ! -e .venv ]; then make_venv; fi
    if ! new_enough .venv/bin/python; then
        say "fusedattn: .venv holds no working Python 3.10 or newer. Remove it and run this again."
        exit 1
    fi

    rm -f "$stamp"
    extras=$(IFS=,; echo "$*")
    target=.${extras:+[$extras]}
    say "fusedattn: installing $target into .venv; the first time brings torch and takes minutes"
    if .venv/bin/python -c 'import pip' 2>/dev/null; then
        .venv/bin/python -m pip install --disable-pip-version-check -e "$target" >&2
    elif has_uv; then
        uv pip install --python .venv/bin/python -e "$target" >&2
    else
        say "fusedattn: .venv has no pip and uv is not on PATH. Remove .venv, or install uv, and run this again."
        exit 1
    fi
    for extra in base "$@"; do echo "$state $extra"; done >"$stamp"
) 9<pyproject.toml
