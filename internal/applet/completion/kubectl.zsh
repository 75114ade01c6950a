# kubectl istio-cni; everything else is completed by kubectl's own completion.
_@name@_or_kubectl() {
  if (( CURRENT > 2 )) && [[ $words[2] == istio-cni ]]; then
    _@name@ 2
  elif (( $+functions[_kubectl] )); then
    _kubectl
  else
    _default
  fi
}
compdef _@name@_or_kubectl kubectl
