# Sourced by ./quickstart and ./test: makes .venv once, and again only when what it needs has changed.
#
#   prepare_environment EXTRAS [WISHED]     EXTRAS: "torch" or "torch,test"; sets $python to the environment's interpreter. WISHED: an extra whose
#                                           packages may be missing where packages come from; what needs them is skipped with the reason
#
# torch is installed first and pinned: with it in place, no later requirement can bring another build of it.

TORCH="torch==2.13.0"

# The environment's modules keep their bytecode, whatever the caller's shell says: compiling torch's anew costs every process seconds.
unset PYTHONDONTWRITEBYTECODE

say() { printf '%s\n' "$*" >&2; }

die() { # message, hint
  say "error: $1"
  [ -z "${2:-}" ] || say "hint: $2"
  exit 1
}

find_python() {
  local candidate distributed=/usr/bin/python3.11
  # A distribution builds its interpreter with measured profiles; one that a version manager compiled took 8 % longer for the tests.
  # Only where it can make environments and has its headers, which torch.compile includes.
  "$distributed" -c 'import ensurepip, os, sysconfig, venv; os.stat(sysconfig.get_path("include") + "/Python.h")' 2>/dev/null || distributed=
  for candidate in ${PYTHON:+"$PYTHON"} $distributed python3.11 python3 python3.12 python3.13 python3.14; do
    if command -v "$candidate" >/dev/null 2>&1 && "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
      base_python=$(command -v "$candidate")
      return
    fi
  done
  local found="none"
  if command -v python3 >/dev/null 2>&1; then found=$(python3 --version 2>&1); fi
  die "Python 3.11 or newer is needed, found: $found" "install Python 3.11, or name one: PYTHON=/path/to/python3.11 $0"
}

require_venv() {
  "$base_python" -c 'import ensurepip, venv' 2>/dev/null && return
  local version
  version=$("$base_python" -c 'import sys; print("%d.%d" % sys.version_info[:2])')
  die "$base_python cannot make virtual environments: it lacks ensurepip" \
    "on Debian or Ubuntu: apt install python3-venv   (or python$version-venv)"
}

# What the environment depends on. Editable installs hold the path of the tree, so a moved tree is installed again.
fingerprint() {
  { cat "$root/pyproject.toml"; echo "$TORCH $root"; "$base_python" -c 'import sys; print(sys.version)'; } | sha256sum | cut -d' ' -f1
}

prepare_environment() {
  local extras=$1 wished=${2:-} venv="$root/.venv" wanted installed=""
  find_python
  exec 9<"$root/pyproject.toml"
  if command -v flock >/dev/null 2>&1; then flock 9; fi # two at once: the second waits and finds it made
  wanted=$(fingerprint)
  python="$venv/bin/python"
  if [ -e "$venv" ] && { [ -e "$venv/.incomplete" ] || ! "$python" -c 'import pip._internal' >/dev/null 2>&1; }; then
    say "The environment in .venv is not whole (an earlier set-up was interrupted?): making it again."
    rm -rf "$venv"
  fi
  [ ! -f "$venv/.installed" ] || installed=$(cat "$venv/.installed")
  case "$installed" in
    "$wanted torch,test docs" | "$wanted $extras $wished") exec 9<&-; return ;;
  esac
  require_venv
  if [ ! -e "$venv" ]; then
    say "Making a virtual environment in .venv with $("$base_python" --version) ..."
    mkdir "$venv"
    touch "$venv/.incomplete"
    "$base_python" -m venv "$venv" || die "python -m venv failed" "see the message above"
  fi
  touch "$venv/.incomplete"
  rm -f "$venv/.installed"
  say "Installing $TORCH ..."
  pip_install "$TORCH"
  say "Installing meshwright[$extras] ..."
  pip_install --editable "$root[$extras]"
  "$python" -c 'import torch, meshwright' || die "the installed packages cannot be imported" "see the message above; remove .venv to start afresh"
  if [ -n "$wished" ]; then
    "$python" -m pip install --quiet --disable-pip-version-check --no-input --no-compile --editable "$root[$wished]" ||
      say "The extra '$wished' cannot be installed: what needs it is skipped."
  fi
  echo "$wanted $extras $wished" >"$venv/.installed"
  rm -f "$venv/.incomplete"
  exec 9<&-
}

pip_install() {
  "$python" -m pip install --quiet --disable-pip-version-check --no-input --no-compile "$@" ||
    die "pip install $* failed" "check the network and pip's configuration, then run this again: it continues where it stopped"
}
