// Command empty does nothing: what it costs is what any program of Go costs, the floor that the benchmarks compare with.
package main

func main() {}
