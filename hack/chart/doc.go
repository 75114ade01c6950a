// Command chart renders the Helm chart of this repository with Helm's own engine, without a helm program.
//
// It promises the output of "helm template": values are validated by the chart's schema, and objects are in Helm's order of
// installation. It never connects to a cluster. Start reading at render.
//
// list.go has the list of renderings that must be valid. The tests of this package, which test the chart, render each of
// them; with --all the program writes them to files, for tests that apply them. support_test.go has the tests' helpers.
package main
