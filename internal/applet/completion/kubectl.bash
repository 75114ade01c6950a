# kubectl istio-cni; everything else is completed by kubectl's own completion.
_@name@_or_kubectl() {
  if [[ $COMP_CWORD -gt 1 && ${COMP_WORDS[1]} == istio-cni ]]; then
    _@name@ 2
  elif declare -F __start_kubectl >/dev/null; then
    __start_kubectl
  fi
}
complete -o default -F _@name@_or_kubectl kubectl
