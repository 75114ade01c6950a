// Command empty does nothing. Its run time is what any Go program takes, the lower bound in the benchmarks.
package main

func main() {}
