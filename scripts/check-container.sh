#!/usr/bin/env bash
# Checks on a clean Debian 12, made by debootstrap, what a user meets there. Needs root and the package debootstrap, and no
# container engine.
#   scripts/check-container.sh [PART...]    all without arguments, some ten minutes on two cores:
#   sizes        prints what each tier of scripts/setup.sh downloads; fails where that of the quickstart is over 160 MB
#   container    runs the commands of Containerfile, each of its stages in a clean folder
#   quickstart   runs scripts/quickstart.sh on the files of this checkout
#   scripts/check-container.sh --parse [FILE]   only reads Containerfile, or another; needs nothing
# The folders are under build/clean; the one that debootstrap made is used again (delete it to renew it).
set -euo pipefail
cd "$(dirname "$0")/.."
clean=build/clean
most_mb=160

# read_containerfile FILE: its instructions, one a line, into `instructions`. Fails where this script could not run one.
read_containerfile() {
  local file=$1 line text="" word words stages=" "
  instructions=()
  while IFS= read -r line || [ -n "$line" ]; do
    [[ $line =~ ^[[:space:]]*(#|$) ]] && continue
    if [[ $line == *\\ ]]; then
      text+=${line%\\}
      continue
    fi
    text+=$line
    instructions+=("$text")
    text=""
  done <"$file"
  [ -z "$text" ] && [ ${#instructions[@]} -gt 0 ] && [[ ${instructions[0]} == FROM\ * ]] ||
    { echo "$file: no FROM at the start, or nothing after a last backslash" >&2; return 1; }
  for line in "${instructions[@]}"; do
    case $line in
      "FROM docker.io/library/debian:12"* | "WORKDIR /"* | "COPY . /"* | "COPY --from="*" /"*" /"*) ;;
      "RUN "* | "ENTRYPOINT ["*"]" | "CMD ["*"]") ;;
      *) echo "$file: $0 does not know how to do: $line" >&2; return 1 ;;
    esac
    # Names of stages become folders that are made anew, so they are names and nothing else.
    read -ra words <<<"$line"
    if [ "${words[0]}" = FROM ] && [ ${#words[@]} -gt 2 ]; then
      [[ ${#words[@]} = 4 && ${words[2]} = AS && ${words[3]} =~ ^[a-z][a-z0-9]*$ && " base sizes quickstart " != *" ${words[3]} "* ]] ||
        { echo "$file: not a name for a stage: $line" >&2; return 1; }
      stages+="${words[3]} "
    fi
    if [[ $line == "COPY "* && ( $line == *..* || ( ${words[1]} == --from=* && $stages != *" ${words[1]#--from=} "* ) ) ]]; then
      echo "$file: a path with .. or a stage that is not above: $line" >&2
      return 1
    fi
    for word in $line; do
      [[ $word != scripts/* ]] || [ -x "$word" ] || { echo "$file: there is no program $word" >&2; return 1; }
    done
  done
}

if [ "${1:-}" = --parse ]; then
  read_containerfile "${2:-Containerfile}"
  printf '%s\n' "${instructions[@]}"
  exit 0
fi
[ $# -gt 0 ] || set -- sizes container quickstart
for part in "$@"; do
  case $part in
    sizes | container | quickstart) ;;
    *) echo "$part: no such part; see the top of $0" >&2; exit 2 ;;
  esac
done
if [ "$(id -u)" != 0 ]; then
  echo "$0: needs root, to make a folder with a Debian of its own and to run commands in it" >&2
  exit 1
fi
if ! command -v debootstrap >/dev/null; then
  echo "$0: needs debootstrap; as root: apt-get install debootstrap" >&2
  exit 1
fi

# Debian 12's package sources as this machine's apt has them, else Debian's own.
debian_sources() {
  local found
  found=$(apt-get indextargets --format '$(REPO_URI) $(RELEASE) $(COMPONENT)' 'Created-By: Packages' 2>/dev/null |
    grep -E '/debian(-security)?/? bookworm(-updates|-security)? main$' | sort -u || true)
  echo "${found:-http://deb.debian.org/debian bookworm main}" | sed 's/^/deb /'
}

make_base() {
  [ -e $clean/base/made ] && return
  rm -rf $clean/base
  mkdir -p $clean
  local mirror
  mirror=$(debian_sources | awk '$3 == "bookworm" { print $2; exit }')
  echo "debootstrap: Debian 12 from $mirror (log: $clean/debootstrap.log)"
  debootstrap --variant=minbase bookworm $clean/base "$mirror" >$clean/debootstrap.log
  debian_sources >$clean/base/etc/apt/sources.list
  touch $clean/base/made
}

# The folders belong to root: only the Debian that they are made from stays.
clean_up() { find $clean -mindepth 1 -maxdepth 1 -type d ! -name base -exec rm -rf --one-file-system {} +; }

# fresh NAME: a clean folder of this name; `root` is its path.
fresh() {
  root=$PWD/$clean/$1
  rm -rf "$root"
  cp -a --reflink=auto $clean/base "$root"
  cp /etc/resolv.conf /etc/hosts "$root/etc/"
}

# inside ROOT FOLDER COMMAND: by a shell and as root, with nothing of this machine's but its devices and network.
inside() {
  local passed=() name
  for name in http_proxy https_proxy no_proxy; do
    [ -z "${!name:-}" ] || passed+=("$name=${!name}")
  done
  unshare --mount --pid --fork --kill-child bash -euc '
    root=$1 folder=$2 command=$3
    shift 3
    mount -t proc proc "$root/proc"
    mount --rbind /dev "$root/dev"
    mount -t tmpfs tmpfs "$root/dev/shm"
    exec chroot "$root" /usr/bin/env -i PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin HOME=/root "$@" \
      /bin/sh -c "cd \"\$0\" && eval \"\$1\"" "$folder" "$command"' - "$1" "$2" "$3" "${passed[@]}" </dev/null
}

# copy_checkout FOLDER: what git would have there, with the changes of this working tree.
copy_checkout() {
  mkdir -p "$1"
  git ls-files -z --cached --others --exclude-standard | tar -c --null --files-from=- --ignore-failed-read | tar -x -C "$1"
}

sizes() {
  local tier install bytes over=no
  fresh sizes
  inside "$root" / "apt-get -qq update"
  printf '\n%-6s %9s %15s   %s\n' tier packages "MB to download" "on disk"
  for tier in run test ci; do
    install="install -y --no-install-recommends $(scripts/setup.sh --list $tier | tr '\n' ' ')"
    # Lines of an address, a name, a size and a checksum.
    inside "$root" / "apt-get --print-uris $install" | grep "^'" >$clean/addresses
    bytes=$(awk '{ sum += $3 } END { print sum }' $clean/addresses)
    printf '%-6s %9d %15.1f   %s\n' $tier "$(wc -l <$clean/addresses)" "$(awk "BEGIN { print $bytes / 1e6 }")" \
      "$(inside "$root" / "apt-get --assume-no ${install/-y /}" | sed -n 's/^After this operation, \(.*\) of additional.*/\1/p')"
    [ $tier != run ] || [ "$bytes" -le $((most_mb * 1000000)) ] || over=yes
  done
  rm -rf "$root"
  [ $over = no ] || { echo "sizes: the quickstart's packages are over $most_mb MB" >&2; return 1; }
}

container() {
  local line folder=/ stage from to words
  read_containerfile Containerfile
  for line in "${instructions[@]}"; do
    printf '\n== %s\n' "$line"
    read -ra words <<<"$line"
    case $line in
      FROM\ *)
        stage=${words[3]:-last} folder=/
        fresh "$stage"
        ;;
      WORKDIR\ *)
        folder=${words[1]}
        mkdir -p "$root$folder"
        ;;
      "COPY . "*) copy_checkout "$root${words[2]}" ;;
      COPY\ *)
        from=$PWD/$clean/${words[1]#--from=}${words[2]}
        to=$root${words[3]}
        mkdir -p "$to"
        cp $from "$to"  # the pattern is the Containerfile's
        ls -l "$to"
        ;;
      RUN\ *) inside "$root" "$folder" "${line#RUN }" 2>&1 | tee "$clean/$stage.log" | tail -25 ;;
    esac
  done
}

quickstart() {
  fresh quickstart
  copy_checkout "$root/src"
  inside "$root" /src scripts/quickstart.sh
}

make_base
trap clean_up EXIT
for part in "$@"; do
  printf '\n== %s (%s)\n' "$part" "$(date +%T)"
  $part
done
