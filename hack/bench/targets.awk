# Compares the results of "go test -bench" on standard input with the targets. Prints a line per target with the median of
# all runs. A missed target is printed and is not a failure, because the machine may be busy.
BEGIN {
  target("BenchmarkCommand/VERSION", "x-empty-cpu", 3)
  target("BenchmarkCommand/ADD/mesh-agent", "x-empty-cpu", 5)
  target("BenchmarkCommand/ADD/mesh-api", "x-empty-cpu", 8)
  target("BenchmarkCommand/VERSION", "x-reference-cpu", 0.1)
  target("BenchmarkCommand/ADD/mesh-agent", "x-reference-cpu", 0.1)
  target("BenchmarkHundredPods/agent", "p99@8/p50@1", 6)
}

function target(name, unit, most) {
  names[++targets] = name; units[targets] = unit; limits[targets] = most
}

function median(key,    i, j, k, held, list) {
  for (i = 1; i <= count[key]; i++) list[i] = values[key, i]
  for (i = 2; i <= count[key]; i++) {
    held = list[i]
    for (j = i - 1; j >= 1 && list[j] > held; j--) list[j + 1] = list[j]
    list[j + 1] = held
  }
  k = int((count[key] + 1) / 2)
  return list[k]
}

/^Benchmark/ {
  name = $1
  sub(/-[0-9]+$/, "", name)
  for (i = 3; i < NF; i += 2) {
    key = name SUBSEP $(i + 1)
    values[key, ++count[key]] = $i
  }
}

END {
  for (t = 1; t <= targets; t++) {
    key = names[t] SUBSEP units[t]
    if (!(key in count)) continue
    got = median(key)
    printf "target: %-34s %-12s %7.2f, at most %s: %s\n", names[t], units[t], got, limits[t], got <= limits[t] ? "met" : "missed"
  }
}
