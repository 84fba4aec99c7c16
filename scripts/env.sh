# Sourced by the other scripts: they run in .venv, at the root of the repository.

cd "$(dirname "${BASH_SOURCE[0]}")/.."

# use_venv EXTRAS: makes .venv if there is none, installs the project with EXTRAS into it if that
# was not done since its requirements last changed, and enters it.
use_venv() {
    local extras=$1
    local stamp=.venv/installed-$extras
    [[ -x .venv/bin/python ]] || python3 -m venv .venv
    if [[ ! -e $stamp || pyproject.toml -nt $stamp || constraints.txt -nt $stamp ]]; then
        echo "Installing into .venv (extras: $extras)"
        .venv/bin/python -m pip install --quiet -c constraints.txt -e ".[$extras]"
        touch "$stamp"
    fi
    source .venv/bin/activate
}
