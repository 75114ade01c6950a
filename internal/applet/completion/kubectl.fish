# kubectl istio-cni: fish loads kubectl's own completion at its first use, which removes what was there before.
complete -C 'kubectl ' >/dev/null 2>&1
complete -c kubectl -n 'test (count (commandline -opc)) -gt 1; and test (commandline -opc)[2] = istio-cni' -f -a '(_@name@ 2)'
