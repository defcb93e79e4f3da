# Sourced by scripts/quickstart and scripts/test: finds a Python, makes an environment, installs jaxlm into it.
#
#   prepare ENVIRONMENT EXTRAS [VERSION]    makes and fills it, unless it is up to date
#   step NAME COMMAND...                    runs a command and says how long it took
#   fail CODE LINE                          ends with one clear line
#
# JAXLM_PYTHON names the interpreter to use instead of the newest one.

SUPPORTED="3.13 3.12 3.11" # newest first; those that the tests have run on

fail() {
  printf 'error: %s\n' "$2" >&2
  exit "$1"
}

step() {
  local begun=$SECONDS code
  printf '== %s\n' "$1"
  shift
  "$@"
  code=$?
  printf '== %s%d s\n\n' "$([ $code -eq 0 ] || printf 'exit code %d after ' $code)" $((SECONDS - begun))
  return $code
}

# Prints every Python that might be there: the one asked for, PATH, pyenv's versions folder.
candidates() {
  local name root
  for name in $(compgen -c python3. | grep -xE 'python3\.[0-9]+' | sort -u) python3 python; do
    type -ap "$name"
  done
  for root in "${PYENV_ROOT:-}" "${HOME:-}/.pyenv"; do
    [ -d "$root/versions" ] && printf '%s\n' "$root"/versions/*/bin/python
  done
}

# Sets PYTHON to the newest supported Python that can make an environment, or to one that is newer still where there is no
# other; only to VERSION where that is given.
find_python() {
  local wanted=${1:-$SUPPORTED} version path answer found="" unable="" newer="" minor=${SUPPORTED%% *}
  local probe='import sys; print("%d.%d" % sys.version_info[:2]); import ensurepip, venv'
  if [ -n "${JAXLM_PYTHON:-}" ] && [ -z "${1:-}" ]; then
    answer=$("$JAXLM_PYTHON" -c "$probe" 2>&1) || fail 66 "JAXLM_PYTHON=$JAXLM_PYTHON cannot make an environment: ${answer##*$'\n'}"
    case $answer in 3.1[1-9] | 3.[2-9][0-9]) ;; *) fail 66 "JAXLM_PYTHON=$JAXLM_PYTHON is Python $answer; jaxlm needs 3.11 or newer" ;; esac
    PYTHON=$JAXLM_PYTHON
    return
  fi
  # A pyenv shim exists for versions that are not active, so each candidate has to answer for itself.
  while read -r path; do
    if answer=$("$path" -c "$probe" 2>/dev/null); then
      found+="$answer $path"$'\n'
    elif [ -n "$answer" ]; then
      unable+=" $path ($answer)"
    fi
  done < <(candidates)
  for version in $wanted; do
    while read -r answer path; do
      if [ "$answer" = "$version" ]; then
        PYTHON=$path
        return
      fi
    done <<<"$found"
  done
  minor=${minor#3.}
  while read -r answer path; do
    if [ -z "${1:-}" ] && [ "${answer%%.*}" = 3 ] && [ "${answer#3.}" -gt "$minor" ]; then
      minor=${answer#3.} newer=$path
    fi
  done <<<"$found"
  if [ -n "$newer" ]; then
    echo "Python 3.$minor is newer than those that the tests have run on (${SUPPORTED// /, }); there is no other here."
    PYTHON=$newer
    return
  fi
  if [ -n "$unable" ]; then
    fail 66 "no Python of version ${wanted// / or } that can make an environment;$unable lacks the venv module (on Debian: apt install python3-venv)"
  fi
  fail 66 "no Python of version ${wanted// / or } on PATH or in pyenv's versions folder; install one, or name it with JAXLM_PYTHON=/path/to/python"
}

# prepare ENVIRONMENT EXTRAS [VERSION]: EXTRAS are separated by commas and may be empty.
prepare() {
  local environment=$1 extras=$2 version=${3:-} stamp=$1/jaxlm-stamp log=$1/jaxlm-pip.log
  local wanted have="" known=""
  wanted=$(cat pyproject.toml scripts/constraints.txt scripts/setup.sh | cksum)
  if "$environment/bin/python" -c '' 2>/dev/null; then
    [ -n "$version" ] || same_python "$environment/bin/python"
    [ ! -f "$stamp" ] || { read -r have; read -r known; } <"$stamp"
    if [ "$have" = "$wanted" ] && covers "$known" "$extras"; then
      printf '== %s is up to date\n\n' "$environment"
      return
    fi
  else
    local free
    free=$(df -Pk . | awk 'NR == 2 { print int($4 / 1024) }')
    [ "${free:-9999}" -ge 2000 ] || fail 74 "$environment needs about 2 GB of disk; $free MB are free in $PWD"
    find_python "$version"
    step "making $environment with $("$PYTHON" --version 2>&1) ($PYTHON)" "$PYTHON" -m venv --clear "$environment" ||
      fail 74 "$PYTHON could not make $environment"
  fi
  # What was asked for before stays installed.
  extras=$(tr ',' '\n' <<<"$known,$extras" | sort -u | sed '/^$/d' | paste -sd, -)
  step "installing jaxlm${extras:+[$extras]} and what it needs (about 1 GB; pip's words go to $log)" \
    install "$environment" "$extras" "$log" || {
    tail -n 5 "$log" >&2
    fail 74 "pip could not install jaxlm into $environment: $(grep -E '^ERROR|Errno' "$log" | tail -n 1)"
  }
  printf '%s\n%s\n' "$wanted" "$extras" >"$stamp"
}

# Fails where JAXLM_PYTHON asks for another version than an environment has.
same_python() {
  local version='import sys; print("%d.%d" % sys.version_info[:2])' has wants
  [ -n "${JAXLM_PYTHON:-}" ] || return 0
  has=$("$1" -c "$version") wants=$("$JAXLM_PYTHON" -c "$version" 2>/dev/null)
  [ "$has" = "$wants" ] || fail 66 "${1%/bin/python} has Python $has, JAXLM_PYTHON is ${wants:-no Python}; remove ${1%/bin/python} to change it"
}

install() {
  # Bytecode is made at the first import: pip would compile 12,900 files, of which few are imported.
  local pip=("$1/bin/python" -m pip install --disable-pip-version-check --no-input --no-compile -e ".${2:+[$2]}")
  "${pip[@]}" -c scripts/constraints.txt >"$3" 2>&1 && return
  grep -qE 'ResolutionImpossible|No matching distribution' "$3" || return
  echo "   the tested versions cannot be had here; taking the newest that pyproject.toml allows"
  "${pip[@]}" >>"$3" 2>&1
}

covers() {
  local extra
  for extra in ${2//,/ }; do
    case ",$1," in *",$extra,"*) ;; *) return 1 ;; esac
  done
}

# mention_accelerator PYTHON [DEVICES]: says so where there is an accelerator that the installed jax will not use. DEVICES is
# the folder where the system shows it.
mention_accelerator() {
  local python=$1 devices=${2:-/dev} extra=""
  if [ -e "$devices/nvidia0" ] || nvidia-smi -L >/dev/null 2>&1; then
    has_package "$python" jax-cuda12-plugin || has_package "$python" jax-cuda13-plugin || extra=$(cuda_extra)
    [ -z "$extra" ] || echo "There is an NVIDIA GPU that the installed jax will not use. For it:"
  elif [ -e "$devices/accel0" ] || { [ -d "$devices/vfio" ] && [ -n "${TPU_ACCELERATOR_TYPE:-}" ]; }; then
    has_package "$python" libtpu || extra=tpu
    [ -z "$extra" ] || echo "There is a TPU that the installed jax will not use. For it:"
  fi
  [ -z "$extra" ] || printf "  %s -m pip install -e '.[%s]'\n\n" "$python" "$extra"
}

# Prints the extra with the newest CUDA that the driver can run, by what nvidia-smi says of it.
cuda_extra() {
  local major
  major=$(nvidia-smi 2>/dev/null | sed -n '/CUDA Version/ { s/.*CUDA Version: *\([0-9]*\).*/\1/p; q; }')
  if [ "${major:-13}" -ge 13 ]; then echo cuda; else echo cuda12; fi
}

has_package() {
  "$1" -c 'import sys, importlib.metadata as m; m.version(sys.argv[1])' "$2" 2>/dev/null
}
