# Completion of @program@ in bash.
_@name@() {
  local before=${COMP_LINE:0:COMP_POINT} skip=${1:-1} words line word
  read -ra words <<<"$before"
  [[ $before != *[[:blank:]] ]] || words+=("")
  word=${words[${#words[@]}-1]}
  COMPREPLY=()
  while IFS=$'\t' read -r line _; do
    [[ $line == :* ]] || COMPREPLY+=("$line")
  done < <("${words[@]:0:skip}" __complete "${words[@]:skip}" 2>/dev/null)
  # bash replaces only what follows the sign.
  if [[ $word == *=* && $COMP_WORDBREAKS == *=* ]]; then
    COMPREPLY=("${COMPREPLY[@]#"${word%%=*}"=}") word=${word#*=}
  fi
  [[ $word != *:* || $COMP_WORDBREAKS != *:* ]] || COMPREPLY=("${COMPREPLY[@]#"${word%:*}":}")
}
_@name@_alone() { _@name@ 1; }
complete -F _@name@_alone @program@
