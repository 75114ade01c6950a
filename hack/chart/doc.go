// Command chart renders the Helm chart of this repository with Helm's own engine, without a helm program.
//
// It promises that what it prints is what "helm template" would: the values are checked against the chart's schema, and
// the objects stand in the order in which Helm installs them. It never talks to a cluster. Start reading at render.
//
// list.go has the renderings that have to be good. The tests of this package, which are the chart's, render each of them;
// with --all the program writes them to files, for those who apply them. See support_test.go for how one asks about a
// rendering.
package main
