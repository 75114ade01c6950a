// Command empty does nothing. Its run time is that of any Go program, the lower bound in the benchmarks.
package main

func main() {}
