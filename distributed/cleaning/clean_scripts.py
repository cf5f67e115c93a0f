"""Shell scripts that :mod:`distributed.cleaning.clean` runs on a machine: POSIX sh, as a bare machine has nothing else.

No script follows a symbolic link out of our folder: a linked folder is left alone, and ``rm -r`` and ``du`` treat a
link inside as a link.
"""

from __future__ import annotations

SURVEY = r"""blob=$1 file=$HOME/.ssh/authorized_keys; shift
keys() {
  [ -n "$blob" ] && grep -nF -- "$blob" "$file" | while IFS=: read -r number _; do
    printf 'key\t%s:%s\n' "$file" "$number"
  done
  grep -v '^[[:space:]]*#' "$file" | grep ' muster@' | grep -vF -- "${blob:-no key of ours}" |
    sed 's/^.* muster@/foreign	muster@/'
}
folder() { [ -d "$1" ] && [ ! -L "$1" ]; }
hex() {
  for inner in "$1"/*; do
    inner=${inner##*/}
    case $inner in '*') continue;; *[!0-9a-f]*) return 1;; esac
    [ ${#inner} -eq "$2" ] || return 1
  done
}
ours() {
  folder "$1" || return 1
  case ${1##*/} in blobs) hex "$1" 2;; trees) hex "$1" 64;; agent|envs) hex "$1" 16;; *) return 1;; esac
}
sizes() { [ $# -eq 0 ] || du -sk -- "$@" 2>/dev/null | sed 's/^/part	/'; }
parts() {
  top=$1 whole=$2; set --
  for path in "$top"/* "$top"/.[!.]*; do
    if [ ! -e "$path" ] && [ ! -L "$path" ] || [ "$path" = "$top/runs" ]; then continue; fi
    if [ -n "$whole" ] || ours "$path"; then set -- "$@" "$path"; else printf 'left\t%s\n' "$path"; fi
  done
  sizes "$@"
}
runs() {
  top=$1 whole=$2; set --
  folder "$top" || return
  for path in "$top"/*; do
    run=${path##*/} mine=$whole
    case $run in *[!A-Za-z0-9._-]*) continue;; esac
    folder "$path" || continue
    for state in "$path"/*/agent.json; do
      [ -f "$state" ] || continue
      mine=1
      group=$(sed -n 's/.*"worker": *\([0-9][0-9]*\).*/\1/p' "$state")
      printf 'group\t%s\t%s\n' "$group" "$run"
      held=${state%agent.json}lease
      if [ -f "$held" ]; then printf 'lease\t%s\t%s\n' "$run" "$(cat "$held" 2>/dev/null)"; fi
    done
    if [ -n "$mine" ]; then set -- "$@" "$path"; else printf 'left\t%s\n' "$path"; fi
  done
  sizes "$@"
}
processes() {
  ps -axww -o pid=,pgid=,command= 2>/dev/null && return
  ps -o pid,pgid,args 2>/dev/null && return
  for folder in /proc/[0-9]*; do
    { IFS= read -r line < "$folder/stat"; } 2>/dev/null || continue
    set -- ${line##*) }
    printf '%s %s %s\n' "${folder#/proc/}" "$3" "$(tr '\000\n' '  ' < "$folder/cmdline" 2>/dev/null)"
  done
}
[ ! -f "$file" ] || keys
printf 'here\t%s\t%s/%s/%s\n' "$(date +%s)" "$(uname -n)" "$(cat /proc/sys/kernel/random/boot_id 2>/dev/null)" \
  "$(readlink /proc/self/ns/pid 2>/dev/null)"
printf 'self\t%s\n' $$
for root; do
  case $root in "~/"*) root=$HOME/${root#"~/"};; /*) ;; *) root=$HOME/$root;; esac
  whole=
  if [ "$root" = "$HOME/.cache/muster" ] && [ ! -L "$root" ]; then whole=1; fi
  real=$(cd -- "$root" 2>/dev/null && pwd -P) || continue
  printf 'root\t%s\t%s\n' "$whole" "$real"
  parts "$real" "$whole"
  runs "$real/runs" "$whole"
done
echo ps
processes"""
"""``BLOB ROOT...``: prints lines of fields, separated by tabs; see :func:`distributed.cleaning.clean._read`.

``~/.cache/muster`` is entirely ours. In any other folder only paths that look like our files are listed as a ``part``,
as the user may keep other files there.
"""

WHERE = r"""for pid; do
  folder=$(readlink "/proc/$pid/cwd" 2>/dev/null) ||
  folder=$(lsof -a -p "$pid" -d cwd -Fn 2>/dev/null | sed -n 's/^n//p')
  printf '%s\t%s\n' "$pid" "$folder"
done"""
"""``PID...``: prints the working folder of each."""

END = r"""kill -TERM "$@" 2>/dev/null
for wait in 1 2 3 4 5 6 7 8 9 10; do
  alive=
  for pid; do kill -0 "$pid" 2>/dev/null && alive=1; done
  [ -n "$alive" ] || exit 0
  sleep 0.2 2>/dev/null || sleep 1
done
kill -KILL "$@" 2>/dev/null
exit 0"""
"""``PID...``: terminates the processes, after about 2 s by force."""

REMOVE = r"""cd / || exit 1
while IFS= read -r line; do
  path=${line#* }
  case $line in
    "tree "/*) [ -L "${path%/*}" ] || rm -rf -- "$path";;
    "empty "/*) rmdir -- "$path" 2>/dev/null;;
  esac
done
rmdir -- "${TMPDIR:-/tmp}/torchinductor_$(id -un)" 2>/dev/null
exit 0"""
"""``tree PATH`` removes a folder with everything in it, ``empty PATH`` one that is empty; on stdin.

PyTorch makes a folder for compiled code whenever it trains; it goes as well if it is empty.
"""

FORGET = r"""umask 077
blob=$1 file=$HOME/.ssh/authorized_keys hops=0
[ -f "$file" ] && [ -n "$blob" ] || exit 0
while [ -L "$file" ] && [ $hops -lt 20 ]; do
  to=$(readlink "$file"); hops=$((hops + 1))
  case $to in /*) file=$to;; *) file=$(dirname "$file")/$to;; esac
done
part=$file.muster-$$
trap 'rm -f -- "$part"' EXIT
trap 'exit 1' HUP INT TERM
cp -p -- "$file" "$part" || exit 1
grep -vF -- "$blob" "$file" > "$part"
[ $? -le 1 ] || exit 1
before=$(grep -c '' "$file") after=$(grep -c '' "$part") gone=$(grep -cF -- "$blob" "$file")
if [ $((after + gone)) -ne "$before" ]; then echo "$file could not be copied" >&2; exit 1; fi
mv -f -- "$part" "$file" || exit 1
if [ ! -s "$file" ] && [ $hops -eq 0 ]; then rm -f -- "$file"; rmdir -- "$HOME/.ssh" 2>/dev/null; exit 0; fi
if command -v restorecon >/dev/null 2>&1; then restorecon -F "$file" >/dev/null 2>&1; fi
exit 0"""
"""Removes the lines with a key from authorized_keys: the file is replaced atomically, with its owner and permissions.

A file that contained nothing else is deleted.
"""
