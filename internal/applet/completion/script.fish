# Completion of @program@ in fish.
function _@name@
    set -l words (commandline -opc)
    set -l skip $argv[1]
    $words[1..$skip] __complete $words[(math $skip + 1)..-1] (commandline -ct) 2>/dev/null | string match -v -r '^:'
end
complete -c @program@ -f -a '(_@name@ 1)'
