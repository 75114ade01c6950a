#compdef @program@
# Completion of @program@ in zsh.
_@name@() {
  local -a found
  local line skip=${1:-1}
  for line in ${(f)"$("${(Q@)words[1,skip]}" __complete "${(Q@)words[skip+1,CURRENT]}" 2>/dev/null)"}; do
    [[ $line == :* ]] || found+=("${${line%%$'\t'*}//:/\\:}:${${line#*$'\t'}#$line}")
  done
  _describe '@program@' found
}
_@name@_alone() { _@name@ 1 }
compdef _@name@_alone @program@
